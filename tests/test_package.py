"""The package as a user meets it: it starts quickly, its data is there, its errors and tables are what they say."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFReader

import rlx.errors
from rlx import demo
from rlx.errors import ModelFileError, RlxError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED_AS = {
    "markdown-it-py": "markdown_it",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "python-multipart": "python_multipart",
}  # where a package has another name than what it is imported as
EXTRAS = ("images", "structured", "serve", "ray", "otel")
COMES_WITH = dict.fromkeys(("starlette", "pydantic", "pydantic_core", "anyio"), "fastapi")  # what another brings along
COMES_WITH["h11"] = "uvicorn"
COMES_WITH |= {"pyarrow": "ray", "opentelemetry": "opentelemetry-sdk", "packaging": "huggingface_hub"}
NOT_IMPORTED = {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}  # parts of a package of another name
NOT_IMPORTED |= {"python_multipart"}  # Starlette imports it
HEAVY = {"numba", "llvmlite", "gguf", "safetensors", "jinja2", "rich", "tokenizers", "prompt_toolkit", "markdown_it"}
HEAVY |= {"PIL", "fastapi", "starlette", "pydantic", "anyio", "uvicorn", "prometheus_client", "llguidance", "ray"}
HEAVY |= {"python_multipart"}


def python(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize("command", ["import rlx", "import rlx, rlx.demo; rlx.demo.path()"])
def test_importing_is_light(command: str) -> None:
    """A warm start pays for what it uses: compilers and tokenizers are imported where they are needed."""
    loaded = python("-c", f"{command}; import sys; print(*sys.modules)").split()
    assert not HEAVY & {name.split(".")[0] for name in loaded}


# ---------------------------------------------------------------------------------------------------- distribution


@cache
def third_party_imports() -> set[str]:
    names = set()
    for path in (ROOT / "rlx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"rlx"}


def test_every_import_is_a_declared_dependency() -> None:
    """Of a plain install, and of the extras of the product."""
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for extra in EXTRAS for line in extras.get(extra, ())]
    named = {re.split(r"[<>=\[]", line)[0] for line in lines} - {"rlx"}
    declared = {IMPORTED_AS.get(name, name) for name in named}
    assert third_party_imports() - COMES_WITH.keys() <= declared
    assert declared - third_party_imports() <= NOT_IMPORTED
    assert {COMES_WITH[name] for name in third_party_imports() & COMES_WITH.keys()} <= declared


# ---------------------------------------------------------------------------------------------------- demo model


def test_the_demo_model_is_a_readable_gguf(demo_model: Path) -> None:
    assert demo_model.read_bytes()[:8] == b"GGUF\x03\0\0\0"
    reader = GGUFReader(demo_model)
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert "add_generation_prompt" in reader.fields["tokenizer.chat_template"].contents()
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    assert embedding.tensor_type == GGMLQuantizationType.Q8_0
    assert list(embedding.shape) == [256, len(reader.fields["tokenizer.ggml.tokens"].data)]
    end = max(t.data_offset + t.n_bytes for t in reader.tensors)
    assert end <= demo_model.stat().st_size


def test_a_missing_demo_model_says_how_to_get_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.FILES, demo.TEXT, "gone.gguf")
    with pytest.raises(ModelFileError, match=r"gone\.gguf: .*missing.*pip install"):
        demo.path()


# ---------------------------------------------------------------------------------------------------- errors


def error_classes() -> list[Any]:
    members = inspect.getmembers(rlx.errors, inspect.isclass)
    return [c for _, c in members if c.__module__ == "rlx.errors"]


@pytest.mark.parametrize("error", error_classes())
def test_every_error_is_an_rlx_error_with_a_place_and_a_way_out(error: type[RlxError]) -> None:
    assert issubclass(error, RlxError)
    assert inspect.getdoc(error)
    raised = error("found 3, expected 4", where=Path("model.gguf"), hint="Download it again.")
    assert str(raised) == "model.gguf: found 3, expected 4. Download it again."
    assert (raised.what, raised.where, raised.hint) == ("found 3, expected 4", "model.gguf", "Download it again.")
    assert str(error("found 3")) == "found 3"
