"""`runner.programs`: what is ready, found by name, and readable stage by stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlx import auto_runner, demo
from rlx.errors import ArgumentError
from rlx.ir.text import loads
from rlx.runners import CachedRunner


@pytest.fixture(scope="module")
def runner() -> Iterator[CachedRunner]:
    with auto_runner(demo.path(), load=False) as found:
        assert not found.programs
        found.compile(phase="decode")
        yield found


def test_a_program_shows_its_stages(runner: CachedRunner) -> None:
    program = runner.programs["decode"]
    assert program.record == runner.programs[0].record == runner.programs["decode-1-1"].record
    assert "linear-pick" not in str(program.explain()) and "gated-silu" in str(program.explain())
    assert {report.name for report in program.explain().passes} == {*program.stages} - {"graph"}
    assert loads(program.ir("fuse")).outputs.keys() == {"logits"}
    symbol = next(name for name in program.kernels if name.startswith("attention"))
    assert symbol in program.source(symbol) and f"@{symbol}(" in program.llvm(symbol)
    assert f"{symbol}:" in program.asm(symbol)
    assert repr(program) == f"<Program decode-1-1: {program.record.kernels} kernels, {program.record.digest[:12]}>"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"phase": "decoding"}, r"no program is of phase 'decoding'\. The programs are: decode 1-1, prefill 2-16"),
        (
            {"phase": "prefill", "rows": 9999},
            r"no program takes 9999 rows\. The programs are: prefill 2-16",
        ),
    ],
)
def test_a_program_that_there_is_not(runner: CachedRunner, chosen: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        runner.compile(**chosen)
