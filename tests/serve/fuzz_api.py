"""Sends what the OpenAPI document allows, and what it forbids, to a server with the demo model: nothing may be a 5xx,
and every answer must be as the document says. `test_generated_requests.py` does so with a few.

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


def main(examples: int = EXAMPLES) -> int:
    with rlx.auto_runner(demo.path(), compile_ahead=False) as runner:
        app = create_app(ServedModel(runner, "demo", ("gpt-4o",)), ServerOptions(log="none"))
        with serving(app) as url, tempfile.TemporaryDirectory() as folder:
            found = sent(url, Path(folder), examples)
            print(found.stdout)
            assert httpx.get(f"{url}/health").status_code == 200, "the server still answers"
    return found.returncode


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
