"""Link: generates the LLVM modules of a program (kernels, regions, and the function `step`) and its manifest.

`void step(ptr ctx, i64 worker, i64 workers)` runs the regions in order. Every worker calls it. Inside a region, workers
take ranges of the units of each kernel call (`work_stealing.py`). The region ends when all of its units are done. A
worker that waits long for the others returns from the step. When it calls the step again, it skips the finished
regions.

A region is a function that takes its buffers as arguments. Equal layers share one function, which is called with
different rows of the argument table.

The prologue of a region is a function too. It writes to the private memory of the worker that calls it. A worker calls
it after taking the first units that read its results. The region cannot end before those units are done, so the
operands of the prologue do not change meanwhile.

ctx is a table of 8-byte fields, `rlx.backends.cpu.context.CONTEXT`. Marks of what each worker did are written
only while they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from typing import Any

from rlx.backends.cpu.context import CONTEXT, MARK, mark_number
from rlx.backends.cpu.kernel import Call, Kernel, Units, symbol
from rlx.backends.cpu.layouts import ALIGN
from rlx.backends.cpu.llvm_text import WRITTEN, Text
from rlx.backends.cpu.select import select
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.work_stealing import SHARES, TAKE, WorkStealing, grain, grain_of_few, stride
from rlx.backends.device import manifest_of
from rlx.ir import dims
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes.program import Program, root
from rlx.passes.schedule import signature
from rlx.tracing import span

#: Takes the name and the text of a module.
Emit = Callable[[str, str], None]

#: Takes the number of kernels generated so far, and the total.
OnKernel = Callable[[int, int], None]


@dataclass
class Linked:
    """The kernels by symbol, the manifest (plain JSON data), and the calls of kernels of custom ops, each kind once."""

    kernels: dict[str, Kernel]
    manifest: dict[str, Any]
    custom: tuple[Call, ...] = ()


@dataclass
class _Linker:
    program: Program
    target: Target
    symbols: list[str]
    emit: Emit
    on_kernel: OnKernel
    kernels: dict[str, Kernel] = field(default_factory=dict)
    regions: set[str] = field(default_factory=set)
    selected: dict[Any, _Bound] = field(default_factory=dict)
    calls: dict[Any, Call | None] = field(default_factory=dict)  # by signature, None before it is generated
    scratches: dict[Any, int] = field(default_factory=dict)  # offsets of scratch memory
    scratch: int = 0
    private: int = 0
    stride: int = 0  # bytes of a share's counters


def link_program(
    program: Program, target: Target, emit: Emit, on_kernel: OnKernel = lambda done, total: None
) -> Linked:
    """Selects the kernels of every region, and generates the modules.

    Args:
        on_kernel: called with (kernels generated, kernels of the program) before each kernel.
        emit: called once with the name and the text of each module: `kernels/<symbol>`, `regions/<symbol>`, and
            `program` for the step. The caller can compile a module while the next ones are generated.
    """
    symbols = program.symbols
    linker = _Linker(program, target, symbols, emit, on_kernel, scratch=program.arena, private=program.private)
    linker.calls = {signature((node,)): None for some in (*program.prologues, *program.regions) for node in some}
    linker.stride = stride(sum(map(len, program.regions)))
    regions = [_region(linker, at) for at in range(len(program.regions))]
    manifest = _manifest(linker, regions)
    emit("program", _step(linker, regions))
    custom = tuple(call for call in linker.calls.values() if call and OPS[call.node.op].custom)
    return Linked(linker.kernels, manifest, custom)


@dataclass(frozen=True)
class _Bound:
    """A region with the name of its function, which equal regions share.

    Attributes:
        function: name of the function.
        number: index of the region.
        first: the calls of the prologue.
        calls: the calls of the region.
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
    replicated = tuple(tuple(root(i) in prologue for i in n.inputs) for n in (*prologue, *work))
    key = signature(prologue), signature(work), replicated
    if key in linker.selected:
        known = linker.selected[key]
        first, calls = (
            tuple(replace(c, node=n) for c, n in zip(some, nodes, strict=True))
            for some, nodes in ((known.first, prologue), (known.calls, work))
        )
        return _Bound(known.function, number, first, calls)
    first, calls = (tuple(_call(linker, n) for n in nodes) for nodes in (prologue, work))
    for kernel in (k for c in (*first, *calls) for k in c.kernel.closure()):
        if kernel.symbol not in linker.kernels:
            linker.kernels[kernel.symbol] = kernel
            linker.emit(f"kernels/{kernel.symbol}", kernel.llvm)
    linker.selected[key] = bound = _Bound(_functions(linker, number, first, calls), number, first, calls)
    return bound


