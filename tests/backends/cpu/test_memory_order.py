"""The order in which other workers see what a worker wrote, on machines that promise little of it by themselves (Arm).

No test run shows a missing order: x86 keeps most of them anyway, in an emulator too. So tests read the text: every
access to a word that several threads write is atomic and ordered, and the code for aarch64 has an ordered instruction
for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from native import assembly

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.attention.attention import attention
from rlx.backends.cpu.kernels.attention.split import Split
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.kernels.linear.pick import linear_pick
from rlx.backends.cpu.launch.loop import runtime_llvm
from rlx.backends.cpu.launch.loop_functions import range_step
from rlx.backends.cpu.launch.waits import WAITS
from rlx.backends.cpu.levels import AARCH64, feature_string
from rlx.backends.cpu.link import link_program
from rlx.backends.cpu.target import Target
from rlx.ir import ops
from rlx.ir.dtypes import F32, Q8_0
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options

TRIPLE = "aarch64-unknown-linux-gnu"
NEON = next(level for level in AARCH64.levels if level.name == "neon")
#: Without and with the atomic instructions of later processors (LSE).
TARGETS = [
    Target("neon", TRIPLE, NEON.cpu, feature_string(NEON, frozenset(used))) for used in (("neon",), ("neon", "lse"))
]

#: What the loop's text calls the addresses of words that several threads write while others read them.
SHARED = frozenset("signal sleepers.at tick.at gate.at done finished.at taken.at".split())
#: Accesses that need no order: another one of the same thread follows that has it, or only one thread writes the word.
FREE = {
    ("rlx_read", "atomicrmw", "taken.at"): "the memory that is read does not change",
    ("rlx_share", "load", "gate.at"): "while the gate is closed nobody else writes it",
}
ORDERED = {
    "load": {"acquire", "seq_cst"},
    "store": {"release"},
    "atomicrmw": {"acq_rel", "seq_cst"},
    "cmpxchg": {"acq_rel acquire"},
}
_ORDER = r"(monotonic|acquire|release|acq_rel|seq_cst)(?: (monotonic|acquire|seq_cst))?(?:, align.*)?$"
#: Instructions that read a word before all later accesses, that write one after all earlier accesses, and that do both.
#: Processors without LSE change a word in a loop of two instructions.
INSTRUCTIONS = {"load": r"ldar", "store": r"stlr", "change": r"stlxr|ld(?:add|set|umax)al|casal"}
WEAKER = r"\t(?:ldxr|stxr|(?:ld|st)(?:add|set|umax)[al]?|cas[al]?)\t"


@pytest.fixture(autouse=True, scope="module")
def llvm() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def accesses(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(function, operation, name of the pointer, order or "plain") of every access to memory."""
    for function in re.finditer(r"^define [^@]*@[\x22]?(\w+)[\x22]?\(.*?^}", text, re.MULTILINE | re.DOTALL):
        for line in function[0].splitlines():
            code = line.partition(";")[0].rstrip()
            if found := re.search(r"(?:^|= )\s*(load|store|atomicrmw|cmpxchg)\b.*?ptr %[\x22]?([\w.]+)", code):
                order = re.search(_ORDER, code)
                words = " ".join(filter(None, order.groups())) if order else "plain"
                yield function[1], found[1], found[2], words


def is_ordered(operation: str, order: str) -> bool:
    return order in ORDERED[operation]


def functions(code: str) -> dict[str, str]:
    """The code of each function."""
    found = re.finditer(r"^_?(\w+):.*?^(?:\.Lfunc_end|\s*\.cfi_endproc)", code, re.MULTILINE | re.DOTALL)
    return {each[1]: each[0] for each in found}


def compiled(text: str, target: Target) -> str:
    """The assembly of a module."""
    from rlx.backends.cpu.llvm import assembly, compile_module

    return assembly(compile_module(text, target).text, target)


