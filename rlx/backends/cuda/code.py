"""LLVM assembly of kernels under construction: typed values with operators, loops and conditions as `with` blocks.

A kernel of this device is a function that a block of `THREADS` threads runs. Its first parameter is the number of the
block; pointers to its operands and its result follow, then `extents`, the values of the program's symbols. `entry` puts
the kernels of a region into one function that the card starts.

No number is rounded otherwise than written: multiplications and additions are not contracted, unless `fma` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rlx.backends.cuda.agreed import steps
from rlx.backends.cuda.features import AMPERE, Features
from rlx.backends.cuda.llvm_types import BYTES, FLOATS, constant, conversion, size_of
from rlx.ir.dims import Dim, DimLike

THREADS, WARP = steps.THREADS, 32
WARPS = THREADS // WARP
TYPICAL_MULTIPROCESSORS = 132  # of a large card, for which work is shared out
RESERVED = 1024  # bytes of shared memory that the card takes for each block

GLOBAL, SHARED = "ptr addrspace(1)", "ptr addrspace(3)"
I1, I8, I16, I32, I64 = "i1", "i8", "i16", "i32", "i64"
F16, BF16, F32, F64 = "half", "bfloat", "float", "double"
_LETS = "  ; lets"  # where a kernel lets the next one start, if it does not say


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a kernel: a number or a pointer, the same kind in every thread.

    Attributes:
        peers: of a pointer to what all cards keep: how many other cards there are, on which it is written, too.
    """

    code: Code = field(repr=False)
    text: str
    type: str
    peers: int = 0

    def _binary(self, other: Operand, integer: str, floating: str, *, swapped: bool = False) -> Value:
        first, second = self, self.code.as_value(other, self.type)
        if swapped:
            first, second = second, first
        op = floating if self.type in FLOATS else integer
        return self.code.op(f"{op} {self.type} {first.text}, {second.text}", self.type)

    def __add__(self, other: Operand) -> Value:
        return self._binary(other, "add", "fadd")

    def __radd__(self, other: Operand) -> Value:
        return self._binary(other, "add", "fadd", swapped=True)

    def __sub__(self, other: Operand) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Operand) -> Value:
        return self._binary(other, "sub", "fsub", swapped=True)

    def __mul__(self, other: Operand) -> Value:
        return self._binary(other, "mul", "fmul")

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Value:
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: Operand) -> Value:
        return self._binary(other, "", "fdiv", swapped=True)

    def __floordiv__(self, other: Operand) -> Value:
        return self._binary(other, "udiv", "")

    def __mod__(self, other: Operand) -> Value:
        return self._binary(other, "urem", "")

    def __and__(self, other: Operand) -> Value:
        return self._binary(other, "and", "")

    def __or__(self, other: Operand) -> Value:
        return self._binary(other, "or", "")

    def __xor__(self, other: Operand) -> Value:
        return self._binary(other, "xor", "")

    def __lshift__(self, other: Operand) -> Value:
        return self._binary(other, "shl", "")

    def __rshift__(self, other: Operand) -> Value:
        return self._binary(other, "lshr", "")

    def __neg__(self) -> Value:
        if self.type in FLOATS:
            return self.code.op(f"fneg {self.type} {self.text}", self.type)
        return 0 - self

    def _compared(self, other: Operand, integer: str, floating: str) -> Value:
        second = self.code.as_value(other, self.type)
        op = f"fcmp {floating}" if self.type in FLOATS else f"icmp {integer}"
        return self.code.op(f"{op} {self.type} {self.text}, {second.text}", I1)

    def __lt__(self, other: Operand) -> Value:
        return self._compared(other, "slt", "olt")

    def __le__(self, other: Operand) -> Value:
        return self._compared(other, "sle", "ole")

    def __gt__(self, other: Operand) -> Value:
        return self._compared(other, "sgt", "ogt")

    def __ge__(self, other: Operand) -> Value:
        return self._compared(other, "sge", "oge")

    def equals(self, other: Operand) -> Value:
        """Whether two values are equal."""
        return self._compared(other, "eq", "oeq")

    def is_nan(self) -> Value:
        """Whether it is no number."""
        return self._compared(self, "ne", "une")

    def to(self, type_: str, *, signed: bool = False) -> Value:
        """The number in another type; narrower integers keep their low bits.

        Args:
            signed: an integer of fewer bits than 32 is signed; those of 32 and 64 bits always are.
        """
        if type_ == self.type:
            return self
        return self.code.op(f"{conversion(self.type, type_, signed)} {self.type} {self.text} to {type_}", type_)

    def bits(self, type_: str) -> Value:
        """The same bits as another type."""
        if type_ == self.type:
            return self
        return self.code.op(f"bitcast {self.type} {self.text} to {type_}", type_)


