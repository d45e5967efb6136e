"""The instruction sets: intrinsics of machines stand nowhere else, and what a set cannot do it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlx
from rlx.backends.cpu.isa import for_triple
from rlx.backends.cpu.isa.aarch64 import Aarch64
from rlx.backends.cpu.isa.portable import Isa
from rlx.backends.cpu.isa.x86 import X86

PACKAGE = Path(rlx.__file__).parent
INTRINSIC = re.compile(r"llvm\.(x86|aarch64|arm|riscv|ppc|nvvm|amdgcn)\.")


def test_only_instruction_sets_name_intrinsics_of_a_machine() -> None:
    """The device "cuda" has intrinsics of its own."""
    sources = (p for p in PACKAGE.rglob("*.py") if "cuda" not in p.relative_to(PACKAGE).parts)
    named = {p.relative_to(PACKAGE).as_posix() for p in sources if INTRINSIC.search(p.read_text())}
    assert named == {f"backends/cpu/isa/{name}.py" for name in ("aarch64", "amx", "x86")}


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        ("x86_64-unknown-linux-gnu", X86),
        ("aarch64-unknown-linux-gnu", Aarch64),
        ("arm64-apple-darwin23.1.0", Aarch64),
        ("riscv64-unknown-linux-gnu", Isa),
    ],
)
def test_a_triple_has_its_instruction_set(triple: str, expected: type) -> None:
    assert for_triple(triple) is expected
