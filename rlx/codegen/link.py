"""Link: a program's kernels and its `step` function in one LLVM module, and the manifest that says how to bind it.

`void step(ptr ctx, i64 worker, i64 workers)` runs the regions in order, each a phase: it ends when all its units are
done. A region is a function of its buffers, so regions of equal layers are one function called with other rows of the
argument table. Inside a region each worker fetches ranges of work units from the call's counter until none is left. A
worker that waits long for the others leaves the step, and skips what is done when it comes back.

A region's prologue is a function too. A worker runs it in its own memory once it has fetched units that read it: until
those are done the region is not over, so what the prologue reads stays as it is.

ctx is a table of pointers: argument table, extents (i64, in the order of the manifest's symbols), counters (i64, zero
before a step; one a call, then one a region for its finished units), pool, `rlx_phase`, times (per worker an i64 cycle
count at the start and after each region).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from rlx.codegen.calls import Call, Units
from rlx.codegen.select import select
from rlx.codegen.target import Target
from rlx.ir.dims import DimLike
from rlx.ir.node import Node
from rlx.passes.memory import ALIGN
from rlx.passes.program import Program, root
from rlx.passes.schedule import signature

CONTEXT = ("args", "extents", "counters", "pool", "phase", "times")
CHUNKS = 32  # ranges that a call's units are cut into at most: small enough to balance, large enough to stream


@dataclass
class Linked:
    """What the linker made: LLVM modules, readable sources, and the manifest (plain JSON data)."""

    modules: list[str]
    sources: dict[str, str]
    manifest: dict[str, Any]


@dataclass
class _Linker:
    program: Program
    target: Target
    symbols: list[str]
    kernels: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    selected: dict[Any, _Bound] = field(default_factory=dict)
    scratch: int = 0
    private: int = 0


def link_program(program: Program, target: Target) -> Linked:
    """Selects kernels for every region and writes the step function."""
    symbols = sorted(program.graph.bounds)
    linker = _Linker(program, target, symbols, scratch=program.arena, private=program.private)
    regions = [_region(linker, at) for at in range(len(program.regions))]
    manifest = _manifest(linker, regions)
    step = _step(linker, regions)
    modules = [k.llvm for k in linker.kernels.values()] + [step]
    return Linked(modules, {name: k.source for name, k in linker.kernels.items()}, manifest)


@dataclass(frozen=True)
class _Bound:
    """A region's function with the calls of this instance of it.

    Attributes:
        number: of the region.
        first: the calls of its prologue.
    """

    function: str
    number: int
    first: tuple[Call, ...]
    calls: tuple[Call, ...]

    @property
    def all_calls(self) -> tuple[Call, ...]:
        """In the order of their rows in the argument table."""
        return self.first + self.calls


def _region(linker: _Linker, number: int) -> _Bound:
    prologue, work = linker.program.prologues[number], linker.program.regions[number]
    own = tuple(tuple(root(i) in prologue for i in n.inputs) for n in (*prologue, *work))
    key = signature(prologue), signature(work), own
    if key in linker.selected:
        known = linker.selected[key]
        first, calls = (
            tuple(replace(c, node=n) for c, n in zip(some, nodes, strict=True))
            for some, nodes in ((known.first, prologue), (known.calls, work))
        )
        return _Bound(known.function, number, first, calls)
    first, calls = (tuple(select(n, linker.target) for n in nodes) for nodes in (prologue, work))
    linker.kernels.update({k.symbol: k for c in (*first, *calls) for k in (c.kernel, *c.kernel.calls)})
    linker.selected[key] = bound = _Bound(_functions(linker, number, first, calls), number, first, calls)
    return bound


def _functions(linker: _Linker, number: int, first: tuple[Call, ...], calls: tuple[Call, ...]) -> str:
    """Makes a region's function, and that of its prologue; returns the name."""
    prologue = ""
    if first:
        body = "\n".join(_emit_prologue(linker, number, first))
        prologue = f"prologue_{hashlib.sha256(body.encode()).hexdigest()[:10]}"
        linker.functions[prologue] = f"void @{prologue}(ptr %args, ptr %ext, i64 %own) noinline {{\n{body}\n}}"
    table = sum(len(c.kernel.buffers) for c in first)
    body = "\n".join(_emit_region(linker, number, calls, table, prologue))
    name = f"region_{hashlib.sha256(body.encode()).hexdigest()[:10]}"
    passed = "ptr %args, ptr %ext, ptr %counters, ptr %pool, ptr %phase, i64 %worker, i64 %own"
    linker.functions[name] = f"i1 @{name}({passed}) noinline {{\n{body}\n}}"
    return name


