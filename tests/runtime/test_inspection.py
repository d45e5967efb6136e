"""Reading a compiled program: every stage, by name, from the entry of the compile cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rlx
from rlx import ops
from rlx.backends.cpu.llvm import Module
from rlx.compiler.executable import Executable
from rlx.ir.text import loads
from rlx.passes.report import Report
from rlx.store.cache import CompileCache
from rlx.store.store import Store


def build() -> rlx.Graph:
    graph = rlx.Graph("two")
    x = graph.input("x", [rlx.SEQ, 32])
    x = x + ops.linear(x, graph.weight("a.weight", [32, 32]))
    graph.output("y", x + ops.linear(x, graph.weight("b.weight", [32, 32])))
    return graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "rlx"


@pytest.fixture(scope="module")
def exe(folder: Path) -> Iterator[Executable]:
    with rlx.compile(build(), bind={"SEQ": (1, 8)}, cache=CompileCache(store=Store(folder))) as executable:
        yield executable


def test_every_stage_has_a_name(exe: Executable) -> None:
    assert exe.stages == [
        "graph",
        "simplify",
        "last_row",
        "specialize",
        "quantize",
        "fuse",
        "layout",
        "pages",
        "schedule",
        "memory",
    ]
    assert loads(exe.ir("graph")) == build()
    assert "%y = linear(%a.add, %b.weight, %a.add) {residual=True}" in exe.ir("fuse")
    assert exe.ir("memory").startswith('program "two" prefill')


def test_a_program_from_the_cache_explains_itself(exe: Executable, folder: Path) -> None:
    with rlx.compile(build(), bind={"SEQ": (1, 8)}, cache=CompileCache(store=Store(folder))) as again:
        assert again.stats["cached"] and not exe.stats["cached"]
        report = again.explain()
    assert isinstance(report, Report) and report == exe.explain()
    fuse = next(p for p in report.passes if p.name == "fuse")
    assert [(event.rule, event.where) for event in fuse.done] == [("residual", "a.add"), ("residual", "y")]
    assert {event.rule for event in report.kernels} == set(exe.kernels)
    assert "residual" in str(report) and str(report) == repr(report)


def test_the_stored_llvm_module_is_what_the_code_was_emitted_from(exe: Executable) -> None:
    """So the assembly that is made of it is that of the code, not that of a similar one."""
    files, target = exe._compiled.files, exe._target
    modules = [name.removesuffix(".ll") for name in files.names if name.endswith(".ll")]
    assert len(modules) >= 3
    for name in modules:
        with Module(files.read(f"{name}.ll").decode(), target) as module:
            assert module.emit() == files.read(f"{name}.o")
