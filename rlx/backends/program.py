"""One instance of a compiled program over memory of its device, the observers of its steps, and their clocks.

Backends: `rlx.backends.device` makes programs; a device's own class implements `Program`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends.memory import Array, Buffer, DeviceArray, Memory, Values
from rlx.errors import ArgumentError
from rlx.ir import dims
from rlx.ir.dtypes import DTYPES
from rlx.ir.segments import PAST, ROWS
from rlx.passes.program import Buffer as Placed
from rlx.sampling.choice import UNIFORM, Choice, Choose

Manifest = Mapping[str, Any]

#: Computes a node `call` on the host: takes its operands, the memory of its weights, and an array for the result.
Called = Callable[[Sequence[Array], Sequence[Buffer], Array], None]


@dataclass(frozen=True)
class StepClocks:
    """When the workers did what in some steps in a row, in nanoseconds of `time.perf_counter_ns`; 0 for never.

    Attributes:
        times: int64 [steps, workers, regions + 1]: at the start of a step and after each region. A worker may have left
            a region early; `marks` say when.
        marks: int64 [steps, workers, marks, 3]: begin, end and units of what a worker did. A region has a mark for its
            prologue, then one for each of its calls, in the order of the manifest.
    """

    times: NDArray[np.int64]
    marks: NDArray[np.int64]

    def bounds(self) -> NDArray[np.int64]:
        """When each step began and when each of its regions ended, int64 [steps, regions + 1].

        A worker that comes late sees the end of a region late: the first to see it counts.
        """
        never = np.iinfo(np.int64).max
        found = np.where(self.times == 0, never, self.times).min(1)
        begins = np.where(self.marks[..., 0] == 0, never, self.marks[..., 0]).min((1, 2), initial=never)
        found[:, 0] = np.minimum(found[:, 0], begins)
        return np.asarray(found, np.int64)


@dataclass(frozen=True)
class StepLog:
    """The clocks of the steps of one call, which are converted when they are read.

    Attributes:
        steps: number of steps.
        nbytes: what it holds in memory.
        read: converts them.
    """

    steps: int
    nbytes: int
    read: Callable[[], StepClocks]


class Observer(ABC):
    """Follows the steps of a program.

    Attributes:
        each_step: whether it must see every step by itself, so that no native loop runs several.
        logs: whether `logged` is called.
    """

    each_step = False
    logs = False

    def before(self, program: Program) -> None:
        """Called before a step; its inputs are set, and `program.extents` are its symbol values."""
        return

    @abstractmethod
    def after(self, program: Program, seconds: float, steps: int) -> None:
        """Called after steps that took `seconds` together; `program.extents` are the symbol values of the first."""

    def logged(self, program: Program, log: StepLog) -> None:
        """Called with the clocks of the steps of each call, in the thread that ran it."""
        return

    def closed(self, program: Program) -> None:
        """Called when the program is closed, before its memory is released."""
        return


#: In place of a token: the row had ended before, or its logits are not finite, or only the host can choose from them.
NO_TOKEN = -1


@dataclass(frozen=True)
class Draws:
    """How the tokens of a run are chosen from the logits of its steps.

    Attributes:
        choose: of the device.
        choices: of each row, for all steps but for its random number.
        numbers: a random number for each step and row, f64 [steps, rows].
        output: name of the logits, f32 [rows, vocab].
    """

    choose: Choose
    choices: Sequence[Choice]
    numbers: NDArray[np.float64]
    output: str

    def tokens(self, step: int, logits: Values, rows: Sequence[int]) -> list[int]:
        """The tokens of some rows in a step."""
        choices = [self.choices[row] for row in rows]
        for row, choice in zip(rows, choices, strict=True):
            if not choice.opts.is_greedy:
                choice.numbers[UNIFORM] = self.numbers[step, row]
        some: Any = logits if len(rows) == len(logits) else [logits[row] for row in rows]
        found = self.choose(some, choices)
        return [token if is_finite and token >= 0 else NO_TOKEN for token, is_finite, _ in found]


@dataclass(frozen=True)
class RowEnd:
    """What ends a row of a run.

    Attributes:
        count: maximum number of tokens.
        stops: token ids that end it.
    """

    count: int
    stops: Sequence[int] = ()


@dataclass(frozen=True)
class TokenRun:
    """Steps, each of which takes the tokens that the step before chose: of one sequence, or of several with a row each.

    Attributes:
        ends: of each row.
        ids: number of rows of the embedding table; a token id beyond it ends the row.
        extents: symbol values of the first step.
        carried: an output of a step, and the input of the next step that receives it.
        first: a program with the same outputs for the first step, which may have several rows of one sequence: its
            inputs are set and it is `prepared`. `extents` and the position are then those of its last row.
        draws: how tokens are chosen; None if the program does so itself.
    """

    ends: Sequence[RowEnd]
    ids: int
    extents: Mapping[str, int]
    carried: tuple[str, str] | None = None
    first: Program | None = None
    draws: Draws | None = None

    @property
    def count(self) -> int:
        """Maximum number of steps."""
        return max(end.count for end in self.ends)


@dataclass(frozen=True)
class InArena:
    """An input or a result in the arena.

    Attributes:
        numbers: its NumPy type; uint8 for blocks.
        symbols: those of its shape.
    """

    shape: tuple[dims.DimLike, ...]
    offset: int
    numbers: str
    symbols: tuple[str, ...]

    @staticmethod
    def of(row: Mapping[str, Any]) -> InArena:
        """The value that a row of the manifest describes."""
        shape = tuple(map(dims.parse_dim, row["shape"]))
        symbols = tuple(sorted(set().union(*map(dims.symbols, shape))))
        return InArena(shape, row["offset"], DTYPES[row["dtype"]].numpy or "uint8", symbols)

    def sizes(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape with these symbol values."""
        return tuple(dims.value(d, extents) for d in self.shape)

    def nbytes(self, extents: Mapping[str, int]) -> int:
        """Its size with these symbol values."""
        return prod(self.sizes(extents)) * np.dtype(self.numbers).itemsize

    def input(self, arena: Buffer, extents: Mapping[str, int]) -> Array:
        """An array to write it to: its memory, if the host sees it."""
        sizes = self.sizes(extents)
        view = arena.part(self.offset, self.nbytes(extents)).view(self.numbers, sizes)
        return np.zeros(sizes, self.numbers) if view is None else view