def _call(linker: _Linker, node: Node) -> Call:
    """The call for a node; nodes that differ only in their buffers share its kernel."""
    key = signature((node,))
    if call := linker.calls[key]:
        return replace(call, node=node)
    linker.on_kernel(sum(known is not None for known in linker.calls.values()), len(linker.calls))
    with span(node.op, "kernel"):
        linker.calls[key] = call = select(node, linker.target)
    return call


def _functions(linker: _Linker, number: int, first: tuple[Call, ...], calls: tuple[Call, ...]) -> str:
    """Emits the module of a region: its function and its prologue. Returns the name, which has a digest of both."""
    table = sum(len(c.kernel.buffers) for c in first)
    before = "\n".join(_emit_prologue(linker, number, first)) if first else ""
    body = "\n".join(_emit_region(linker, number, calls, table))
    name = symbol("region", f"{before}\n{body}")
    functions = [
        f"define internal void @prologue({_PROLOGUE}) noinline {{\n{before}\n}}" * bool(before),
        f"define i1 @{name}({_REGION}) {{\n{body}\n}}",
    ]
    if name not in linker.regions:
        linker.regions.add(name)
        kernels = {c.kernel.symbol: c.kernel for c in (*first, *calls)}
        declared = [_declaration(k) for k in kernels.values()]
        linker.emit(f"regions/{name}", "\n\n".join([*_DECLARED, *declared, *functions, WRITTEN]) + "\n")
    return name


# -- LLVM text ------------------------------------------------------------------------------------------------------

#: Parameters of a region's function. `%stream` is the worker's own share of the `%streams` shares.
_REGION = (
    "ptr %args, ptr %ext, ptr %counters, ptr %finished, ptr %pool, ptr %phase, ptr %marks, i64 %worker, i64 %private, "
    "i64 %stream, i64 %streams"
)
_PROLOGUE = "ptr %args, ptr %ext, i64 %private"
_LOCALS = {"mine": "i64", "ready": "i1", "begun": "i64", "begun.prologue": "i64"}
_DECLARED = (
    "declare i64 @take(ptr, i64, ptr, i64, i64, i64, i64)",
    "declare i64 @llvm.umin.i64(i64, i64)",
    "declare i64 @llvm.readcyclecounter()",
    "declare void @mark(ptr, i64, i64, i64)",
)


def _emit_prologue(linker: _Linker, number: int, calls: tuple[Call, ...]) -> Iterator[str]:
    """The body of a prologue: each call with all its units. Results and scratch are in the worker's private memory."""
    t, at = Text(), 0
    for call in calls:
        buffers = _buffers(linker, t, number, call, at, replicated_results=True)
        _emit_call(linker, t, call, buffers, "0", t.units(call.units, linker.symbols))
        at += len(call.kernel.buffers)
    yield from t.lines
    yield "  ret void"


def _emit_region(linker: _Linker, number: int, calls: tuple[Call, ...], at: int) -> Iterator[str]:
    """The body of a region: the worker takes ranges of each call's units, then waits for the end of the region.

    Args:
        at: first row of the region's calls in the argument table.
    """
    t = Text()
    units = [t.units(call.units, linker.symbols) for call in calls]
    total = reduce(lambda a, b: t.value(f"add i64 {a}, {b}"), units)
    t.lines += [f"  %{name} = alloca {kind}" for name, kind in _LOCALS.items()]
    t.lines += [f"  %empty{c} = alloca i64" for c in range(len(calls))]
    over = t.value(f"icmp uge i64 {t.value('load atomic i64, ptr %finished acquire, align 8')}, {total}")
    t.lines += ["  store i64 0, ptr %mine", "  store i1 false, ptr %ready", "  %marking = icmp ne ptr %marks, null"]
    t.lines += [f"  br i1 {over}, label %over, label %begin"]
    t.lines += ["over:  ; a worker that comes back late", "  ret i1 true", "begin:"]
    for c, call in enumerate(calls):
        buffers = _buffers(linker, t, number, call, at)
        needed = any(linker.program.operand(i, number).kind == "private" for i in call.node.inputs)
        handout = WorkStealing(c, units[c], _grain(linker, t, call.units), linker.stride)
        _emit_units(linker, t, call, buffers, handout, needed)
        at += len(call.kernel.buffers)
    count = t.value("load i64, ptr %mine")
    on = t.value(f"call i1 %phase(ptr %pool, ptr %finished, i64 {count}, i64 {total}, i64 %worker)")
    yield from t.lines
    yield f"  ret i1 {on}"


