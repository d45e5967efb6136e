"""Runs kernels of the device "cuda" on paper: NumPy interprets their LLVM assembly, all threads of a block in step.

Threads that went different ways meet again, because those that are behind in the text run first, as far as the next
label or jump. A word of shared memory that two warps use between two barriers is an error, unless both read it or both
add to it; copies that run by themselves arrive when they are waited for, so that a missing wait is seen.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from rlx.backends.cuda.code import THREADS, WARP, WARPS

Array: TypeAlias = np.ndarray[Any, Any]
Run: TypeAlias = Callable[["Block"], None]
Value: TypeAlias = Callable[["Block"], Any]

_NUMPY = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "half": np.float16,
          "bfloat": np.int16, "float": np.float32, "double": np.float64}  # fmt: skip
_UNSIGNED = {"i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64}
_TYPE = r"(?:ptr(?: addrspace\(\d\))?|<\d+ x \w+>|\{[^}]*\}|\w+)"
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide,
}  # fmt: skip
_COMPARED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "slt": np.less, "sle": np.less_equal, "sgt": np.greater,
    "sge": np.greater_equal, "oeq": np.equal, "olt": np.less, "ole": np.less_equal, "ogt": np.greater,
    "oge": np.greater_equal, "une": np.not_equal,
}  # fmt: skip
_LANES = np.arange(THREADS)


class Memory:
    """The memory of a card: arrays at addresses.

    Attributes:
        raw: its bytes.
        base: the address of the first one.
    """

    base = 0

    def __init__(self, nbytes: int = 1 << 24) -> None:
        self.raw = np.full(nbytes, 0xCD, np.uint8)
        self._end = 256

    def put(self, values: Array) -> int:
        """The address of a copy of an array."""
        found, flat = self._end, np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.raw[found : found + flat.nbytes] = flat
        self._end = -(-(found + flat.nbytes + 64) // 256) * 256
        assert self._end <= len(self.raw), "the card on paper is too small"
        return found

    def get(self, address: int, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        """The array at an address."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.raw[address : address + count].view(dtype).reshape(shape)


class Program:
    """A kernel that can be run: its text, compiled to closures.

    Args:
        functions: those that it calls, by name.

    Attributes:
        basic_blocks: what runs between two labels.
    """

    def __init__(self, text: str, functions: Mapping[str, Program] | None = None) -> None:
        self.functions = functions or {}
        head, *lines = text.strip().splitlines()
        self.parameters = re.findall(r"%([\w.]+)", head[head.index("(") :])
        self.basic_blocks: list[list[Run]] = [[]]
        self.labels: dict[str, int] = {}
        for line in lines:
            line = line.strip()
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.basic_blocks)
                self.basic_blocks.append([])
            elif line and line != "}":
                self.basic_blocks[-1].append(_compiled(line))

    def __call__(self, memory: Memory, blocks: int | Sequence[int], arguments: Mapping[str, int],
                 extents: Sequence[int], shared: int) -> None:  # fmt: skip
        """Runs some blocks, one after the other.

        Args:
            arguments: addresses of the pointers.
            shared: bytes of shared memory.
        """
        table = memory.put(np.array([*extents, 0], np.int32))
        for block in range(blocks) if isinstance(blocks, int) else blocks:
            given = {f"p.{name}": at for name, at in arguments.items()} | {"block": block, "extents": table}
            assert set(given) >= set(self.parameters), set(self.parameters) - set(given)
            Block(self, memory, given, shared).run()


class Meeting:
    """A place where warps meet: how many of them have come, how often all had come, and what was done before."""

    def __init__(self, warps: int) -> None:
        self.warps, self.come, self.times, self.before = warps, 0, 0, list[Array]()


