"""Sends what the OpenAPI document allows, and what it forbids, to a server with the demo model: nothing may be a 5xx.

    pip install schemathesis
    python tests/serve/fuzz_api.py [EXAMPLES]

It starts the server itself. Requests name the model that is there, ask for few tokens, and have messages, so that they
come through to the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from conftest import serving

import rlx
from rlx import demo
from rlx.serve import ServedModel, ServerOptions, create_app

EXAMPLES = 100
CHECKS = "not_a_server_error,response_headers_conformance"
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


def main(examples: int = EXAMPLES) -> int:
    with rlx.auto_runner(demo.path(), compile_ahead=False) as runner:
        app = create_app(ServedModel(runner, "demo", ("gpt-4o",)), ServerOptions(log="none"))
        with serving(app) as url, tempfile.TemporaryDirectory() as folder:
            document = Path(folder) / "openapi.json"
            document.write_text(json.dumps(narrowed(httpx.get(f"{url}/openapi.json").json())))
            command = ["schemathesis", "run", str(document), "--url", url, "--checks", CHECKS]
            command += ["--max-examples", str(examples), "--request-timeout", "120", "--no-color"]
            status = subprocess.run(command, cwd=folder).returncode
            assert httpx.get(f"{url}/health").status_code == 200, "the server still answers"
    return status


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