Operand: TypeAlias = Value | int | float


@dataclass(frozen=True)
class Variable:
    """A value that changes."""

    code: Builder
    place: str
    type: str

    def get(self) -> Value:
        """Its value now."""
        return self.code.op(f"load {self.type}, ptr {self.place}", self.type)

    def set(self, value: Operand) -> None:
        """Changes it."""
        found = self.code.as_value(value, self.type)
        self.code.line(f"store {self.type} {found.text}, ptr {self.place}")


def set_all(variables: Iterable[Variable], values: Iterable[Operand]) -> None:
    """Changes several variables, each to its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.set(value)


class Builder:
    """The text of a kernel under construction.

    Args:
        name: of its function.
        pointers: names of its pointers, each with a place in shared memory, or None for a parameter.
        symbols: names of the program's symbols, in the order of `extents`.
        features: what the card has.
        own: what each block computes for itself before it reads anything that is no weight.
        soon: parameters whose memory is brought to the card's cache before waiting, by their numbers, with bytes.
        start: first byte of shared memory that is free.

    Attributes:
        block: the number of the block, from 0.
        thread: the number of the thread in its block.
        shared: bytes of shared memory that are taken so far.
        resident: how many blocks of the kernel a multiprocessor is to have room for: registers of a thread follow.
        extents: values of the symbols.
        parameters: the pointers that a caller gives: its own, then those of kernels that it calls.
    """

    def __init__(
        self, name: str, pointers: Mapping[str, int | None], symbols: Sequence[str], features: Features = AMPERE,
        own: Sequence[Own] = (), soon: Sequence[tuple[int, int]] = (), start: int = 0,
    ) -> None:  # fmt: skip
        self.name, self._symbols, self.features, self.waits = name, tuple(symbols), features, False
        self.own, self.soon, self.lets = own, soon, False
        self._lines: list[str] = []
        self._first: list[str] = []
        self._count = 0
        self.declared: set[str] = set()
        self._made: dict[Hashable, list[Value]] = {}
        self.shared, self.resident = start, 0
        self.block = self._value("%block", I32)
        self.parameters = [f"%p.{each}" for each, place in pointers.items() if place is None]
        self.parameters += [f"%own{i}.{j}" for i, each in enumerate(own) for j in range(each.kernel.pointers)]
        self.pointers = {each: self._pointer(each, place) for each, place in pointers.items()}
        self.extents = self._value("%extents", GLOBAL)
        self.thread = self.call(I32, "llvm.nvvm.read.ptx.sreg.tid.x")
        self.lane, self.warp = self.thread & (WARP - 1), self.thread >> 5

    # -- text ---------------------------------------------------------------------------------------------------------

    def _pointer(self, name: str, place: int | None) -> Value:
        if place is None:
            return self._value(f"%p.{name}", GLOBAL)
        return self.op(f"getelementptr i8, {SHARED} @shared, i64 {place}", SHARED)

    def _value(self, text: str, type_: str) -> Value:
        assert isinstance(self, Code)
        return Value(self, text, type_)

    def line(self, text: str) -> None:
        """Adds a line."""
        self._lines.append(f"  {text}")

    def op(self, text: str, type_: str) -> Value:
        """Adds an instruction with a result."""
        self._count += 1
        self.line(f"%v{self._count} = {text}")
        return self._value(f"%v{self._count}", type_)

    def as_value(self, value: Operand, type_: str) -> Value:
        """A value, or a number as a constant of this type."""
        if isinstance(value, Value):
            assert value.type == type_, f"{value.type} is not {type_} in {self.name}"
            return value
        return self._value(constant(value, type_), type_)

    def number(self, value: Operand) -> Value:
        """An i32."""
        return self.as_value(value, I32)

    def f32(self, value: float) -> Value:
        """A constant f32."""
        return self.as_value(value, F32)

    def call(self, result: str, function: str, *operands: Value) -> Value:
        """Calls a function of LLVM."""
        self.declared.add(f"declare {result} @{function}({', '.join(o.type for o in operands)})")
        text = f"call {result} @{function}({', '.join(f'{o.type} {o.text}' for o in operands)})"
        if result == "void":
            self.line(text)
            return self._value("", "void")
        return self.op(text, result)

    def pure_assembly(self, result: str, text: str, constraints: str, *operands: Value) -> Value:
        """An instruction of PTX that LLVM has no name for, with no effect but its result."""
        given = ", ".join(f"{o.type} {o.text}" for o in operands)
        return self.op(f'call {result} asm "{text}", "{constraints}"({given})', result)

    def assembly(self, result: str, text: str, constraints: str, *operands: Value) -> Value:
        """An instruction of PTX that reads or writes memory."""
        given = ", ".join(f"{o.type} {o.text}" for o in operands)
        all_constraints = ",".join([*filter(None, [constraints]), "~{memory}"])
        call = f'call {result} asm sideeffect "{text}", "{all_constraints}"({given})'
        if result == "void":
            self.line(call)
            return self._value("", "void")
        return self.op(call, result)

    def wait(self) -> None:
        """Waits for the kernel before this one, whose results may be read from then on; computes what is its own."""
        raise NotImplementedError

    def let_next(self) -> None:
        """Lets the kernel after this one start, once all blocks are here or have ended; by default when they waited.

        What kernels read before they `wait` may so be written by any kernel but the one before.
        """
        raise NotImplementedError

    def finish(self) -> str:
        """The function as text."""
        if not self.waits:
            body, self._lines = self._lines, []
            self.wait()
            self._lines += body
        if _LETS in self._lines:
            at = self._lines.index(_LETS)
            body, self._lines = self._lines[at + 1 :], self._lines[:at]
            if not self.lets:
                self.let_next()
            self._lines += body
        pointers = "".join(f", {GLOBAL} {name}" for name in self.parameters)
        head = f"define internal void @{self.name}(i32 %block{pointers}, {GLOBAL} %extents) alwaysinline nounwind {{"
        return "\n".join([head, "entry:", *self._first, *self._lines, "  ret void", "}"])

    # -- memory -------------------------------------------------------------------------------------------------------

    def at(self, pointer: Value, type_: str, index: Operand) -> Value:
        """The address of an element, by its number of i32 or i64."""
        place = index if isinstance(index, Value) else self._value(str(index), I64)
        text = f"getelementptr {type_}, {pointer.type} {pointer.text}, {place.type} {place.text}"
        found = self.op(text, pointer.type)
        return replace(found, peers=pointer.peers) if pointer.peers else found

    def load(self, pointer: Value, type_: str, index: Operand = 0, *, constant: bool = False, align: int = 0) -> Value:
        """Reads an element.

        Args:
            constant: nobody writes this memory while the kernel runs.
            align: of the address, in bytes; by default that of the type.
        """
        place = self.at(pointer, type_, index)
        mark = ", !invariant.load !0" if constant else ""
        return self.op(f"load {type_}, {place.type} {place.text}, align {align or size_of(type_)}{mark}", type_)

    def fetched(self, pointer: Value, words: int) -> list[Value]:
        """Begins here, and not later, to read 1, 2 or 4 i32 of memory of the card that nobody writes.

        LLVM moves other loads to where their results are used, behind waiting.
        """
        type_ = I32 if words == 1 else f"{{{', '.join([I32] * words)}}}"
        names = ", ".join(f"${i}" for i in range(words))
        text = "ld.global.nc.u32 $0, [$1];" if words == 1 else f"ld.global.nc.v{words}.u32 {{{names}}}, [${words}];"
        constraints = ",".join(["=r"] * words + ["l"])
        found = self.op(f'call {type_} asm sideeffect "{text}", "{constraints}"({GLOBAL} {pointer.text})', type_)
        if words == 1:
            return [found]
        return [self.op(f"extractvalue {type_} {found.text}, {i}", I32) for i in range(words)]

    def fetch_line(self, pointer: Value) -> None:
        """Brings a line of the card's memory to its cache."""
        self.assembly("void", "prefetch.global.L2 [$0];", "l", pointer)

    def store(self, pointer: Value, value: Value, index: Operand = 0, *, align: int = 0) -> None:
        """Writes an element."""
        place = self.at(pointer, value.type, index)
        for each in (place, *self._on_peers(place)):
            self.line(f"store {value.type} {value.text}, {each.type} {each.text}, align {align or size_of(value.type)}")

    def _on_peers(self, place: Value) -> list[Value]:
        """The place on the other cards of what all cards keep."""
        distances = [self.load(self.extents, I64, steps.PEERS_AT + i, constant=True) for i in range(place.peers)]
        return [self.at(replace(place, peers=0), I8, each) for each in distances]

    def share(self, nbytes: int, align: int = 16) -> Value:
        """Shared memory of the block."""
        start = -(-self.shared // align) * align
        self.shared = start + nbytes
        return self.op(f"getelementptr i8, {SHARED} @shared, i64 {start}", SHARED)

    def variable(self, type_: str, value: Operand) -> Variable:
        """A value that changes, with its first value."""
        self._count += 1
        place = f"%a{self._count}"
        self._first.append(f"  {place} = alloca {type_}")
        found = Variable(self, place, type_)
        found.set(value)
        return found

    def lanes(self, vector: Value) -> list[Value]:
        """The elements of a vector."""
        count, type_ = vector.type[1:-1].split(" x ")
        return [self.op(f"extractelement {vector.type} {vector.text}, i32 {i}", type_) for i in range(int(count))]

    def vector(self, values: Sequence[Value]) -> Value:
        """A vector of these elements."""
        type_ = f"<{len(values)} x {values[0].type}>"
        found = self._value("poison", type_)
        for i, value in enumerate(values):
            found = self.op(f"insertelement {type_} {found.text}, {value.type} {value.text}, i32 {i}", type_)
        return found


class Flow(Builder):
    """A kernel under construction, with its control flow, and the order of its threads, blocks and kernels."""

    # -- sizes --------------------------------------------------------------------------------------------------------

    def dim(self, dim: DimLike, env: Mapping[str, Value] | None = None) -> Operand:
        """The value of a dim: a number, or an i32.

        Args:
            env: values of symbols in place of the extents.
        """
        if not isinstance(dim, Dim):
            return dim
        found: Operand = dim.const
        for symbol, factor in dim.terms:
            value = env[symbol] if env and symbol in env else self.dim_named(symbol)
            found = value * factor + found
        return found

    def dim_named(self, symbol: str) -> Value:
        """The value of a symbol of the program, i32."""
        return self.load(self.extents, I32, self.symbol(symbol), constant=True)

    def symbol(self, symbol: str) -> int:
        """The place of a symbol of the program among the extents."""
        return self._symbols.index(symbol)

    # -- control ------------------------------------------------------------------------------------------------------

    def _label(self) -> str:
        self._count += 1
        return f"b{self._count}"

    def _begin(self, label: str) -> None:
        """Begins a block of instructions."""
        self._lines.append(f"{label}:")
        self._made = {}

    def once(self, key: Hashable, make: Callable[[], list[Value]]) -> list[Value]:
        """What a function makes; it is made once in instructions without branches between them."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs what follows if the condition holds."""
        body, done = self._label(), self._label()
        self.line(f"br i1 {condition.text}, label %{body}, label %{done}")
        self._begin(body)
        yield
        self.line(f"br label %{done}")
        self._begin(done)

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)` over i32."""
        i = self.variable(I32, start)
        head, body, done = self._label(), self._label(), self._label()
        self.line(f"br label %{head}")
        self._begin(head)
        now = i.get()
        self.line(f"br i1 {(now < stop).text}, label %{body}, label %{done}")
        self._begin(body)
        yield now
        i.set(now + step)
        self.line(f"br label %{head}")
        self._begin(done)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """Runs what follows again while the condition holds that it gives to the function."""
        body, done, conditions = self._label(), self._label(), list[Value]()
        self.line(f"br label %{body}")
        self._begin(body)
        yield conditions.append
        self.line(f"br i1 {conditions[0].text}, label %{body}, label %{done}")
        self._begin(done)

    def select(self, condition: Value, value: Operand, other: Operand) -> Value:
        """One of two values."""
        type_ = value.type if isinstance(value, Value) else other.type if isinstance(other, Value) else I32
        first, second = self.as_value(value, type_), self.as_value(other, type_)
        return self.op(f"select i1 {condition.text}, {type_} {first.text}, {type_} {second.text}", type_)

    def chosen(self, condition: Value | None, value: Value, other: Operand) -> Value:
        """A value if the condition holds or there is none."""
        return value if condition is None else self.select(condition, value, other)

    def guarded(self, condition: Value | None) -> AbstractContextManager[None]:
        """`when`, if there is a condition."""
        return nullcontext() if condition is None else self.when(condition)

    def smaller(self, a: Operand, b: Operand) -> Value:
        """The smaller of two integers."""
        a = a if isinstance(a, Value) else self.number(a)
        return self.select(a < b, a, b)

    def larger(self, a: Operand, b: Operand) -> Value:
        """The larger of two integers."""
        a = a if isinstance(a, Value) else self.number(a)
        return self.select(a > b, a, b)

    def wait(self) -> None:
        if self.waits:
            return
        self.waits = True
        if self.features.overlaps:
            thread = self.call(I32, "llvm.nvvm.read.ptx.sreg.tid.x")
            for number, nbytes in self.soon:
                memory = self._value(self.parameters[number], GLOBAL)
                with self.loop(thread, -(-nbytes // steps.LINE), THREADS) as line:
                    self.fetch_line(self.at(memory, I8, line * steps.LINE))
            self.call("void", "llvm.nvvm.griddepcontrol.wait")
            self._lines.append(_LETS)
        for i, each in enumerate(self.own):
            pointers = "".join(f", {GLOBAL} %own{i}.{j}" for j in range(each.kernel.pointers))
            count = (self.number(self.dim(each.count)) + (each.per - 1)) // each.per * each.times
            with self.loop(0, count) as block:
                self.line(f"call void @{each.kernel.name}(i32 {block.text}{pointers}, {GLOBAL} {self.extents.text})")
            self.barrier()

    def let_next(self) -> None:
        self.lets = True
        if self.features.overlaps:
            self.call("void", "llvm.nvvm.griddepcontrol.launch.dependents")

    def barrier(self) -> None:
        """Waits for all threads of the block, whose writes are seen from then on."""
        self.call("void", "llvm.nvvm.barrier.cta.sync.aligned.all", self.number(0))

    def sync_warp(self, lanes: int = -1) -> None:
        """Waits for all threads of the warp, whose writes are seen from then on.

        Args:
            lanes: with a bit for each thread that comes here; by default all do.
        """
        self.call("void", "llvm.nvvm.bar.warp.sync", self.number(lanes))

    def is_last(self, counter: Value, count: Operand) -> Value:
        """Whether this block is the last of `count` that come here; it sees what the others wrote before.

        Args:
            counter: address of an i32, which is 0 before and after.
        """
        place = self.share(4)
        self.barrier()
        with self.when(self.thread.equals(0)):
            before = self.assembly(I32, "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", "=r,l", counter)
            self.store(place, before)
            with self.when((before + 1).equals(count)):
                self.store(counter, self.number(0))
        self.barrier()
        return (self.load(place, I32) + 1).equals(count)


class Code(Flow):
    """A kernel under construction, with what threads do together, and numbers."""

    # -- warps --------------------------------------------------------------------------------------------------------

    def exchanged(self, value: Value, distance: int) -> Value:
        """The value of the lane whose number differs in this bit."""
        return self._moved("bfly", value, self.number(distance))

    def shuffled(self, value: Value, lane: Value) -> Value:
        """The value of a lane."""
        return self._moved("idx", value, lane)

    def _moved(self, how: str, value: Value, which: Value) -> Value:
        """A value of 4 or 8 bytes of another lane."""
        if BYTES[value.type] == 8:
            wide = value.bits(I64)
            low, high = (self._moved(how, part.to(I32), which) for part in (wide, wide >> 32))
            unsigned = self.op(f"zext i32 {low.text} to i64", I64)
            return (unsigned | high.to(I64) << 32).bits(value.type)
        given = (self.number(-1), value.bits(I32), which, self.number(31))
        return self.call(I32, f"llvm.nvvm.shfl.sync.{how}.i32", *given).bits(value.type)

    def ballot(self, condition: Value) -> Value:
        """An i32 with a bit for each lane of the warp, 1 where the condition holds."""
        return self.call(I32, "llvm.nvvm.vote.ballot.sync", self.number(-1), condition)

    # -- sums of several threads --------------------------------------------------------------------------------------

    def add(self, place: Value, value: Value) -> None:
        """Adds to an integer in shared memory or that of the card, which others may add to. A barrier must follow, or
        `is_last`, before somebody reads it.
        """
        where = "cta.shared" if place.type == SHARED else "gpu.global"
        kind = ("u64", "l") if value.type == I64 else ("u32", "r")
        self.assembly("void", f"red.relaxed.{where}.add.{kind[0]} [$0], $1;", f"l,{kind[1]}", place, value)

    def added(self, place: Value) -> Value:
        """Adds 1 to an i32 in memory of the card; what it was before."""
        return self.assembly(I32, "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", "=r,l", place)

    def warp_sum(self, value: Value, lanes: int = WARP) -> Value:
        """The sum over the lanes of a warp, or over each so many side by side, in every lane."""
        return self._over_lanes(value, lambda a, b: a + b, lanes)

    def warp_max(self, value: Value, lanes: int = WARP) -> Value:
        """The largest value, as `warp_sum`; NaN is left out."""
        return self._over_lanes(value, self.fmax, lanes)

    def _over_lanes(self, value: Value, combine: Callable[[Value, Value], Value], lanes: int) -> Value:
        while lanes > 1:
            lanes //= 2
            value = combine(value, self.exchanged(value, lanes))
        return value

    def block_sum(self, value: Value) -> Value:
        """The sum over the threads of a block, in every thread."""
        return self.warp_sum(self._of_warps(self.warp_sum(value)), WARPS)

    def block_max(self, value: Value) -> Value:
        """The largest value of the threads of a block, in every thread."""
        return self.warp_max(self._of_warps(self.warp_max(value)), WARPS)

    def _of_warps(self, value: Value) -> Value:
        """The value of each warp, in one of `WARPS` lanes side by side."""
        place = self.share(4 * WARPS)
        self.barrier()  # for readers of an earlier result in the same place
        with self.when(self.lane.equals(0)):
            self.store(place, value, self.warp)
        self.barrier()
        return self.load(place, F32, self.lane & (WARPS - 1))

    # -- numbers ------------------------------------------------------------------------------------------------------

    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once."""
        given = [self.as_value(x, a.type) for x in (a, b, c)]
        return self.call(a.type, f"llvm.fma.{'f64' if a.type == F64 else 'f32'}", *given)

    def fmax(self, a: Value, b: Operand) -> Value:
        """The larger of two numbers; a number if one is NaN."""
        return self.call(F32, "llvm.maxnum.f32", a, self.as_value(b, F32))

    def fmin(self, a: Value, b: Operand) -> Value:
        """The smaller of two numbers; a number if one is NaN."""
        return self.call(F32, "llvm.minnum.f32", a, self.as_value(b, F32))

    def fabs(self, a: Value) -> Value:
        """The magnitude of a number."""
        return self.call(a.type, f"llvm.fabs.{'f64' if a.type == F64 else 'f32'}", a)

    def bytes_of(self, a: Value, b: Value, selector: Operand) -> Value:
        """An i32 of four bytes of two i32: digit i of the selector says which of the eight is byte i."""
        return self.call(I32, "llvm.nvvm.prmt", a, b, self.number(selector))


@dataclass(frozen=True)
class Kernel:
    """A finished kernel.

    Attributes:
        name: of its function.
        text: the function.
        pointers: how many it takes: its own, then those of what each block computes for itself.
        declared: what it calls.
        shared: bytes of shared memory that it uses.
        own: kernels that it calls.
        resident: how many blocks a multiprocessor is to have room for; 0 if that does not matter.
    """

    name: str
    text: str
    pointers: int
    declared: frozenset[str]
    shared: int
    own: tuple[Kernel, ...] = ()
    resident: int = 0


@dataclass(frozen=True)
class Own:
    """A kernel that each block runs for itself, with ceil(count / per) * times as the number of blocks."""

    kernel: Kernel
    count: DimLike
    per: int
    times: int


def kernel_of(code: Code) -> Kernel:
    """The kernel that was built."""
    own = tuple(each.kernel for each in code.own)
    text = code.finish()
    declared = code.declared.union(*(each.declared for each in own))
    return Kernel(code.name, text, len(code.parameters), frozenset(declared), code.shared, own, code.resident)