class Program(ABC):
    """One instance of a compiled program, with memory of its own: ready to run once its weights and states are bound.

    Args:
        manifest: see `Built`.
        workers: number of workers that run it.
        memory: of the device that runs it.

    Attributes:
        inputs: name -> array for an input of the largest call, filled from the start. The next step reads it. The page
            table of one sequence has all pages in order until somebody writes another one.
        extents: the symbol values of the next or the last step.
        symbols: the same, int64 in the order of the manifest.
        times: int64 [workers, regions + 1], the clock at the start of a step and after each region.
        then: a follow-up program that reads results of this one.
        closed: whether its memory was released.
        called: what computes each of the manifest's `calls`; set before the first step.
        observers: follow its steps; changed by `observe` and `ignore` only.
    """

    then: Program | None = None
    closed = False
    called: Sequence[Called] = ()

    def __init__(self, manifest: Manifest, workers: int, memory: Memory) -> None:
        self.manifest = manifest
        self.observers: tuple[Observer, ...] = ()
        self.extents: Mapping[str, int] = {}
        self.arena_bytes: int = manifest["arena"] + workers * manifest["private"]
        self.arena = memory.allocate(self.arena_bytes, huge=True)  # followed by the private memory of each worker
        self.times = np.zeros((workers, len(manifest["regions"]) + 1), np.int64)
        self._names = {*manifest["weights"], *manifest["states"]}
        self._unbound = set(self._names)
        self._limits = [(symbol, *manifest["bounds"][symbol]) for symbol in manifest["symbols"]]
        self.symbols = np.zeros(max(1, len(self._limits)), np.int64)
        self._buffers: dict[str, Buffer] = {}  # weights and states without slots
        self._slotted: dict[str, tuple[Buffer, int]] = {}
        self._slots = 0, 0  # that are selected: to read from, and to write to
        self._largest = {symbol: high for symbol, (_, high) in manifest["bounds"].items()}
        self._given = {name: InArena.of(row) for name, row in manifest["inputs"].items()}
        self._results = {name: InArena.of(row) for name, row in manifest["outputs"].items()}
        # A cache of the values of results, by the values of the symbols in their shapes.
        self._views: dict[tuple[Any, ...], Values] = {}
        self._sees = self.arena.view() is not None
        self._sent: set[str] = set()  # inputs that are in the arena already
        self.inputs = {name: value.input(self.arena, self._largest) for name, value in self._given.items()}
        if (table := self.inputs.get("pages")) is not None and table.ndim == 1:
            table[:] = range(len(table))

    @property
    def name(self) -> str:
        return f"{self.manifest['name']}/{self.manifest['phase']}"

    # -- memory -------------------------------------------------------------------------------------------------------

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        """Sets where weights and states lie; ignores names that the program does not use."""
        used = {name: buffer for name, buffer in buffers.items() if name in self._names}
        self._buffers |= used
        self._unbound -= used.keys()
        if self.then:
            self.then.bind(buffers)

    def bind_slots(self, states: Mapping[str, tuple[Buffer, int]]) -> None:
        """Sets where the states lie that have a slot for each sequence, and selects slot 0.

        A program of several segments finds the slots itself; others are moved to a slot by `select_slot`.

        Args:
            states: by name the memory of all slots, and the bytes of a slot. A state that is written beside another
                one, whose name ends in "'", has the slots of the other.
        """
        self._slotted = dict(states)
        self._unbound -= {place for name in states for place in (name, f"{name}'")}
        if self.then:
            self.then.bind_slots(states)
        self.select_slot(0)

    def select_slot(self, slot: int, written: int | None = None) -> None:
        """Moves a program of one sequence to the states of a slot; takes some microseconds.

        Args:
            written: the slot of the states that are written beside others; by default the same.
        """
        self._slots = slot, slot if written is None else written
        if self.then:
            self.then.select_slot(slot, written)

    def bound(self, name: str) -> Buffer:
        """The memory of a weight or state that is bound; of a state with slots, from the selected one on."""
        if name.removesuffix("'") not in self._slotted:
            return self._buffers[name]
        states, nbytes = self._slotted[name.removesuffix("'")]
        return states.part(self._slots[name.endswith("'")] * nbytes)

    def memory_of(self, place: Placed, nbytes: int, worker: int = 0) -> Buffer:
        """The memory of a value that the passes have placed, or its first bytes.

        Args:
            worker: whose private memory.
        """
        if place.kind in ("weight", "state"):
            return self.bound(place.name).part(0, nbytes)
        start = 0 if place.kind == "arena" else self.manifest["arena"] + worker * self.manifest["private"]
        return self.arena.part(start + place.offset, nbytes)

    def lead(self, then: Program) -> None:
        """Makes `then` the follow-up program: its states are results of this program with the same names."""
        then.bind({name: self.result(name) for name in self._results.keys() & then.manifest["states"].keys()})
        self.then = then

    def result(self, name: str, **extents: int) -> Buffer:
        """The memory of a result, valid until the next step; without symbol values, for the largest call."""
        value = self._results[name]
        return self.arena.part(value.offset, value.nbytes(extents or self._largest))

    def output(self, name: str, **extents: int) -> Array:
        """The numbers of a result, valid until the next step."""
        return np.asarray(self.values(name, **extents))

    def values(self, name: str, **extents: int) -> Values:
        """The numbers of a result where they lie, valid until the next step."""
        value = self._results[name]
        key = (name, *[extents.get(symbol) for symbol in value.symbols])
        if key not in self._views:
            buffer, shape = self.result(name, **extents), value.sizes(extents)
            view = buffer.view(value.numbers, shape)
            self._views[key] = DeviceArray(buffer, value.numbers, shape) if view is None else view
        return self._views[key]

    def fill(self, name: str, source: Buffer) -> None:
        """Copies memory of the device into an input, from its start on, in place of what `inputs` has."""
        source.copy_to(self.arena.part(self._given[name].offset, source.nbytes))
        self._sent.add(name)

    def _send(self) -> None:
        """Copies the inputs of a step to memory that the host does not see."""
        for name in self.inputs.keys() - self._sent:
            value = self._given[name]
            buffer = self.arena.part(value.offset, value.nbytes(self.extents))
            buffer.write(self.inputs[name].reshape(-1).view(np.uint8)[: buffer.nbytes])
        self._sent.clear()

    # -- steps --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def launch(self) -> None:
        """Runs one step with the symbol values of `prepare`, and returns when it is done."""

    def run(self, **extents: int) -> None:
        """Runs one step on all workers. The caller writes `inputs`, reads `output` and keeps symbols in bounds.

        Raises:
            ArgumentError: a weight or state is not bound, or a symbol is missing or out of bounds.
        """
        self.prepare(extents)
        if not self._sees:
            self._send()
        for observer in self.observers:
            observer.before(self)
        start = time.perf_counter()
        self.launch()
        if self.observers:
            self.tell(time.perf_counter() - start, 1)
            if self.log is not None:
                tell_log(self, self.log)

    #: As `run`, but a device may return as soon as it has the inputs: who reads results waits until they are there, and
    #: errors of the step come from there.
    begin = run

    def observe(self, observer: Observer) -> None:
        """Adds an observer, from the next step on. Any thread may call it."""
        self.observers = (*self.observers, observer)
        self.record(any(each.logs for each in self.observers))

    def ignore(self, observer: Observer) -> None:
        """Removes an observer."""
        self.observers = tuple(each for each in self.observers if each is not observer)
        self.record(any(each.logs for each in self.observers))

    def tell(self, seconds: float, steps: int) -> None:
        """Tells the observers of steps that took `seconds` together."""
        for observer in self.observers:
            observer.after(self, seconds, steps)

    def record(self, logs: bool) -> None:
        """Whether the calls from the next one on log their clocks."""
        return

    @property
    def log(self) -> StepLog | None:
        """The clocks of the last call, if they are logged."""
        return None

    def prepare(self, extents: Mapping[str, int]) -> None:
        """Checks that everything is bound, and keeps the symbol values; `ArgumentError` as `run`."""
        if self._unbound:
            self.check_bound()
        for symbol, low, high in self._limits:
            if not low <= extents.get(symbol, -1) <= high:
                found = extents.get(symbol, "nothing")
                raise ArgumentError(f"{symbol} must lie in {low}..{high}, found {found}", where=f"program {self.name}")
        if self._limits:
            self.symbols[:] = [extents[symbol] for symbol, _, _ in self._limits]
        self.extents = extents

    def check_bound(self, name: Callable[[str], str] = str) -> None:
        """Raises an `ArgumentError` if weights have no values; `name` turns their names into those the caller uses."""
        if self._unbound:
            names = ", ".join(sorted(map(name, self._unbound))[:5])
            hint = "Give them when compiling (bind=...), with bind(), or with the call."
            raise ArgumentError(f"weights have no values: {names}", where=f"program {self.name}", hint=hint)

    def steps(self, run: TokenRun) -> TokenSteps:
        """The steps of a run; a device may compute several before somebody takes their tokens.

        The program's output `token` i32[1], or what is drawn, becomes the input `tokens`. The first tokens, and their
        positions if there is an input `positions`, are in `inputs`, and so are the segments of several rows. Pasts and
        positions grow by one per step. A row that has ended becomes a segment without rows.

        Raises:
            ArgumentError: as `run`.
        """
        return TokenSteps(self, run)

    def repeat(self, run: TokenRun, seconds: float) -> list[int]:
        """All steps of a run of one row: its tokens, at least one. The last one may be `NO_TOKEN`.

        Args:
            seconds: time limit; the run ends after the current step.
        """
        steps, found, end = self.steps(run), list[int](), time.monotonic() + seconds
        while steps.alive and (not found or time.monotonic() < end):
            found += [tokens[0] for tokens in steps.take(run.count - len(found), end - time.monotonic())]
        while steps.ahead:
            found += [tokens[0] for tokens in steps.take(0)]
        return found

    def close(self) -> None:
        """Releases the memory."""
        if self.then:
            self.then.close()
        self.closed = True
        for observer in self.observers:
            observer.closed(self)
        self.arena.close()
        self._buffers, self._slotted = {}, {}


