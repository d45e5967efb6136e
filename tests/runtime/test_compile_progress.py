"""What is said while something is compiled: to the callback, to the logger "rlx", and afterwards."""

from __future__ import annotations

import itertools
import logging

import pytest

from rlx.compiler.compile import Compiler
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.passes.options import Options
from rlx.store.cache import CompileCache

Events = list[tuple[str, int, int]]

WHAT = "compiling the prefill program"
OPTIONS = Options(seq=(1, 8), all_rows=True, precision="exact")


def graph() -> Graph:
    """Of four nodes: a linear, a norm, a softmax, and another norm like the first, which shares its kernel."""
    found = Graph("small")
    x = found.input("x", [SEQ, 32])
    norm = ops.rms_norm(ops.linear(x, found.weight("w", (32, 32))), found.weight("n", (32,)), eps=1e-6)
    found.output("y", ops.rms_norm(ops.softmax(norm), found.weight("m", (32,)), eps=1e-6))
    return found


def compiler(cache: CompileCache, events: Events) -> Compiler:
    return Compiler(cache=cache, progress=lambda *event: events.append(event))


def test_kernels_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    cache, events = CompileCache(policy="off"), Events()
    with caplog.at_level(logging.INFO, "rlx"):
        made = compiler(cache, events)
        program = made.program(graph(), OPTIONS)
    assert {event[0] for event in events} == {WHAT}
    counts = [count for count, _ in itertools.groupby(event[1:] for event in events)]  # the last again for each module
    assert counts == [(0, 1), (0, 3), (1, 3), (2, 3), (3, 3)]
    assert len(program.kernels) == 3, "an independent count: what the program calls"

    (record,) = made.compiled
    assert record.digest == program.key.digest
    assert record.seconds > 0
    assert caplog.messages == [f"compiled {program.key.title} in {record.seconds:.2f} s: the compile cache is off"]
