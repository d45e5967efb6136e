"""A family is equations: short files that know the IR and nothing of files, kernels or machines."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from rlx import models
from rlx.models.registry import ARCHITECTURES, FILES, MODEL_TYPES

_SHARED = ("architectures", "blocks", "builder", "config", "keys", "names", "settings")
SHARED = {f"rlx.models.{name}" for name in _SHARED}
# Blocks of single families, and families whose equations another one has.
BLOCKS = {f"rlx.models.{name}" for name in ("gemma", "granite", "lfm2", "llama", "olmo2", "recurrent")}
PATHS = [Path(models.__file__).parent / f"{name}.py" for name in FILES]
FORBIDDEN = ("kernel", "codegen", "numba", "llvm", "gguf", "safetensors", "thread", "simd", "avx", "amx")


def test_every_family_is_a_file_of_the_package() -> None:
    there = {path for path in PATHS[0].parent.glob("*.py") if "\nARCHITECTURES = " in path.read_text()}
    assert there == set(PATHS)


@pytest.mark.parametrize("file", PATHS, ids=lambda file: file.stem)
def test_the_registry_lists_what_the_file_has(file: Path) -> None:
    rows = import_module(f"rlx.models.{file.stem}").ARCHITECTURES
    archs, types = (names.split() for names in FILES[file.stem])
    assert archs == list(rows) and all(ARCHITECTURES[arch] is row for arch, row in rows.items())
    assert types == [name for row in rows.values() for name in (*row.model_types, *row.hf_variants)]
    assert all(MODEL_TYPES[name][0] in rows for name in types)


@pytest.mark.parametrize("file", PATHS, ids=lambda file: file.stem)
def test_a_family_knows_the_ir_and_the_shared_blocks_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            package = {name for name in names if name.startswith("rlx")}
            known = names & (SHARED | BLOCKS)
            assert all(name.startswith("rlx.ir") for name in package) or known, sorted(names)
        elif isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"numpy"}


@pytest.mark.parametrize("file", PATHS, ids=lambda file: file.stem)
def test_a_family_names_no_kernel_and_no_file_format(file: Path) -> None:
    # Not counted are fields of the row, and a key of `config.json`.
    code = re.sub(r"\bgguf_\w+=|linear_conv_kernel_dim", "", ast.unparse(ast.parse(file.read_text())).lower())
    assert not [word for word in FORBIDDEN if word in code]