def _grain(linker: _Linker, t: Text, units: Units) -> str:
    """Units per range of a call."""
    size = str(grain(units, linker.program.graph.bounds))
    if not units.few:
        return size
    is_few = t.value(f"icmp ule i64 {t.dim(units.dim, linker.symbols)}, {units.few}")
    return t.value(f"select i1 {is_few}, i64 {grain_of_few(units)}, i64 {size}")


def _emit_units(
    linker: _Linker, t: Text, call: Call, buffers: list[str], handout: WorkStealing, prologue: bool
) -> None:
    """The loop in which a worker computes units of a call. It runs the prologue, if there is one, before the first."""
    c = handout.c
    _emit_begin(t, f"call{c}")
    before = t.value("load i64, ptr %mine")
    start, end = handout.begin(t)
    if prologue:
        t.lines += [f"  br i1 {t.value('load i1, ptr %ready')}, label %units{c}, label %first{c}", f"first{c}:"]
        _emit_begin(t, f"prologue{c}", "begun.prologue")
        t.lines += ["  call void @prologue(ptr %args, ptr %ext, i64 %private)"]
        _emit_mark(t, f"prologue{c}", 0, "1", "begun.prologue")
        t.lines += ["  store i1 true, ptr %ready", f"  br label %units{c}", f"units{c}:"]
    _emit_call(linker, t, call, buffers, start, end)
    did = t.value(f"add i64 {t.value('load i64, ptr %mine')}, {t.value(f'sub i64 {end}, {start}')}")
    t.lines.append(f"  store i64 {did}, ptr %mine")
    handout.end(t)
    _emit_mark(t, f"call{c}", c + 1, t.value(f"sub i64 {t.value('load i64, ptr %mine')}, {before}"))


def _emit_begin(t: Text, what: str, begun: str = "begun") -> None:
    """Reads the clock if marks are recorded."""
    t.lines += [f"  br i1 %marking, label %clock.{what}, label %go.{what}", f"clock.{what}:"]
    t.lines += [f"  store i64 {t.value('call i64 @llvm.readcyclecounter()')}, ptr %{begun}"]
    t.lines += [f"  br label %go.{what}", f"go.{what}:"]


def _emit_mark(t: Text, what: str, number: int, units: str, begun: str = "begun") -> None:
    """Notes the mark of what began last, if marks are recorded."""
    t.lines += [f"  br i1 %marking, label %mark.{what}, label %on.{what}", f"mark.{what}:"]
    t.lines += [f"  call void @mark(ptr %marks, i64 {number}, i64 {t.value(f'load i64, ptr %{begun}')}, i64 {units})"]
    t.lines += [f"  br label %on.{what}", f"on.{what}:"]


def _emit_call(linker: _Linker, t: Text, call: Call, buffers: list[str], begin: str, end: str) -> None:
    """Calls a kernel for the units [begin, end)."""
    extents = [t.dim(d, linker.symbols) for d in call.extents]
    passed = [f"ptr {b}" for b in buffers] + [f"i64 {e}" for e in (*extents, begin, end)]
    t.lines.append(f"  call void @{call.kernel.symbol}({', '.join(passed)})")


def _buffers(linker: _Linker, t: Text, number: int, call: Call, at: int, replicated_results: bool = False) -> list[str]:
    """The pointers of a call, from row `at` of the argument table on.

    The table holds addresses in the private memory of worker 0, so the offset of this worker's memory is added.
    """
    found = []
    for i, replicated in enumerate(_is_replicated(linker.program, number, call, replicated_results)):
        pointer = t.load("ptr", "%args", at + i)
        found.append(t.value(f"getelementptr i8, ptr {pointer}, i64 %private") if replicated else pointer)
    return found


