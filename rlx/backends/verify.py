"""RLX_VERIFY=1: every value that a program computes is compared with what its op means, node by node.

A `Verifier` follows one program of any backend. After a step it evaluates each node with the reference backend on the
operands that the program itself computed, so that errors do not add up and the first wrong kernel is the one that is
named. For this, programs are compiled so that values share no memory (without the pass `reuse_memory`), and steps run
one by one. States that an op updates are copied before the step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlx import debug_output
from rlx.backends.device import Lowered
from rlx.backends.program import Manifest, Observer, Program
from rlx.backends.reference.backend import parts_in_use
from rlx.backends.reference.evaluate import Evaluation, Memory, Used, Weights
from rlx.backends.reference.formats import Array, Bytes, Formats
from rlx.errors import VerificationError
from rlx.ir.dtypes import BF16, F16, I32, Q4_0, Q8_0, Q8A, DType
from rlx.ir.node import Node
from rlx.ir.ops import OPS, updated
from rlx.passes.program import root

#: Largest error of f32 arithmetic, as a share of the largest magnitude in the row. The order of a sum changes its last
#: bits, and so do approximations of exp and tanh.
CEILING = 5e-5
#: The same where kernels may round to bf16 on the way: products of bf16, and of weights that are unpacked to bf16.
BF16_CEILING = 2.0**-6
# Neighbouring values of 16-bit types differ by this share; a value near the middle may be rounded to either.
_STEPS = {F16: 2.0**-10, BF16: 2.0**-7}
# The largest code of a block: neighbouring values differ by its largest magnitude divided by this.
_CODES = {Q8A: 127, Q8_0: 127, Q4_0: 8}
_BLOCK = 32
_PLAIN = Formats()  # rounds as every device does
_UNTOUCHED = 0xFF  # fills private memory before a step

SECONDS = 5.0  # between two lines about progress

_INDICES = ("argmax", "pick", "top_k", "linear_pick")


@dataclass(frozen=True)
class Difference:
    """The largest difference of a value.

    Attributes:
        place: of the value that differs most.
        found, expected: this value, and what the op means.
        wrong, size: how many values differ, and how many there are.
    """

    place: tuple[int, ...]
    found: float
    expected: float
    wrong: int
    size: int


@dataclass
class _Count:
    """The number of comparisons. It is said on stderr: what is compared now if it takes long, and a sum at the end.

    The end is when the program is closed, and for one that nobody closes when it is collected or the process ends.

    Attributes:
        name: of the program.
        sizes: of its last step.
        steps, values: compared so far.
        end: says the sum, once.
    """

    name: str = ""
    sizes: str = ""
    steps: int = 0
    values: int = 0
    end: Callable[[], object] = lambda: None

    def begin(self, program: Program) -> None:
        """A step is compared next."""
        if not self.steps:
            self.end = weakref.finalize(program, self.show)
        self.name, self.sizes, self.steps = program.name, _sizes(program), self.steps + 1

    def value(self, name: str) -> None:
        """A value was compared, and is as its op means."""
        self.values += 1
        if _progress.is_due():
            done = f"up to %{name} nothing differs"
            debug_output.say(f"verify: {self.name}, step {self.steps} ({self.sizes}): {done}")

    def show(self) -> None:
        """Says what was compared in all."""
        debug_output.say(f"verify: {self.name}: {self.values} values of {self.steps} steps compared")


class _Progress:
    """When the next line about progress is due, of all programs together."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= SECONDS
        self._last = now if due else self._last
        return due


_progress = _Progress()


def _sizes(program: Program) -> str:
    return ", ".join(f"{name} {size}" for name, size in sorted(program.extents.items()))