def check(text: str, code: str) -> None:
    """For each ordered access of each function there is an instruction, and no access got a weaker one."""
    asked = Counter(
        (function, operation if operation in ("load", "store") else "change")
        for function, operation, _, order in accesses(text)
        if is_ordered(operation, order)
    )
    made = functions(code)
    assert asked
    for (function, kind), count in asked.items():
        found = re.findall(rf"\t(?:{INSTRUCTIONS[kind]})\t", made[function])
        assert len(found) >= count, f"{function}: {len(found)} of {count} {kind}"
        assert not re.findall(WEAKER, made[function]), function


@pytest.mark.parametrize("how", WAITS)
def test_shared_words_of_the_worker_loop_are_accessed_in_order(how: str) -> None:
    seen, free = set[str](), set[tuple[str, str, str]]()
    for function, operation, name, order in accesses(runtime_llvm(TRIPLE, how)):
        if name not in SHARED:
            assert order == "plain", f"{function}: {name}"
            continue
        seen.add(name)
        if not is_ordered(operation, order):
            assert order == "monotonic", f"{function}: {operation} of {name} is {order}"
            free.add((function, operation, name))
    assert free == FREE.keys()
    assert seen >= SHARED - {"sleepers.at"} and ("sleepers.at" in seen) == (how != "naps")


@pytest.mark.parametrize("how", sorted(set(WAITS) - {"naps"}))
def test_who_sleeps_and_who_wakes_see_each_other(how: str) -> None:
    """Each writes its word, then reads the other's; only seq_cst forbids that both read the old one. The read of the
    sleeper must be its own: that of the operating system has no such order.
    """
    found = list(accesses(runtime_llvm(TRIPLE, how)))
    sleeper = [(o, name, order) for function, o, name, order in found if function == "await" and name in SHARED]
    waker = [(o, name, order) for function, o, name, order in found if function == "ring" and name in SHARED]
    assert sleeper[:2] == [("atomicrmw", "sleepers.at", "seq_cst"), ("load", "signal", "seq_cst")]
    assert waker[:2] == [("atomicrmw", "signal", "seq_cst"), ("load", "sleepers.at", "seq_cst")]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.features)
def test_the_worker_loop_has_the_instructions(target: Target) -> None:
    text = runtime_llvm(TRIPLE, "futex")
    check(text, compiled(text, target))


def kernels(target: Target) -> list[Kernel]:
    """The kernels whose calls combine their results: the last one to finish must see those of the others."""
    pick = linear_pick(linear(Q8_0, 64, 512, "q8a", target, single=True), None, target)
    return [pick, attention(4, 2, 64, target, kv_dtype=F32, scale=0.1, rows_static=1, split=Split(4, 64))]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.features)
def test_the_last_unit_sees_the_results_of_the_others(target: Target) -> None:
    for kernel in kernels(target):
        counts = [order for _, operation, _, order in accesses(kernel.llvm) if operation == "atomicrmw"]
        assert counts[-1] == "acq_rel" and set(counts[:-1]) <= {"monotonic"}, kernel.symbol
        made = re.findall(rf"\t(?:{INSTRUCTIONS['change']})\t", assembly(kernel, target))
        assert len(made) >= 1, kernel.symbol


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.features)
def test_a_region_begins_after_the_end_of_the_one_before(target: Target) -> None:
    """A worker that finds a region finished goes on to read its results. Taking a range needs no order."""
    graph = Graph("two")
    hidden = ops.linear(graph.input("x", [1, 64]), graph.weight("a.weight", [64, 64]))
    graph.output("y", ops.linear(hidden, graph.weight("b.weight", [64, 64])))
    texts = dict[str, str]()
    link_program(pipeline.lower(graph, Options(seq=(1, 1), precision="exact")), target, texts.__setitem__)
    regions = [text for name, text in texts.items() if name.startswith("regions/")]
    for text in regions:
        (order,) = (order for _, _, name, order in accesses(text) if name == "finished")
        assert order == "acquire"
        check(text, compiled(text, target))
    counters = {
        order for function, _, name, order in accesses(texts["program"]) if (function, name) == ("take", "place")
    }
    assert regions and counters == {"monotonic"}
    ranges = range_step(kernels(target)[0])[1]
    assert [order for _, operation, _, order in accesses(ranges) if operation == "atomicrmw"] == ["monotonic"]
