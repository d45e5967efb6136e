"""Link: a program's kernels and its `step` function in one LLVM module, and the manifest that says how to bind it.

`void step(ptr ctx, i64 worker, i64 workers)` runs the regions in order, each a phase: it ends when all its units are
done. A region is a function of its buffers, so regions of equal layers are one function called with other rows of the
argument table. Inside a region each worker fetches ranges of work units from the call's counter until none is left. A
worker that waits long for the others leaves the step, and skips what is done when it comes back.

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

from rlx.codegen.select import Call, Units, select
from rlx.codegen.target import Target
from rlx.ir.dims import DimLike
from rlx.ir.node import Node
from rlx.passes.memory import ALIGN
from rlx.passes.program import Program
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
    selected: dict[Any, tuple[str, tuple[Call, ...]]] = field(default_factory=dict)
    scratch: int = 0


def link_program(program: Program, target: Target) -> Linked:
    """Selects kernels for every region and writes the step function."""
    linker = _Linker(program, target, sorted(program.graph.bounds), scratch=program.arena)
    regions = [_region(linker, region) for region in program.regions]
    step = _step(linker, regions)
    manifest = _manifest(linker, regions)
    modules = [k.llvm for k in linker.kernels.values()] + [step]
    return Linked(modules, {name: k.source for name, k in linker.kernels.items()}, manifest)


@dataclass(frozen=True)
class _Bound:
    """A region's function with the calls of this instance of it."""

    function: str
    calls: tuple[Call, ...]


def _region(linker: _Linker, nodes: tuple[Node, ...]) -> _Bound:
    key = signature(nodes)
    known = linker.selected.get(key)
    if known:
        calls = tuple(replace(c, node=n) for c, n in zip(known[1], nodes, strict=True))
        return _Bound(known[0], calls)
    calls = tuple(select(n, linker.target) for n in nodes)
    linker.kernels.update({k.symbol: k for c in calls for k in (c.kernel, *c.kernel.calls)})
    body = "\n".join(_emit_region(linker, calls))
    name = f"region_{hashlib.sha256(body.encode()).hexdigest()[:10]}"
    linker.functions[name] = body
    linker.selected[key] = (name, calls)
    return _Bound(name, calls)


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


def _emit_region(linker: _Linker, calls: tuple[Call, ...]) -> Iterator[str]:
    """The body of a region function: one fetch loop a call, then the end of the phase."""
    t, at = _Text(), 0
    finished = t.value(f"getelementptr i64, ptr %counters, i64 {len(calls)}")
    units = [_units(t, call.units, linker.symbols) for call in calls]
    total = reduce(lambda a, b: t.value(f"add i64 {a}, {b}"), units)
    mine = t.value("alloca i64")
    over = t.value(f"icmp uge i64 {t.value(f'load atomic i64, ptr {finished} acquire, align 8')}, {total}")
    t.lines += [f"  store i64 0, ptr {mine}", f"  br i1 {over}, label %over, label %begin"]
    t.lines += ["over:  ; a worker that comes back late", "  ret i1 true", "begin:"]
    for c, call in enumerate(calls):
        _emit_fetches(linker, t, c, at, units[c], call, mine)
        at += len(call.kernel.buffers)
    count = t.value(f"load i64, ptr {mine}")
    on = t.value(f"call i1 %phase(ptr %pool, ptr {finished}, i64 {count}, i64 {total}, i64 %worker)")
    yield from t.lines
    yield f"  ret i1 {on}"


