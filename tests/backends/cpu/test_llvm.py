"""Text to object code: modules side by side, equal ones once, and what goes wrong on the way."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from rlx.backends.cpu import llvm
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.llvm import Compiled, Modules, compile_module
from rlx.backends.cpu.target import Target
from rlx.errors import CompileError

TARGET = Target.host()
COUNT = 8


def times(factor: int) -> str:
    return f"define i64 @times_{factor}(i64 %x) {{\n  %y = mul i64 %x, {factor}\n  ret i64 %y\n}}\n"


def texts() -> dict[str, str]:
    """Functions, and one that calls them all: the sum of x times 0, 1, and so on."""
    calls = [f"  %y{i} = call i64 @times_{i}(i64 %x)\n  %s{i + 1} = add i64 %s{i}, %y{i}" for i in range(COUNT)]
    declared = "\n".join(f"declare i64 @times_{i}(i64)" for i in range(COUNT))
    body = "\n".join(["  %s0 = add i64 0, 0", *calls, f"  ret i64 %s{COUNT}"])
    total = f"{declared}\n\ndefine i64 @total(i64 %x) {{\n{body}\n}}\n"
    return {**{f"times {i}": times(i) for i in range(COUNT)}, "total": total}


def test_modules_side_by_side_are_those_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of threads; loaded together they call each other."""
    alone = {name: compile_module(text, TARGET) for name, text in texts().items()}
    for threads in (1, 4):
        monkeypatch.setattr(llvm, "cpu_count", lambda threads=threads: threads)
        with Modules(TARGET, {}) as modules:
            for name, text in texts().items():
                modules.add(name, text)
            found = modules.results()
        assert found == alone
    code = NativeCode([module.code for module in found.values()], ["total"])
    total = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.addresses["total"])
    assert total(3) == 3 * sum(range(COUNT))


def test_equal_modules_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any names, in one program or in several."""
    usual, count = llvm.optimize, []

    def optimize(module: Any, machine: Any, **few: bool) -> None:
        count.append(str(module))
        usual(module, machine, **few)

    monkeypatch.setattr(llvm, "optimize", optimize)
    known: dict[str, Compiled] = {}
    with Modules(TARGET, known) as modules:
        for name, text in (("a", times(2)), ("b", times(3)), ("c", times(2))):
            modules.add(name, text)
        first = modules.results()
    with Modules(TARGET, known) as modules:
        modules.add("d", times(3))
        second = modules.results()
    assert len(count) == 2
    assert first["a"] is first["c"]
    assert second == {"d": first["b"]}
    assert "times_2" in first["a"].text
    assert "times_3" in first["b"].text


def test_what_llvm_refuses_is_named() -> None:
    for text in ("define nonsense", "define i64 @f() {\n  ret i32 0\n}"):
        with Modules(TARGET, {}) as modules, pytest.raises(CompileError, match="LLVM refuses the program"):
            modules.add("bad", text)