class Verifier(Observer):
    """Compares the steps of one program with the meaning of its ops.

    Args:
        lowered: the program after all passes, whose values share no memory.
        manifest: names the kernels.
        formats: how values lie in the memory of the device.
    """

    each_step = True

    def __init__(self, lowered: Lowered, manifest: Manifest, formats: Formats) -> None:
        self._lowered, self._weights = lowered, Weights(formats)
        nodes = lowered.graph.nodes()
        self._names = lowered.graph.names()
        self._prologues, self._regions = (
            [[(nodes[number], symbol) for number, symbol in row] for row in manifest[part]]
            for part in ("prologues", "regions")
        )
        self._states: dict[Node, Bytes] = {}  # as they were before the step: the parts that it uses
        self._used = Used({}, {})
        self._count = _Count()

    def before(self, program: Program) -> None:
        """Copies the states that ops update, and marks the private memory, to see who writes it."""
        memory = partial(self._actual, program, 0, 0)
        self._used = parts_in_use(self._lowered, memory, program.extents)
        evaluation = Evaluation(memory, program.extents, self._weights, self._used)
        self._states.clear()
        for node, _ in self._calls():
            if OPS[node.op].effect:
                for state in {root(node.inputs[0]), root(updated(node))}:
                    shape = evaluation.shape(state)
                    raw = program.memory_of(self._lowered.buffer(state), state.dtype.size(shape)).contents()
                    self._states[state] = self._used.taken(state, raw, shape).copy()
        for buffer in (self._lowered.replicated or {}).values():
            for worker in range(len(program.times)):
                program.memory_of(buffer, buffer.nbytes, worker).write(np.full(buffer.nbytes, _UNTOUCHED, np.uint8))

    def after(self, program: Program, seconds: float, steps: int) -> None:
        """Compares all values of the step, in the order in which they were computed.

        Raises:
            VerificationError: one differs.
        """
        self._count.begin(program)
        for i, (prologue, region) in enumerate(zip(self._prologues, self._regions, strict=True)):
            workers = [w for w in range(len(program.times)) if self._has_run(program, prologue, w)]
            if prologue and not workers:
                raise VerificationError("no worker computed the values", where=f"prologue of region {i}")
            for worker in workers:
                for node, kernel in prologue:
                    self._check(program, node, kernel, i, worker, replicated=True)
                    self._count.value(self._names[node])
            for node, kernel in region:
                self._check(program, node, kernel, i, workers[0] if workers else 0, replicated=False)
                self._count.value(self._names[node])

    def closed(self, program: Program) -> None:
        """Says how much was compared."""
        self._count.end()

    def _calls(self) -> Iterator[tuple[Node, str]]:
        for some in (*self._prologues, *self._regions):
            yield from some

    def _has_run(self, program: Program, prologue: list[tuple[Node, str]], worker: int) -> bool:
        """Whether a worker has computed a prologue: it has none where it found no work."""
        replicated = self._lowered.replicated or {}
        firsts = (
            program.memory_of(replicated[node], min(_BLOCK, replicated[node].nbytes), worker).contents()
            for node, _ in prologue[:1]
        )
        return any((first != _UNTOUCHED).any() for first in firsts)

    def _check(self, program: Program, node: Node, kernel: str, region: int, worker: int, replicated: bool) -> None:
        after = partial(self._actual, program, region, worker)
        evaluation = Evaluation(after, program.extents, self._weights, self._used)
        value, state = evaluation.result(node, partial(self._before, after))
        result: Memory = partial(self._result, program, worker, replicated)
        found, value = (self._used.computed(node, each) for each in (evaluation.value(node, result), value))
        wrong = difference(node, found, value, lambda: evaluation.operands(node, after))
        if wrong is None and state is not None:
            target = updated(node)
            wrong = _compare(target.dtype, evaluation.value(target, after), state, CEILING)
        if wrong is not None:
            self._refuse(program, node, kernel, wrong)

    def _refuse(self, program: Program, node: Node, kernel: str, d: Difference) -> None:
        what = f"%{self._names[node]} at {list(d.place)} is {d.found:.8g}, its op means {d.expected:.8g}"
        where = f"{node.op}, kernel {kernel}, of program {program.name}"
        cause = "Its kernel is wrong" if OPS[node.op].custom else "This is a bug of rlx; please report it"
        hint = f"{d.wrong} of {d.size} values differ ({_sizes(program)}). {cause}."
        raise VerificationError(what, where=where, hint=hint)

    def _actual(self, program: Program, region: int, worker: int, node: Node, nbytes: int) -> Bytes:
        """The bytes of a value as a region and its prologue see them after the step."""
        return program.memory_of(self._lowered.operand(node, region), nbytes, worker).contents()

    def _result(self, program: Program, worker: int, replicated: bool, node: Node, nbytes: int) -> Bytes:
        """The bytes of a result: in the memory of a worker, or of a region."""
        private = self._lowered.replicated if replicated else None
        placed = private[node] if private else self._lowered.buffer(node)
        return program.memory_of(placed, nbytes, worker).contents()

    def _before(self, after: Memory, node: Node, nbytes: int) -> Bytes:
        """The operands of a step: states that an op updates as they were, all else as it is."""
        return self._states[node] if node in self._states else after(node, nbytes)


