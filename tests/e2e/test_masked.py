"""The suite on other machines: a few tests that depend on features, run as a machine without them would run them."""

from __future__ import annotations

import pytest
from as_machine import passes

from rlx.backends.cpu.target import Target

MASKED = "native-vnni-bf16"

CHOSEN = [
    "tests/backends/cpu/test_experts.py::test_experts_in_a_program",
    "tests/backends/cpu/test_target.py::test_every_level_of_this_machine_emits_code",
    "tests/e2e/test_bf16.py::test_the_key_says_whether_rows_may_be_rounded",
]


@pytest.mark.skipif(Target.host(MASKED) == Target.host("native"), reason="this machine has no dot products")
def test_a_machine_without_dot_products() -> None:
    passes(CHOSEN, RLX_TARGET=MASKED)
