"""A family is equations: short files that know the IR and nothing of files, kernels or machines."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from rlx import models
from rlx.models import FAMILIES

SHARED = {"rlx.models.blocks", "rlx.models.builder", "rlx.models.config"}
FILES = sorted({Path(inspect.getfile(getattr(f.build, "func", f.build))) for f in FAMILIES.values()})
FORBIDDEN = ("kernel", "codegen", "numba", "llvm", "gguf", "safetensors", "thread", "simd", "avx", "amx")


def test_every_family_is_a_file_of_the_package() -> None:
    assert {file.parent for file in FILES} == {Path(models.__file__).parent}
    assert {file.stem for file in FILES} == {"llama", "qwen3", "qwen35", "gemma", "gemma3n", "gemma4"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_family_is_about_eighty_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 85


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_family_knows_the_ir_and_the_shared_blocks_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            package = {name for name in names if name.startswith("rlx")}
            assert all(name.startswith("rlx.ir") for name in package) or names & SHARED, sorted(names)
        elif isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"numpy"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_family_names_no_kernel_and_no_file_format(file: Path) -> None:
    code = ast.unparse(ast.parse(file.read_text())).lower()
    assert not [word for word in FORBIDDEN if word in code]