def _is_replicated(program: Program, number: int, call: Call, replicated_results: bool) -> list[bool]:
    """For each buffer of a call, whether it is in private memory."""
    return [
        replicated_results if node in (None, call.node) else program.operand(node, number).kind == "private"
        for node in call.buffers()
    ]


def _step(linker: _Linker, regions: list[_Bound]) -> str:
    """The module of the step and of the functions that all regions call."""
    declared = ["declare i64 @llvm.umin.i64(i64, i64)", "declare i64 @llvm.readcyclecounter()"]
    declared += [f"declare i1 @{name}({_types(_REGION)})" for name in sorted(linker.regions)]
    body = "\n".join(_emit_step(linker, len(regions), sum(len(region.calls) for region in regions)))
    step = f"define void @step(ptr %ctx, i64 %worker, i64 %workers) {{\n{body}\n}}"
    return "\n\n".join([*declared, TAKE, _MARK, _table(regions), step, WRITTEN]) + "\n"


def _types(parameters: str) -> str:
    return ", ".join(parameter.split()[0] for parameter in parameters.split(", "))


#: Notes a mark, unless no units were done: a worker that comes back to a region finds none.
_MARK = f"""define void @mark(ptr %marks, i64 %number, i64 %begin, i64 %units) noinline cold {{
  %none = icmp eq i64 %units, 0
  br i1 %none, label %out, label %note
note:
  %end = call i64 @llvm.readcyclecounter()
  %place = getelementptr [{len(MARK)} x i64], ptr %marks, i64 %number
  store i64 %begin, ptr %place
  %place.end = getelementptr i64, ptr %place, i64 {MARK.index("end")}
  store i64 %end, ptr %place.end
  %place.units = getelementptr i64, ptr %place, i64 {MARK.index("units")}
  store i64 %units, ptr %place.units
  br label %out
out:
  ret void
}}"""


#: Fields of the step's table of regions: the function, the first row of its arguments, the number of its first call.
_ROW = {"function": "ptr", "args": "i64", "call": "i64"}
_ROW_TYPE = f"{{ {', '.join(_ROW.values())} }}"


def _table(regions: list[_Bound]) -> str:
    """The table of regions, as LLVM constant data.

    A table is much smaller than code: a sequence of calls would be the largest part of the program.
    """
    args = accumulate((sum(len(c.kernel.buffers) for c in r.all_calls) for r in regions), initial=0)
    calls = accumulate((len(r.calls) for r in regions), initial=0)
    lines = [
        f"  {_ROW_TYPE} {{ ptr @{region.function}, i64 {row}, i64 {call} }}"
        for region, row, call in zip(regions, args, calls, strict=False)
    ]
    return f"@regions = private constant [{len(lines)} x {_ROW_TYPE}] [\n" + ",\n".join(lines) + "\n]"