def _emit_fetches(linker: _Linker, t: _Text, c: int, at: int, units: str, call: Call, mine: str) -> None:
    """Fetches ranges of call `c`'s units until none is left; `mine` counts the units this worker did."""
    buffers = [t.load("ptr", "%args", at + i) for i in range(len(call.kernel.buffers))]
    extents = [_dim(t, d, linker.symbols) for d in call.extents]
    grain = max(1, call.units.most(linker.program.graph.bounds) // CHUNKS)
    counter = t.value(f"getelementptr i64, ptr %counters, i64 {c}")
    t.lines += [f"  br label %fetch{c}", f"fetch{c}:"]
    start = t.value(f"atomicrmw add ptr {counter}, i64 {grain} monotonic")
    more = t.value(f"icmp ult i64 {start}, {units}")
    t.lines += [f"  br i1 {more}, label %work{c}, label %done{c}", f"work{c}:"]
    end = t.value(f"call i64 @llvm.umin.i64(i64 {t.value(f'add i64 {start}, {grain}')}, i64 {units})")
    passed = [f"ptr {b}" for b in buffers] + [f"i64 {e}" for e in (*extents, start, end)]
    t.lines.append(f"  call void @{call.kernel.symbol}({', '.join(passed)})")
    did = t.value(f"add i64 {t.value(f'load i64, ptr {mine}')}, {t.value(f'sub i64 {end}, {start}')}")
    t.lines += [f"  store i64 {did}, ptr {mine}", f"  br label %fetch{c}", f"done{c}:"]


def _step(linker: _Linker, regions: list[_Bound]) -> str:
    """The module with the region functions and the step that calls them."""
    declared = [_declaration(k) for k in linker.kernels.values()]
    functions = [
        f"define internal i1 @{name}(ptr %args, ptr %ext, ptr %counters, ptr %pool, ptr %phase, i64 %worker) noinline"
        f" {{\n{body}\n}}"
        for name, body in linker.functions.items()
    ]
    t = _Text()
    fields = {name: t.load("ptr", "%ctx", i) for i, name in enumerate(CONTEXT)}
    clock = t.value(f"getelementptr i64, ptr {fields['times']}, i64 {t.value(f'mul i64 %worker, {len(regions) + 1}')}")
    _mark(t, clock, 0)
    args = counters = 0
    for r, region in enumerate(regions):
        table = t.value(f"getelementptr ptr, ptr {fields['args']}, i64 {args}")
        count = t.value(f"getelementptr i64, ptr {fields['counters']}, i64 {counters}")
        passed = [f"ptr {x}" for x in (table, fields["extents"], count, fields["pool"], fields["phase"])]
        on = t.value(f"call i1 @{region.function}({', '.join(passed)}, i64 %worker)")
        t.lines += [f"  br i1 {on}, label %after{r}, label %out", f"after{r}:"]
        _mark(t, clock, r + 1)
        args += sum(len(c.kernel.buffers) for c in region.calls)
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
    args = [_place(linker, call, a) for region in regions for call in region.calls for a in call.buffers()]
    return {
        "name": graph.name,
        "phase": graph.phase,
        "symbols": linker.symbols,
        "bounds": {s: list(graph.bounds[s]) for s in linker.symbols},
        "arena": -(-linker.scratch // ALIGN) * ALIGN,
        "args": args,
        "regions": [[[number[c.node], c.kernel.symbol] for c in region.calls] for region in regions],
        "inputs": {n.name: _value(program, n) for n in graph.leaves("input").values()},
        "outputs": {name: _value(program, n) for name, n in graph.outputs.items()},
        "weights": _weights(program),
        "states": {n.name: _described(n) | {"layout": n["layout"]} for n in graph.leaves("state").values()},
    }


def _place(linker: _Linker, call: Call, node: Node | None) -> list[Any]:
    """[kind, offset or name] of one entry of the argument table."""
    if node is None:
        offset = -(-linker.scratch // ALIGN) * ALIGN
        linker.scratch = offset + call.scratch * call.units.most(linker.program.graph.bounds)
        return ["arena", offset]
    buffer = linker.program.buffer(node)
    return [buffer.kind, buffer.offset if buffer.kind == "arena" else buffer.name]


def _described(node: Node) -> dict[str, Any]:
    return {"dtype": node.dtype.name, "shape": [str(d) for d in node.shape]}


def _value(program: Program, node: Node) -> dict[str, Any]:
    return _described(node) | {"offset": program.buffer(node).offset}


def _weights(program: Program) -> dict[str, Any]:
    packed = {n.inputs[0].name: n["layout"] for n in program.load}
    leaves = program.graph.leaves("weight").values()
    return {n.name: _described(n) | {"layout": packed.get(n.name, "rows")} for n in leaves}