def difference(node: Node, found: Array, expected: Array, operands: Callable[[], list[Array]]) -> Difference | None:
    """How a value differs from what its op means; None if it does not."""
    if node.op in _INDICES:
        return _compare_choice(node, found, expected, operands())
    custom = OPS[node.op].custom
    ceiling = custom.tolerance if custom else BF16_CEILING if _in_bf16(node) else CEILING
    return _compare(node.dtype, found, expected, ceiling)


def _in_bf16(node: Node) -> bool:
    if node.op == "attention":
        return bool(node["bf16"])
    return node.op in ("linear", "expert_linear") and node.inputs[0].dtype is BF16


def _compare(dtype: DType, found: Array, expected: Array, ceiling: float) -> Difference | None:
    if dtype is I32:
        return _worst(found, expected, np.zeros(found.shape))
    rounded = expected if dtype in (Q8_0, Q4_0) else _PLAIN.read(dtype, _PLAIN.written(dtype, expected), found.shape)
    size = np.where(np.isfinite(rounded), np.abs(rounded), 0)
    allowed = ceiling * size.max(-1, keepdims=True, initial=0) + np.zeros_like(size)
    if dtype in _CODES:
        blocks = size.reshape(*size.shape[:-1], -1, _BLOCK).max(-1, keepdims=True)
        allowed += (blocks * (1.01 / _CODES[dtype]) + np.zeros(_BLOCK)).reshape(size.shape)
    allowed += size * _STEPS.get(dtype, 0.0)
    return _worst(found, rounded, allowed)


def _compare_choice(node: Node, found: Array, expected: Array, operands: list[Array]) -> Difference | None:
    """Compares the numbers that were chosen: of nearly equal ones any may be."""
    scores = operands[0] if node.op != "linear_pick" else operands[0] @ operands[1].T
    rows, width = scores.reshape(-1, scores.shape[-1]), scores.shape[-1]
    ours, right = (ids.reshape(len(rows), -1).astype(int) for ids in (found, expected))
    differs = ours != right
    outside = differs & ((ours < 0) | (ours >= width) | (right < 0))
    at = np.arange(len(rows))[:, None]
    gap = np.abs(rows[at, ours.clip(0, width - 1)] - rows[at, right.clip(0, width - 1)])
    close = gap <= CEILING * np.abs(rows).max(-1, keepdims=True)
    return _worst(ours, right, np.where(outside | (differs & ~close), 0.0, np.inf)) if differs.any() else None


def _worst(found: Array, expected: Array, allowed: Array) -> Difference | None:
    with np.errstate(invalid="ignore"):
        excess = np.abs(found.astype(np.float64) - expected.astype(np.float64)) - allowed
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    excess = np.where(same, -np.inf, np.where(np.isnan(excess), np.inf, excess))
    wrong = int((excess > 0).sum())
    if not wrong:
        return None
    at = np.unravel_index(int(excess.argmax()), excess.shape)
    place = tuple(int(i) for i in at)
    return Difference(place, float(found[place]), float(expected[place]), wrong, found.size)