class Block:
    """A block that runs.

    Attributes:
        at: the number of the basic block that each thread is at.
        active: which threads run.
        whole: whether all do.
        written: which warps wrote each word of shared memory since the last barrier, a bit a warp.
        used: the same for reads.
        summed: the same for additions, which warps may make to the same word.
    """

    def __init__(self, program: Program, memory: Memory, given: Mapping[str, int], shared: int) -> None:
        self.program, self.memory = program, memory
        self.shared = np.full(max(shared, 16), 0xFF, np.uint8)  # of floats: NaN
        self.values: dict[str, Any] = {
            name: np.full(THREADS, value, np.int32 if name == "block" else np.int64) for name, value in given.items()
        }
        self.at = np.zeros(THREADS, np.int64)
        self.active, self.whole = np.ones(THREADS, np.bool_), True
        self.written = np.zeros(len(self.shared) // 4 + 1, np.uint8)
        self.used, self.summed = np.zeros_like(self.written), np.zeros_like(self.written)
        self.pending: list[list[tuple[Array, Array, Array]]] = [[]]
        self.meetings: dict[int, Meeting] = {}

    def run(self) -> None:
        """Until all threads end."""
        code = self.program.basic_blocks
        with np.errstate(all="ignore"):
            while (place := int(self.at.min())) < len(code):
                self.active = self.at == place
                self.whole = bool(self.active.all())
                self.at[self.active] = place + 1
                for run in code[place]:
                    run(self)

    def call(self, name: str, operands: Sequence[Array]) -> None:
        """The threads that run call a function of the program."""
        program = self.program.functions[name]
        inner = Block(program, self.memory, {}, 0)
        inner.values = dict(zip(program.parameters, operands, strict=True))
        inner.shared, inner.written, inner.used, inner.pending = self.shared, self.written, self.used, self.pending
        inner.summed = self.summed
        inner.meetings = self.meetings
        inner.at[~self.active] = len(program.basic_blocks)
        inner.run()
        self.pending = inner.pending

    def set(self, name: str, value: Any) -> None:
        """Sets a value in the threads that run."""
        before = self.values.get(name)
        if before is None or self.whole:
            self.values[name] = value
        elif isinstance(value, list):
            self.values[name] = [np.where(self.active, x, y) for x, y in zip(value, before, strict=True)]
        else:
            self.values[name] = np.where(self.active if value.ndim == 1 else self.active[:, None], value, before)

    def goto(self, label: str, which: Array) -> None:
        """Sends some of the threads that run to a label."""
        self.at[self.active & which] = self.program.labels[label]

    # -- memory -------------------------------------------------------------------------------------------------------

    def words(self, pointer: str, addresses: Array, size: int) -> tuple[Array, Array]:
        """The memory of a pointer in words, and the numbers of those of the threads that run, [threads, words].

        The others have the first ones.

        Raises:
            IndexError: an address is outside of the memory.
            AssertionError: an address is not aligned.
        """
        raw, base = (self.shared, 0) if "(3)" in pointer else (self.memory.raw, self.memory.base)
        places, word = np.where(self.active, addresses - base, 0), min(size, 8)
        if places.min() < 0 or places.max() + size > len(raw):
            raise IndexError(f"{size} bytes at {places.min()} to {places.max()} of {len(raw)}, {pointer}")
        assert not (places % min(size, 16)).any(), f"{size} bytes at addresses that are not aligned: {places[:8]}"
        return _in_words(raw, word), (places // word)[:, None] + np.arange(size // word)

    def load(self, pointer: str, addresses: Array, size: int, dtype: Any) -> Array:
        """What stands at the addresses of the threads that run, [threads, size / size of the dtype]."""
        words, places = self.words(pointer, addresses, size)
        return words[places].view(dtype)

    def store(self, pointer: str, addresses: Array, values: Array) -> None:
        """Stores the value, or the row of values, of each thread that runs."""
        words, places = self.words(pointer, addresses, values.nbytes // THREADS)
        given = np.ascontiguousarray(values).reshape(-1).view(words.dtype).reshape(places.shape)
        words[places[self.active]] = given[self.active]

    def note(self, addresses: Array, size: int, kind: str) -> None:
        """Notes a use of shared memory.

        Raises:
            AssertionError: another warp may use the same words at the same time.
        """
        words = addresses[self.active][:, None] // 4 + np.arange(-(-size // 4))
        self.note_words(words, _LANES[self.active][:, None] // WARP, kind)

    def note_words(self, words: Array, warps: Array | int, kind: str) -> None:
        """The same for words, each used by a warp."""
        tables = {"load": self.used, "store": self.written, "sum": self.summed}
        bits = np.left_shift(1, warps).astype(np.uint8)
        for other, table in tables.items():
            if kind != other or kind == "store":
                clash = (table[words] & ~bits) != 0
                assert not clash.any(), f"warps meet in shared memory at {words[clash][:4] * 4}"
        np.bitwise_or.at(tables[kind], words, bits)

    def barrier(self) -> None:
        """All threads that have not ended meet."""
        waiting = self.at < len(self.program.basic_blocks)
        assert (self.active == waiting).all() or self.active.all(), "a barrier that not all threads reach"
        self.written[:], self.used[:], self.summed[:] = 0, 0, 0


def _in_words(raw: Array, size: int) -> Array:
    """Bytes as words of so many."""
    return raw[: len(raw) // size * size].view(f"i{size}")


@cache
def _compiled(line: str) -> Run:
    for pattern, make in _FORMS:
        if found := pattern.fullmatch(line):
            return make(*found.groups())
    raise ValueError(f"not understood: {line}")


def _operand(text: str, type_: str) -> Value:
    """An operand: a value by its name, or a constant, which nobody changes."""
    if text.startswith("%"):
        name = text[1:]
        return lambda b: b.values[name]
    constant = _constant(text, type_)
    return lambda b: constant


def _constant(text: str, type_: str) -> Array:
    if text == "@shared":
        return np.zeros(THREADS, np.int64)
    if type_.startswith("<"):
        count, element = type_[1:-1].split(" x ")
        return np.zeros((THREADS, int(count)), _NUMPY[element])
    if type_ in ("float", "double"):
        number = struct.unpack("<d", struct.pack("<Q", int(text, 16)))[0] if text[:2] == "0x" else float(text)
        return np.full(THREADS, number, _NUMPY[type_])
    number = {"true": 1, "false": 0, "poison": 0}.get(text)
    return np.full(THREADS, int(text) if number is None else number).astype(_NUMPY.get(type_, np.int64))


def _set(name: str, value: Value) -> Run:
    return lambda b: b.set(name, value(b))


def _of(function: Callable[..., Any], name: str, type_: str, text: str) -> Run:
    """Sets a value to a function of another one."""
    value = _operand(text, type_)
    return _set(name, lambda b: function(value(b)))


def _of_two(function: Callable[..., Any], name: str, type_: str, first: str, second: str) -> Run:
    x, y = _operand(first, type_), _operand(second, type_)
    return _set(name, lambda b: function(x(b), y(b)))


def _binary(name: str, op: str, type_: str, first: str, second: str) -> Run:
    return _of_two(_BINARY.get(op) or partial(_unsigned, op, type_), name, type_, first, second)


def _unsigned(op: str, type_: str, x: Array, y: Array) -> Array:
    wide = _UNSIGNED[type_]
    x, dtype = x.view(wide), x.dtype
    if op in ("udiv", "urem"):
        y = np.where(y == 0, 1, y).astype(dtype).view(wide)
        found = (np.floor_divide if op == "udiv" else np.remainder)(x, y)
    else:
        found = (np.left_shift if op == "shl" else np.right_shift)(x, y.view(wide) % (8 * dtype.itemsize))
    return found.astype(wide).view(dtype)


def _compare(name: str, kind: str, op: str, type_: str, first: str, second: str) -> Run:
    return _of_two(_COMPARED[op], name, type_, first, second)


def to_bf16(x: Array) -> Array:
    """Bits of bf16 of f32, as int16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).view(np.int16)


def from_bf16(x: Array) -> Array:
    """f32 of bits of bf16."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _convert(name: str, op: str, old: str, text: str, new: str) -> Run:
    def value(x: Array) -> Array:
        if op == "bitcast":
            return _bitcast(x, new)
        if op == "zext" and old != "i1":
            return x.view(_UNSIGNED[old]).astype(_NUMPY[new])
        x = from_bf16(x) if old == "bfloat" else x
        return to_bf16(x) if new == "bfloat" else x.astype(_NUMPY[new])

    return _of(value, name, old, text)


def _bitcast(x: Array, new: str) -> Array:
    element = new[1:-1].split(" x ")[1] if new.startswith("<") else new
    found = np.ascontiguousarray(x).view(_NUMPY[element])
    return found.reshape(THREADS, -1) if new.startswith("<") else found.reshape(THREADS)


def _size(type_: str) -> tuple[int, Any]:
    if type_.startswith("<"):
        count, element = type_[1:-1].split(" x ")
        return int(count), _NUMPY[element]
    return 1, _NUMPY[type_]


def _gep(name: str, type_: str, pointer: str, base: str, index: str, number: str) -> Run:
    count, dtype = _size(type_)
    size, start, steps = count * np.dtype(dtype).itemsize, _operand(base, pointer), _operand(number, index)
    return _set(name, lambda b: start(b) + steps(b).astype(np.int64) * size)


def _load(name: str, type_: str, pointer: str, place: str) -> Run:
    count, dtype = _size(type_)
    size, at = count * np.dtype(dtype).itemsize, _operand(place, pointer)

    def run(b: Block) -> None:
        addresses = at(b)
        if "(3)" in pointer:
            b.note(addresses, size, "load")
        found = b.load(pointer, addresses, size, dtype)
        b.set(name, found if type_.startswith("<") else found[:, 0])

    return _set(name, at) if pointer == "ptr" else run


def _store(type_: str, text: str, pointer: str, place: str) -> Run:
    count, dtype = _size(type_)
    size, at, value = count * np.dtype(dtype).itemsize, _operand(place, pointer), _operand(text, type_)

    def run(b: Block) -> None:
        addresses = at(b)
        if "(3)" in pointer:
            b.note(addresses, size, "store")
        b.store(pointer, addresses, value(b))

    return _set(place[1:], value) if pointer == "ptr" else run


def _branch(condition: str, yes: str, no: str) -> Run:
    asked = _operand(condition, "i1")

    def run(b: Block) -> None:
        holds = asked(b)
        b.goto(yes, holds)
        b.goto(no, ~holds)

    return run


def _end(b: Block) -> None:
    b.at[b.active] = len(b.program.basic_blocks)


def _operands(text: str) -> list[Value]:
    return [_operand(m[2], m[1]) for m in re.finditer(rf"({_TYPE}) ([%@]?[\w.+-]+)", text)]


def _call(name: str | None, result: str, function: str, text: str) -> Run:
    operands = _operands(text)

    def run(b: Block) -> None:
        given = [value(b) for value in operands]
        if function in b.program.functions:
            b.call(function, given)
            return
        found = CALLS[function](b, *given)
        if name is not None:
            b.set(name, found)

    return run


def _assembly(name: str | None, result: str, text: str, constraints: str, given: str) -> Run:
    operands = _operands(given)
    kinds = {"@": _guarded, "l": _fetched}
    kind = kinds.get(text[0]) or (_begun if "wgmma.mma_async" in text else _finished)
    known = ASSEMBLY.get(text) or partial(kind, text, constraints)

    def run(b: Block) -> None:
        found = known(b, *(value(b) for value in operands))
        if name is not None:
            b.set(name, found)

    return run


_PRODUCT = re.compile(
    r"add\.s64 d, \$(\d+), (\d+); wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16"
    r"\.bf16 \{[^}]*\}, \{\$(\d+), \$(\d+), \$(\d+), \$(\d+)\}, d, 1, 1, 1, 0;"
)


def _fetched(text: str, constraints: str, b: Block, addresses: Array) -> Any:
    """Loads of memory that nobody writes, as one word or several."""
    found = re.fullmatch(r"ld\.global\.nc(?:\.L1::no_allocate)?(?:\.v(\d))?\.[ub](16|32) .*;", text)
    assert found, f"not understood: {text}"
    count, size = int(found[1] or 1), int(found[2]) // 8
    values = b.load("ptr addrspace(1)", addresses, count * size, np.int16 if size == 2 else np.int32)
    return [values[:, i] for i in range(count)] if count > 1 else values[:, 0]


def _finished(text: str, constraints: str, b: Block, *given: Array) -> list[Array]:
    """`await_products` and `finish_products`."""
    assert re.fullmatch(r"wgmma\.wait_group\.sync\.aligned \d;(?: \{.*\})?", text), f"not understood: {text}"
    return list(given)


def _begun(text: str, constraints: str, b: Block, *given: Array) -> list[Array]:
    """`begin_products`: all warps of a block."""
    outputs = constraints.count("=&f")
    products = _PRODUCT.findall(text)
    assert len(products) == text.count("wgmma.mma_async") > 0, f"not understood: {text}"
    assert b.active.all(), "wgmma of a part of a block"
    operands = dict(enumerate(given, outputs))
    values = [operands[outputs + i] for i in range(outputs)]
    for place, offset, n, *registers in products:
        a = matrix_a([operands[int(r)] for r in registers], "bf16")
        descriptor = operands[int(place)] + int(offset)
        assert ((descriptor >> 62) == 1).all() and ((descriptor >> 32 & 0x3FFF) == 64).all()
        right = _described(b, (descriptor & 0x3FFF) << 4, int(n))
        product = a @ right
        new = [product[:, _G + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * _T + i % 2].reshape(-1) for i in range(outputs)]
        values = [x + y for x, y in zip(values, new, strict=True)]
    return values


def _described(b: Block, start: Array, n: int) -> Array:
    """The operand [16, n] of each warp: rows of 128 bytes, whose 16 bytes are swapped by bits 7 to 9 of the address."""
    found = np.zeros((WARPS, 16, n), np.float32)
    rows, k = np.arange(n)[:, None], np.arange(16)[None]
    for warp in range(WARPS):
        at = int(start[warp * WARP])
        assert (start[warp // 4 * 128 : warp // 4 * 128 + 128] == at).all(), "four warps with different operands"
        places = at + rows * 128 + 2 * k
        places = places ^ ((places >> 7 & 7) << 4)
        b.note_words(places // 4, warp, "load")
        found[warp] = from_bf16(_in_words(b.shared, 2)[places // 2]).T
    return found


def _inserted(name: str, type_: str, vector: str, element: str, value: str, number: str) -> Run:
    old, new = _operand(vector, type_), _operand(value, element)

    def run(b: Block) -> Array:
        found = old(b).copy()
        found[:, int(number)] = new(b)
        return found

    return _set(name, run)


def _select(name: str, condition: str, type_: str, yes: str, no: str) -> Run:
    holds, x, y = _operand(condition, "i1"), _operand(yes, type_), _operand(no, type_)
    return _set(name, lambda b: np.where(holds(b), x(b), y(b)))


_FLOAT_OPS = "fadd|fsub|fmul|fdiv"
_INTEGER_OPS = "add|sub|mul|udiv|urem|and|or|xor|shl|lshr"
_CONVERSIONS = "fpext|fptrunc|sext|zext|trunc|fptosi|sitofp|uitofp|bitcast"
_FORMS: list[tuple[re.Pattern[str], Callable[..., Run]]] = [
    (re.compile(rf"%(\S+) = ({_INTEGER_OPS}|{_FLOAT_OPS}) ({_TYPE}) (\S+), (\S+)"), _binary),
    (re.compile(r"%(\S+) = fneg (\w+) (\S+)"), partial(_of, np.negative)),
    (re.compile(rf"%(\S+) = (icmp|fcmp) (\w+) ({_TYPE}) (\S+), (\S+)"), _compare),
    (re.compile(rf"%(\S+) = ({_CONVERSIONS}) ({_TYPE}) (\S+) to ({_TYPE})"), _convert),
    (re.compile(r"%(\S+) = ptrtoint (ptr addrspace\(3\)) (\S+) to i32"), partial(_of, np.int32)),
    (re.compile(rf"%(\S+) = getelementptr ({_TYPE}), ({_TYPE}) (\S+), (\w+) (\S+)"), _gep),
    (re.compile(rf"%(\S+) = load (?:volatile )?({_TYPE}), ({_TYPE}) (\S+?)(?:, align.*)?"), _load),
    (re.compile(rf"store ({_TYPE}) (\S+), ({_TYPE}) (\S+?)(?:, align \d+)?"), _store),
    (re.compile(r"br i1 (\S+), label %(\S+), label %(\S+)"), _branch),
    (re.compile(r"br label %(\S+)"), lambda label: lambda b: b.goto(label, b.active)),
    (re.compile(r"ret void"), lambda: _end),
    (re.compile(r"%(\S+) = alloca (\w+)"), lambda n, t: _set(n, lambda b: np.zeros(THREADS, _NUMPY[t]))),
    (re.compile(rf"%(\S+) = select i1 (\S+), ({_TYPE}) (\S+), {_TYPE} (\S+)"), _select),
    (re.compile(rf"%(\S+) = extractelement ({_TYPE}) (\S+), i32 (\d+)"),
     lambda n, t, x, i: _of(lambda v: v[:, int(i)], n, t, x)),
    (re.compile(rf"%(\S+) = insertelement ({_TYPE}) (\S+), (\w+) (\S+), i32 (\d+)"), _inserted),
    (re.compile(rf"%(\S+) = extractvalue {_TYPE} (\S+), (\d+)"),
     lambda n, x, i: _set(n, lambda b: b.values[x[1:]][int(i)])),
    (re.compile(rf"(?:%(\S+) = )?call ({_TYPE}) asm (?:sideeffect )?\"(.*?)\", \"(.*?)\"\((.*)\)(?: convergent)?"),
     _assembly),
    (re.compile(rf"(?:%(\S+) = )?call ({_TYPE}) @([\w.]+)\((.*)\)"), _call),
]  # fmt: skip


# -- functions of LLVM -------------------------------------------------------------------------------------------------


def _f32(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda b, *x: function(*x).astype(x[0].dtype)


def _fma(a: Array, b: Array, c: Array) -> Array:
    return a.astype(np.float64) * b + c


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    source = np.stack([a, b], 1).view(np.uint8).reshape(THREADS, 8)
    digits = (selector[:, None] >> (4 * np.arange(4))) & 7
    return np.ascontiguousarray(np.take_along_axis(source, digits, 1)).view(np.int32)[:, 0]


def _halves(x: Sequence[Array], kind: str) -> Array:
    """Registers of two 16-bit numbers each -> f32 [warps, lanes, registers, 2]."""
    bits = np.stack(x, 1).view(np.int16).reshape(WARPS, WARP, len(x), 2)
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


_G, _T = np.arange(WARP) // 4, np.arange(WARP) % 4


def matrix_a(registers: Sequence[Array], kind: str) -> Array:
    """The operand of 16 rows and 16 or 8 columns of each warp."""
    found, (i, j) = np.zeros((WARPS, 16, 4 * len(registers)), np.float32), np.indices((len(registers), 2))
    found[:, _G[:, None, None] + 8 * (i % 2), 2 * _T[:, None, None] + j + 8 * (i // 2)] = _halves(registers, kind)
    return found


def _sums(before: Sequence[Array], product: Array) -> list[Array]:
    """The four registers of a result of 16 rows and 8 columns of each warp."""
    return [x + product[:, _G + 8 * (i // 2), 2 * _T + i % 2].reshape(-1) for i, x in enumerate(before)]


def _mma(kind: str, eights: int = 2) -> Callable[..., list[Array]]:
    """16 rows and so many times 8 columns times 8 columns."""
    i, j = np.indices((eights, 2))

    def run(b: Block, *x: Array) -> list[Array]:
        assert b.active.reshape(WARPS, WARP).all(1).sum() * WARP == b.active.sum(), "mma of a part of a warp"
        right = np.zeros((WARPS, 8 * eights, 8), np.float32)
        right[:, 2 * _T[:, None, None] + j + 8 * i, _G[:, None, None]] = _halves(x[2 * eights : 3 * eights], kind)
        return _sums(x[3 * eights :], matrix_a(x[: 2 * eights], kind) @ right)

    return run


def _mma_f16(eights: int) -> Callable[..., list[Array]]:
    product = _mma("f16", eights)
    return lambda b, *x: product(b, *(np.ascontiguousarray(v).view(np.int32)[:, 0] for v in x[:-4]), *x[-4:])


def _mma_s8(b: Block, *x: Array) -> list[Array]:
    """16 rows and 16 or 32 columns of int8 times 8 columns."""
    assert b.active.reshape(WARPS, WARP).all(1).sum() * WARP == b.active.sum(), "mma of a part of a warp"
    halves = (len(x) - 4) // 3
    codes = [np.ascontiguousarray(each).view(np.int8).reshape(WARPS, WARP, 4).astype(np.int32) for each in x[:-4]]
    left, right = np.zeros((WARPS, 16, 16 * halves), np.int32), np.zeros((WARPS, 16 * halves, 8), np.int32)
    for h in range(halves):
        for j in range(4):
            for i in range(2):
                left[:, _G + 8 * i, 16 * h + 4 * _T + j] = codes[2 * h + i][:, :, j]
            right[:, 16 * h + 4 * _T + j, _G] = codes[2 * halves + h][:, :, j]
    return _sums(x[-4:], left @ right)


def _ldmatrix(count: int, transposed: bool) -> Callable[..., Any]:
    def run(b: Block, addresses: Array) -> Any:
        active = b.active.reshape(WARPS, WARP).all(1)
        assert active.sum() * WARP == b.active.sum(), "ldmatrix of a part of a warp"
        own = np.where(active[:, None], addresses.reshape(WARPS, WARP)[:, : 8 * count], 0)
        assert not (own % 16).any() and own.min() >= 0 and own.max() + 16 <= len(b.shared)
        flat = own.reshape(-1)
        words = (flat[:, None] // 4 + np.arange(4)).reshape(-1)
        warps = np.repeat(np.arange(WARPS), 8 * count * 4)
        b.note_words(words[active[warps]], warps[active[warps]], "load")
        rows = _in_words(b.shared, 8)[flat[:, None] // 8 + np.arange(2)].view(np.int16).reshape(WARPS, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        found = np.ascontiguousarray(rows).view(np.int32).reshape(WARPS, count, 32)  # lane: row l / 4, pair l % 4
        registers = [np.ascontiguousarray(found[:, i]).reshape(-1) for i in range(count)]
        return registers if count > 1 else registers[0]

    return run


def _shuffle(b: Block, lanes: Array, value: Array) -> Array:
    return np.take_along_axis(value.reshape(WARPS, WARP), lanes.reshape(WARPS, WARP), 1).reshape(-1)


def _ballot(b: Block, holds: Array) -> Array:
    assert b.active.reshape(WARPS, WARP).all(1).sum() * WARP == b.active.sum(), "a vote of a part of a warp"
    bits = (holds & b.active).reshape(WARPS, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
    return np.repeat(bits.sum(1), WARP).astype(np.uint32).view(np.int32)


def _added(b: Block, raw: Array, places: Array, values: Array) -> Array:
    """Adds the values of the threads that run, one after the other; what was there before each."""
    before = np.zeros(THREADS, values.dtype)
    for thread in np.flatnonzero(b.active):
        word = raw[places[thread] : places[thread] + values.itemsize].view(values.dtype)
        before[thread] = word[0]
        word += values[thread]
    return before


def _sum(b: Block, places: Array, values: Array) -> Array:
    return _added(b, b.memory.raw, places - b.memory.base, values)


def _shared_sum(b: Block, places: Array, values: Array) -> Array:
    b.note(places, values.itemsize, "sum")
    return _added(b, b.shared, places, values)


def _copy(b: Block, target: Array, source: Array, kept: Array | None = None, size: int = 16) -> None:
    """A copy that arrives when it is waited for; bytes after the first `kept` are zeros."""
    b.note(target, size, "store")
    values, active = np.zeros((THREADS, size), np.uint8), b.active
    b.active = active if kept is None else active & (kept > 0)  # who keeps nothing reads nothing
    if b.active.any():
        values[b.active] = b.load("ptr addrspace(1)", source, size, np.uint8)[b.active]
    b.active = active
    if kept is not None:
        values = np.where(np.arange(size) < kept[:, None], values, 0)
    words, places = b.words("ptr addrspace(3)", target, size)
    b.pending[-1].append((words, places[active], values[active].view(words.dtype)))


def _wait_group(b: Block, count: Array) -> None:
    ready = len(b.pending) - 1 - int(count[0])
    for group in b.pending[: max(ready, 0)]:
        for words, places, values in group:
            words[places] = values
    b.pending = b.pending[max(ready, 0) :]


def _lg2(x: Array) -> Array:
    return np.log2(x)


CALLS: dict[str, Callable[..., Any]] = {
    "llvm.nvvm.read.ptx.sreg.tid.x": lambda b: _LANES.astype(np.int32),
    "llvm.nvvm.barrier.cta.sync.aligned.all": lambda b, n: b.barrier(),
    "llvm.nvvm.bar.warp.sync": lambda b, n: None,
    "llvm.nvvm.griddepcontrol.wait": lambda b: None,
    "llvm.nvvm.griddepcontrol.launch.dependents": lambda b: None,
    "llvm.nvvm.shfl.sync.bfly.i32": lambda b, m, x, d, w: _shuffle(b, (_LANES % WARP) ^ d, x),
    "llvm.nvvm.shfl.sync.idx.i32": lambda b, m, x, d, w: _shuffle(b, d, x),
    "llvm.nvvm.vote.ballot.sync": lambda b, m, holds: _ballot(b, holds),
    "llvm.nvvm.ex2.approx.f": _f32(np.exp2),
    "llvm.nvvm.lg2.approx.f": _f32(_lg2),
    "llvm.nvvm.prmt": lambda b, x, y, s: _prmt(x, y, s),
    "llvm.nvvm.mma.m16n8k16.row.col.bf16": _mma("bf16"),
    "llvm.nvvm.mma.m16n8k16.row.col.s8": _mma_s8, "llvm.nvvm.mma.m16n8k32.row.col.s8": _mma_s8,
    "llvm.nvvm.rcp.approx.ftz.f": _f32(lambda x: 1 / x), "llvm.nvvm.rsqrt.approx.f": _f32(lambda x: 1 / np.sqrt(x)),
    "llvm.nvvm.mma.m16n8k16.row.col.f32.f32": _mma_f16(2), "llvm.nvvm.mma.m16n8k8.row.col.f32.f32": _mma_f16(1),
    "llvm.fma.f32": _f32(_fma), "llvm.fma.f64": _f32(_fma),
    "llvm.maxnum.f32": _f32(np.fmax), "llvm.minnum.f32": _f32(np.fmin),
    "llvm.ceil.f32": _f32(np.ceil),
    "llvm.fabs.f32": _f32(np.abs), "llvm.fabs.f64": _f32(np.abs),
    "llvm.sqrt.f32": _f32(np.sqrt), "llvm.rint.f64": _f32(np.rint),
    "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16.p3": _ldmatrix(4, False),
    "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.trans.b16.p3": _ldmatrix(4, True),
    "llvm.nvvm.cp.async.cg.shared.global.16": _copy,
    "llvm.nvvm.cp.async.cg.shared.global.16.s": _copy,
    "llvm.nvvm.cp.async.ca.shared.global.8": partial(_copy, size=8),
    "llvm.nvvm.cp.async.commit.group": lambda b: b.pending.append([]),
    "llvm.nvvm.cp.async.wait.group": _wait_group,
}  # fmt: skip


def _fma_bf16x2(b: Block, x: Array, y: Array, z: Array) -> Array:
    parts = [from_bf16(np.stack([v], 1).view(np.int16)) for v in (x, y, z)]
    return np.ascontiguousarray(to_bf16(parts[0] * parts[1] + parts[2])).view(np.int32)[:, 0]


def _pack_bf16(b: Block, high: Array, low: Array) -> Array:
    return np.ascontiguousarray(np.stack([to_bf16(low), to_bf16(high)], 1)).view(np.int32)[:, 0]


def _pack_f16(b: Block, high: Array, low: Array) -> Array:
    return np.ascontiguousarray(np.stack([low, high], 1).astype(np.float16)).view(np.int32)[:, 0]


def _left(b: Block, places: Array, first: Array, second: Array) -> None:
    b.store("ptr addrspace(1)", places, np.stack([first, second], 1).astype(np.float32))


def _guarded(text: str, constraints: str, b: Block, places: Array, valid: Array, *others: Array) -> list[Array]:
    """Loads of the threads that may."""
    if "relaxed" in text:
        return _taken(text, b, places, valid, *others)
    found = re.fullmatch(r"@\$\d ld\.global\.v(\d)\.u32 \{[^}]*\}, \[\$\d\];", text)
    assert found, f"not understood: {text}"
    before, b.active = b.active, b.active & valid
    words = list(others)
    if b.active.any():
        loaded = b.load("ptr addrspace(1)", places, 4 * int(found[1]), np.int32)
        words = [np.where(b.active, loaded[:, i], other) for i, other in enumerate(others)]
    b.active = before
    return words


def _taken(text: str, b: Block, places: Array, valid: Array, *others: Array) -> list[Array]:
    """`row_results.taken`."""
    found = re.fullmatch(r"@\$3 ld\.relaxed\.gpu\.global\.v2\.f32 \{\$0, \$1\}, \[\$2\+(\d+)\];", text)
    assert found, f"not understood: {text}"
    pair = b.load("ptr addrspace(1)", np.where(valid, places + int(found[1]), b.memory.base), 8, np.float32)
    assert pair[b.active & valid].view(np.int32).all(), "a block waits for what nobody wrote before"
    return [np.where(valid, pair[:, i], other) for i, other in enumerate(others)]


def _read(b: Block, addresses: Array) -> Array:
    """A word that others may write meanwhile."""
    return b.load("ptr addrspace(1)", addresses, 4, np.int32)[:, 0]


def _written(b: Block, addresses: Array, values: Array) -> None:
    b.store("ptr addrspace(1)", addresses, values)


def _trap(b: Block) -> None:
    raise Trap


class Clock:
    """The clock of the cards, in nanoseconds. It goes on by `tick` when it is read, and else stands still."""

    tick, now = 1, 0

    @classmethod
    def read(cls) -> int:
        """The time."""
        cls.now += cls.tick
        return cls.now


class Trap(Exception):
    """A kernel stopped itself."""


def _begin_meeting(b: Block, places: Array) -> None:
    b.meetings[int(places[b.active][0])] = Meeting(WARPS)


def _come(b: Block, places: Array) -> None:
    meeting = b.meetings[int(places[b.active][0])]
    meeting.come += int(b.active.sum())
    if meeting.come == meeting.warps:
        meeting.come, meeting.times, meeting.before = (
            0,
            meeting.times + 1,
            [b.written.copy(), b.used.copy(), b.summed.copy()],
        )


def _wait_for_all(b: Block, places: Array, again: Array) -> None:
    meeting = b.meetings[int(places[0])]
    assert meeting.times & 1 != again[0], "a block waits for a warp that does not come"
    b.written &= ~meeting.before[0]
    b.used &= ~meeting.before[1]
    b.summed &= ~meeting.before[2]


_TRY = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [$0], $1;"
ASSEMBLY: dict[str, Callable[..., Any]] = {
    f"mbarrier.init.shared::cta.b64 [$0], {WARPS};": _begin_meeting,
    "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];": _come,
    f"{{ .reg .pred p; again: {_TRY} @!p bra again; }}": _wait_for_all,
    "st.release.sys.global.u32 [$0], $1;": _written,
    "ld.acquire.sys.global.u32 $0, [$1];": _read,
    "ld.relaxed.gpu.global.u32 $0, [$1];": _read,
    "prefetch.global.L2 [$0];": lambda b, at: None,
    "mov.u64 $0, %globaltimer;": lambda b: np.full(THREADS, Clock.read()),
    "trap;": _trap,
    "st.relaxed.gpu.global.v2.f32 [$0], {$1, $2};": _left,
    "red.relaxed.cta.shared.add.u32 [$0], $1;": _shared_sum,
    "red.relaxed.cta.shared.add.u64 [$0], $1;": _shared_sum,
    "red.relaxed.gpu.global.add.u64 [$0], $1;": _sum,
    "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;": lambda b, at: _sum(b, at, np.ones(THREADS, np.int32)),
    "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;": lambda b, at: _sum(b, at, np.ones(THREADS, np.int32)),
    "fma.rn.bf16x2 $0, $1, $2, $3;": _fma_bf16x2,
    "lop3.b32 $0, $1, $2, $3, 0x6A;": lambda b, x, y, z: x & y ^ z,
    "cvt.rn.bf16x2.f32 $0, $1, $2;": _pack_bf16,
    "fence.proxy.async.shared::cta;": lambda b: None,
    "cvt.rn.f16x2.f32 $0, $1, $2;": _pack_f16,
}  # fmt: skip