# -- LLVM text ------------------------------------------------------------------------------------------------------


class _Text:
    """Lines of a function body with fresh value names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def value(self, code: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {code}")
        return f"%v{self.count}"

    def load(self, kind: str, table: str, index: int) -> str:
        return self.value(f"load {kind}, ptr {self.value(f'getelementptr {kind}, ptr {table}, i64 {index}')}")


def _dim(t: _Text, dim: DimLike, symbols: list[str]) -> str:
    if isinstance(dim, int):
        return str(dim)
    total = str(dim.const)
    for name, factor in dim.terms:
        part = t.load("i64", "%ext", symbols.index(name))
        part = part if factor == 1 else t.value(f"mul i64 {part}, {factor}")
        total = part if total == "0" else t.value(f"add i64 {total}, {part}")
    return total


def _units(t: _Text, units: Units, symbols: list[str]) -> str:
    if isinstance(units.dim, int):
        return str(units.most({}))
    count = _dim(t, units.dim, symbols)
    if units.per != 1:
        count = t.value(f"udiv i64 {t.value(f'add i64 {count}, {units.per - 1}')}, {units.per}")
    return count if units.times == 1 else t.value(f"mul i64 {count}, {units.times}")


def _emit_prologue(linker: _Linker, number: int, calls: tuple[Call, ...]) -> Iterator[str]:
    """The body of a prologue: every call with all its units, results and scratch memory in this worker's own memory."""
    t, at = _Text(), 0
    for call in calls:
        buffers = _buffers(linker, t, number, call, at, own_results=True)
        _emit_call(linker, t, call, buffers, "0", _units(t, call.units, linker.symbols))
        at += len(call.kernel.buffers)
    yield from t.lines
    yield "  ret void"


def _emit_region(linker: _Linker, number: int, calls: tuple[Call, ...], at: int, prologue: str) -> Iterator[str]:
    """The body of a region function: one fetch loop a call, then the end of the phase. `at`: its row of arguments."""
    t = _Text()
    finished = t.value(f"getelementptr i64, ptr %counters, i64 {len(calls)}")
    units = [_units(t, call.units, linker.symbols) for call in calls]
    total = reduce(lambda a, b: t.value(f"add i64 {a}, {b}"), units)
    mine, ready = t.value("alloca i64"), t.value("alloca i1")
    over = t.value(f"icmp uge i64 {t.value(f'load atomic i64, ptr {finished} acquire, align 8')}, {total}")
    t.lines += [f"  store i64 0, ptr {mine}", f"  store i1 false, ptr {ready}"]
    t.lines += [f"  br i1 {over}, label %over, label %begin"]
    t.lines += ["over:  ; a worker that comes back late", "  ret i1 true", "begin:"]
    for c, call in enumerate(calls):
        buffers = _buffers(linker, t, number, call, at)
        needed = any(linker.program.operand(i, number).kind == "private" for i in call.node.inputs)
        fetch = _Fetch(c, units[c], mine, ready, prologue if needed else "")
        _emit_fetches(linker, t, call, buffers, fetch)
        at += len(call.kernel.buffers)
    count = t.value(f"load i64, ptr {mine}")
    on = t.value(f"call i1 %phase(ptr %pool, ptr {finished}, i64 {count}, i64 {total}, i64 %worker)")
    yield from t.lines
    yield f"  ret i1 {on}"