def _emit_step(linker: _Linker, regions: int, calls: int) -> list[str]:
    """The body of the step: a loop over the table of regions."""
    t = Text()
    pointers = CONTEXT[: CONTEXT.index("marks") + 1]
    ctx = {name: t.load("ptr", "%ctx", i) for i, name in enumerate(pointers)}
    clock = t.value(f"getelementptr i64, ptr {ctx['times']}, i64 {t.value(f'mul i64 %worker, {regions + 1}')}")
    private = t.value(f"mul i64 %worker, {_align(linker.private)}")
    streams = t.least("%workers", str(SHARES))
    stream = t.value(f"urem i64 %worker, {streams}")
    ends = t.value(f"getelementptr i64, ptr {ctx['counters']}, i64 {SHARES * linker.stride // 8}")
    recorded = t.value(f"icmp ne ptr {ctx['marks']}, null")
    own = t.value(f"mul i64 %worker, {mark_number(regions, calls)}")
    t.lines += ["  br label %next", "next:", "  %r = phi i64 [ 0, %0 ], [ %after, %region ]"]
    now = t.value("call i64 @llvm.readcyclecounter()")
    t.lines.append(f"  store i64 {now}, ptr {t.value(f'getelementptr i64, ptr {clock}, i64 %r')}")
    t.lines += [f"  br i1 {t.value(f'icmp ult i64 %r, {regions}')}, label %region, label %out", "region:"]
    table = t.value(f"getelementptr {_ROW_TYPE}, ptr @regions, i64 %r")
    row = {
        name: t.value(f"load {kind}, ptr {t.value(f'getelementptr {_ROW_TYPE}, ptr {table}, i32 0, i32 {i}')}")
        for i, (name, kind) in enumerate(_ROW.items())
    }
    args = t.value(f"getelementptr ptr, ptr {ctx['args']}, i64 {row['args']}")
    counters = t.value(f"getelementptr i64, ptr {ctx['counters']}, i64 {row['call']}")
    finished = t.value(f"getelementptr i64, ptr {ends}, i64 %r")
    first = row["call"]
    mark = t.value(f"add i64 {own}, {t.value(f'add i64 %r, {first}')}")
    place = t.value(f"getelementptr [{len(MARK)} x i64], ptr {ctx['marks']}, i64 {mark}")
    marks = t.value(f"select i1 {recorded}, ptr {place}, ptr null")
    passed = [f"ptr {p}" for p in (args, ctx["extents"], counters, finished, ctx["pool"], ctx["phase"], marks)]
    passed += [f"i64 {x}" for x in ("%worker", private, stream, streams)]
    on = t.value(f"call i1 {row['function']}({', '.join(passed)})")
    t.lines += ["  %after = add i64 %r, 1", f"  br i1 {on}, label %next, label %out", "out:", "  ret void"]
    return t.lines


def _declaration(kernel: Kernel) -> str:
    types = ["ptr"] * len(kernel.buffers) + ["i64"] * (len(kernel.extents) + 2)
    return f"declare void @{kernel.symbol}({', '.join(types)})"


# -- the manifest ---------------------------------------------------------------------------------------------------


def _manifest(linker: _Linker, regions: list[_Bound]) -> dict[str, Any]:
    """The manifest with `args`, the rows of the argument table, with the scratch memory of the calls, and for each
    region with the name of its function and the units of its calls: [number at most, how many a worker takes at once].
    """
    args = [row for region in regions for row in _arguments(linker, region)]
    limits = linker.program.graph.bounds
    shared = {
        "functions": [region.function for region in regions],
        "units": [[[c.units.most(limits), grain(c.units, limits)] for c in region.calls] for region in regions],
    }
    symbols = {call.node: call.kernel.symbol for region in regions for call in region.all_calls}
    described = manifest_of(linker.program, symbols.__getitem__) | {"signed_codes": linker.target.isa.signed_codes}
    return {**described, "arena": _align(linker.scratch), "private": _align(linker.private), "args": args, **shared}


def _arguments(linker: _Linker, region: _Bound) -> Iterator[list[Any]]:
    """The rows of a region in the argument table: [kind, offset or name]."""
    for i, call in enumerate(region.all_calls):
        replicated_results = i < len(region.first)
        places = _is_replicated(linker.program, region.number, call, replicated_results)
        for node, replicated in zip(call.buffers(), places, strict=True):
            yield _scratch(linker, call, i, replicated) if node is None else _place(linker.program, node, replicated)


def _scratch(linker: _Linker, call: Call, number: int, replicated: bool) -> list[Any]:
    """The scratch memory of call `number` of a region. Equal calls of other regions, as in equal layers, share it."""
    size = dims.bounds(call.scratch, linker.program.graph.bounds)[1]
    key = call.kernel.symbol, size, number, replicated
    if key not in linker.scratches:
        if replicated:
            linker.scratches[key], linker.private = _align(linker.private), _align(linker.private) + size
        else:
            linker.scratches[key], linker.scratch = _align(linker.scratch), _align(linker.scratch) + size
    return ["private" if replicated else "arena", linker.scratches[key]]


def _place(program: Program, node: Node, replicated: bool) -> list[Any]:
    assert program.replicated is not None
    buffer = program.replicated[root(node)] if replicated else program.buffer(node)
    return [buffer.kind, buffer.name or buffer.offset]


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
