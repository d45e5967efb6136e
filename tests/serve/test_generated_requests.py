"""Requests that are generated from the OpenAPI document, what it allows and what it forbids: nothing may be a 5xx, and
every answer must be as the document says. They are a few, the same ones each time; TEST_EXAMPLES=100 sends more.

Requests name the model that is there, ask for few tokens, and have messages, so that they come through to the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance"
)
FEW = {"type": "integer", "maximum": 6, "minimum": 1}
NARROWED: dict[str, dict[str, Any]] = {
    "model": {"enum": ["demo", "gpt-4o"]},
    "max_tokens": FEW,
    "max_completion_tokens": FEW,
    "max_output_tokens": FEW,
    "n_predict": FEW,
    "num_predict": FEW,
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "best_of": {"type": "integer", "minimum": 1, "maximum": 3},
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 4,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "assistant", "system", "tool"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
                "tool_call_id": {"type": "string"},
            },
            "required": ["role", "content", "tool_call_id"],
        },
    },
}  # fmt: skip


def narrowed(document: Any) -> Any:
    """The document with properties that let requests come through, and without those that most requests lack."""
    if isinstance(document, list):
        return [narrowed(part) for part in document]
    if not isinstance(document, dict):
        return document
    found = {key: narrowed(value) for key, value in document.items()}
    properties = found.get("properties")
    if isinstance(properties, dict):
        found["properties"] = {name: NARROWED.get(name, value) for name, value in properties.items()}
        limits = [name for name in ("max_tokens", "max_output_tokens") if name in properties]
        if limits:
            found["required"] = sorted({*found.get("required", ()), *limits})
    return found


def sent(url: str, folder: Path, examples: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Sends generated requests to a server; the report, and a status that is not 0 if an answer was wrong."""
    document = folder / "openapi.json"
    document.write_text(json.dumps(narrowed(httpx.get(f"{url}/openapi.json", timeout=120).json())))
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["run", str(document), "--url", url, "--checks", CHECKS, "--request-timeout", "120", "--no-color"]
    command += ["--max-examples", str(examples), *options]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_answers_are_as_the_document_says(server: Any, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    more = int(os.environ.get("TEST_EXAMPLES", "0"))
    few = ("--phases", "fuzzing", "--generation-deterministic", "--no-shrink", "--continue-on-failure")
    found = sent(server.url, tmp_path, more or 2, *(() if more else few))
    assert found.returncode == 0, found.stdout
    assert server.http.get("/health").status_code == 200