@dataclass(frozen=True)
class _Fetch:
    """The fetch loop of a call.

    Attributes:
        c: number of the call in its region.
        units: how many there are.
        mine, ready: where this worker counts the units it did, and notes that it ran the prologue.
        prologue: the function that must run before the first units; empty for none.
    """

    c: int
    units: str
    mine: str
    ready: str
    prologue: str


def _emit_fetches(linker: _Linker, t: _Text, call: Call, buffers: list[str], fetch: _Fetch) -> None:
    """Fetches ranges of a call's units until none is left."""
    c = fetch.c
    grain = max(1, call.units.most(linker.program.graph.bounds) // CHUNKS)
    counter = t.value(f"getelementptr i64, ptr %counters, i64 {c}")
    t.lines += [f"  br label %fetch{c}", f"fetch{c}:"]
    start = t.value(f"atomicrmw add ptr {counter}, i64 {grain} monotonic")
    more = t.value(f"icmp ult i64 {start}, {fetch.units}")
    t.lines += [f"  br i1 {more}, label %work{c}, label %done{c}", f"work{c}:"]
    if fetch.prologue:
        ready = t.value(f"load i1, ptr {fetch.ready}")
        t.lines += [f"  br i1 {ready}, label %units{c}, label %first{c}", f"first{c}:"]
        t.lines += [f"  call void @{fetch.prologue}(ptr %args, ptr %ext, i64 %own)"]
        t.lines += [f"  store i1 true, ptr {fetch.ready}", f"  br label %units{c}", f"units{c}:"]
    end = t.value(f"call i64 @llvm.umin.i64(i64 {t.value(f'add i64 {start}, {grain}')}, i64 {fetch.units})")
    _emit_call(linker, t, call, buffers, start, end)
    did = t.value(f"add i64 {t.value(f'load i64, ptr {fetch.mine}')}, {t.value(f'sub i64 {end}, {start}')}")
    t.lines += [f"  store i64 {did}, ptr {fetch.mine}", f"  br label %fetch{c}", f"done{c}:"]


def _emit_call(linker: _Linker, t: _Text, call: Call, buffers: list[str], begin: str, end: str) -> None:
    """A call of a kernel for the units [begin, end)."""
    extents = [_dim(t, d, linker.symbols) for d in call.extents]
    passed = [f"ptr {b}" for b in buffers] + [f"i64 {e}" for e in (*extents, begin, end)]
    t.lines.append(f"  call void @{call.kernel.symbol}({', '.join(passed)})")


def _buffers(linker: _Linker, t: _Text, number: int, call: Call, at: int, own_results: bool = False) -> list[str]:
    """The pointers of a call from row `at` of the argument table on; to private memory they are worker 0's there."""
    found = []
    for i, own in enumerate(_is_own(linker.program, number, call, own_results)):
        pointer = t.load("ptr", "%args", at + i)
        found.append(t.value(f"getelementptr i8, ptr {pointer}, i64 %own") if own else pointer)
    return found


def _is_own(program: Program, number: int, call: Call, own_results: bool) -> list[bool]:
    """For each buffer of a call, whether it lies in private memory."""
    return [
        own_results if node in (None, call.node) else program.operand(node, number).kind == "private"
        for node in call.buffers()
    ]


def _step(linker: _Linker, regions: list[_Bound]) -> str:
    """The module with the region functions and the step that calls them."""
    declared = [_declaration(k) for k in linker.kernels.values()]
    functions = [f"define internal {text}" for text in linker.functions.values()]
    t = _Text()
    fields = {name: t.load("ptr", "%ctx", i) for i, name in enumerate(CONTEXT)}
    clock = t.value(f"getelementptr i64, ptr {fields['times']}, i64 {t.value(f'mul i64 %worker, {len(regions) + 1}')}")
    _mark(t, clock, 0)
    own = t.value(f"mul i64 %worker, {_align(linker.private)}")
    args = counters = 0
    for r, region in enumerate(regions):
        table = t.value(f"getelementptr ptr, ptr {fields['args']}, i64 {args}")
        count = t.value(f"getelementptr i64, ptr {fields['counters']}, i64 {counters}")
        passed = [f"ptr {x}" for x in (table, fields["extents"], count, fields["pool"], fields["phase"])]
        on = t.value(f"call i1 @{region.function}({', '.join(passed)}, i64 %worker, i64 {own})")
        t.lines += [f"  br i1 {on}, label %after{r}, label %out", f"after{r}:"]
        _mark(t, clock, r + 1)
        args += sum(len(c.kernel.buffers) for c in region.all_calls)
        counters += len(region.calls) + 1
    body = "\n".join([*t.lines, "  br label %out", "out:", "  ret void"])
    step = f"define void @step(ptr %ctx, i64 %worker, i64 %workers) {{\n{body}\n}}"
    intrinsics = ["declare i64 @llvm.umin.i64(i64, i64)", "declare i64 @llvm.readcyclecounter()"]
    return "\n\n".join([*declared, *intrinsics, *functions, step]) + "\n"


def _mark(t: _Text, clock: str, index: int) -> None:
    place = t.value(f"getelementptr i64, ptr {clock}, i64 {index}")
    t.lines.append(f"  store i64 {t.value('call i64 @llvm.readcyclecounter()')}, ptr {place}")


def _declaration(kernel: Any) -> str:
    types = ["ptr"] * len(kernel.buffers) + ["i64"] * (len(kernel.extents) + 2)
    return f"declare void @{kernel.symbol}({', '.join(types)})"


# -- the manifest ---------------------------------------------------------------------------------------------------


def _manifest(linker: _Linker, regions: list[_Bound]) -> dict[str, Any]:
    program, graph = linker.program, linker.program.graph
    number = {n: i for i, n in enumerate(graph.nodes())}
    args = [row for region in regions for row in _arguments(linker, region)]
    return {
        "name": graph.name,
        "phase": graph.phase,
        "symbols": linker.symbols,
        "bounds": {s: list(graph.bounds[s]) for s in linker.symbols},
        "arena": _align(linker.scratch),
        "private": _align(linker.private),
        "args": args,
        "prologues": [[[number[c.node], c.kernel.symbol] for c in region.first] for region in regions],
        "regions": [[[number[c.node], c.kernel.symbol] for c in region.calls] for region in regions],
        "inputs": {n.name: _value(program, n) for n in graph.leaves("input").values()},
        "outputs": {name: _value(program, n) for name, n in graph.outputs.items()},
        "weights": _weights(program),
        "states": {n.name: _described(n) | {"layout": n["layout"]} for n in graph.leaves("state").values()},
    }


def _arguments(linker: _Linker, region: _Bound) -> Iterator[list[Any]]:
    """The region's rows of the argument table: [kind, offset or name]."""
    for i, call in enumerate(region.all_calls):
        own_results = i < len(region.first)
        for node, own in zip(call.buffers(), _is_own(linker.program, region.number, call, own_results), strict=True):
            yield _scratch(linker, call, own) if node is None else _place(linker.program, node, own)


def _scratch(linker: _Linker, call: Call, own: bool) -> list[Any]:
    size = call.scratch * call.units.most(linker.program.graph.bounds)
    if own:
        offset, linker.private = _align(linker.private), _align(linker.private) + size
        return ["private", offset]
    offset, linker.scratch = _align(linker.scratch), _align(linker.scratch) + size
    return ["arena", offset]


def _place(program: Program, node: Node, own: bool) -> list[Any]:
    assert program.own is not None
    buffer = program.own[root(node)] if own else program.buffer(node)
    return [buffer.kind, buffer.name or buffer.offset]


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _described(node: Node) -> dict[str, Any]:
    return {"dtype": node.dtype.name, "shape": [str(d) for d in node.shape]}


def _value(program: Program, node: Node) -> dict[str, Any]:
    return _described(node) | {"offset": program.buffer(node).offset}


def _weights(program: Program) -> dict[str, Any]:
    packed = {n.inputs[0].name: n["layout"] for n in program.load}
    leaves = program.graph.leaves("weight").values()
    return {n.name: _described(n) | {"layout": packed.get(n.name, "rows")} for n in leaves}