def tell_log(program: Program, log: StepLog) -> None:
    """Tells the observers of a program of the clocks of a call."""
    for observer in program.observers:
        if observer.logs:
            observer.logged(program, log)


class TokenSteps:
    """The steps of a `TokenRun`, one after the other, as the host runs them.

    Args:
        program: its inputs are set.

    Attributes:
        alive: numbers of the rows that have not ended.
        ahead: how many steps a device has begun whose tokens nobody has taken.
        seconds: how long a step of the last `take` took; None if it was over before anybody waited for it.
    """

    ahead = 0
    seconds: float | None = None

    def __init__(self, program: Program, run: TokenRun) -> None:
        self._program, self._run, self._taken = program, run, 0
        self._env = dict(run.extents)
        self.alive = list(range(len(run.ends)))
        program.prepare(self._env)

    def take(self, ahead: int, seconds: float = inf) -> list[list[int]]:
        """The tokens of the next step, or of several that were computed in one call: of each row one, or `NO_TOKEN`.

        Args:
            ahead: how many steps, this one included, a device may have begun; with 0 it begins none.
            seconds: when a call of several steps ends.
        """
        start, run = time.perf_counter(), self._run
        program = run.first if run.first and not self._taken else self._program
        program.begin(**(program.extents if program is run.first else self._env))
        if run.draws is None:
            tokens = [int(program.output("token", **program.extents).reshape(-1)[0])]
        else:
            tokens = [NO_TOKEN] * len(run.ends)
            logits = program.values(run.draws.output, **program.extents)
            for row, token in zip(self.alive, run.draws.tokens(self._taken, logits, self.alive), strict=True):
                tokens[row] = token
        self._note(tokens)
        if self.alive:
            self._feed(tokens, program)
        self.seconds = time.perf_counter() - start
        return [tokens]

    def _note(self, tokens: Sequence[int]) -> None:
        """Counts a step, and finds which rows go on."""
        self._taken += 1
        ends, ids, taken = self._run.ends, self._run.ids, self._taken
        going = [row for row in self.alive if 0 <= tokens[row] < ids and taken < ends[row].count]
        self.alive = [row for row in going if tokens[row] not in ends[row].stops]

    def _feed(self, tokens: Sequence[int], program: Program) -> None:
        """Sets the inputs of the next step.

        Args:
            program: that ran the last step.
        """
        inputs, alive, own = self._program.inputs, self.alive, self._program
        inputs["tokens"][alive] = [tokens[row] for row in alive]
        if self._run.carried:
            own.fill(self._run.carried[1], program.result(self._run.carried[0], **program.extents))
        if "positions" in inputs:
            inputs["positions"][alive] += 1
        if (segments := inputs.get("segments")) is not None:
            segments[alive, PAST] += 1
            if len(alive) < len(tokens):
                segments[list({*range(len(tokens))} - {*alive}), ROWS] = 0
        self._env["PAST_SEQ"] = self._env.get("PAST_SEQ", 0) + 1
