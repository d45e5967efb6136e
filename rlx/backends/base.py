"""What a backend is: the machine that programs are compiled for and run on, behind one interface.

The compiler and the engine know this module only; `rlx.backends.backend` finds a backend by the name of its device. A
backend says what passes may ask (`Target.capabilities`), makes code from a lowered program (`build`: its kernel table
and its linker), loads it (`load`), and runs it (`Program`) on workers that it starts (`workers`), over memory that it
allocates (`allocate`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlx.backends.memory import AlignedBuffer
from rlx.errors import ArgumentError
from rlx.ir import dims
from rlx.ir.dtypes import DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import program as passes
from rlx.passes.capabilities import Capabilities
from rlx.passes.layout import ROWS_LAYOUT, weight_row
from rlx.passes.options import Options

Array = NDArray[Any]
Manifest = Mapping[str, Any]
Files = Mapping[str, bytes | str]
T = TypeVar("T")

#: A program after all passes, without code.
Lowered = passes.Program

#: Takes the number of kernels generated so far, and the total.
OnKernel = Callable[[int, int], None]


class Target(Protocol):
    """The machine that code is made for. Immutable and hashable."""

    @property
    def level(self) -> str:
        """Its name for people, such as "avx512"."""

    @property
    def backend(self) -> Backend:
        """The backend that makes code for it."""

    @property
    def capabilities(self) -> Capabilities:
        """What passes may ask."""

    @property
    def numbers(self) -> Mapping[str, int]:
        """The measured numbers that change code, such as those of `rlx tune`. Part of the compile key."""

    def describe(self) -> dict[str, str]:
        """Everything else that changes code. Part of the compile key."""


class Stored(Protocol):
    """The files of a compiled program."""

    @property
    def names(self) -> Sequence[str]:
        """Their names."""

    def read(self, name: str) -> bytes:
        """The contents of one."""


class Builder(Protocol):
    """What compiles small pieces of code beside programs, through the compile cache."""

    @property
    def target(self) -> Any:
        """The target of all of them."""

    def once(self, what: str, build: Callable[[], Files], load: Callable[[Stored], T], **fields: Any) -> T:
        """What `load` makes of the files of `build`, which runs only if the cache has none for these fields of a key.

        Args:
            what: it is, for whoever waits for it.
        """


@dataclass(frozen=True)
class Built:
    """A program as a backend compiled it.

    Attributes:
        files: its code by file name, and "kernels/<symbol>.txt", the readable source of each kernel.
        manifest: plain JSON data: `name` and `phase` of the program, `symbols` and their `bounds`; `arena`, the bytes
            of its values, and `private`, those of each worker; `signed_codes`, whether packed weights have them;
            `inputs`, `outputs`, `weights` and `states` by name; and for each region `regions` and `prologues`: [number
            of the node, symbol of its kernel] in order.
        kernels: number of different kernels.
        seconds: that each stage took, by name.
    """

    files: Files
    manifest: dict[str, Any]
    kernels: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Loadable:
    """A compiled program before it is loaded.

    Attributes:
        manifest: see `Built`.
        files: those of `Built`, and what the compiler adds.
        graph: reads the graph after all passes, whose node numbers the manifest uses.
        options: it was compiled with.
    """

    manifest: Manifest
    files: Stored
    graph: Callable[[], Graph]
    options: Options


@dataclass(frozen=True)
class Code:
    """A loaded program.

    Attributes:
        instance: makes an instance with memory of its own, for workers of the backend.
        nbytes: size of the machine code.
    """

    instance: Callable[[Any], Program]
    nbytes: int


class Workers(Protocol):
    """What runs programs: the threads of a CPU, the stream of a card."""

    @property
    def n(self) -> int:
        """How many work at a time."""

    def close(self) -> None:
        """Stops them. Can be called more than once."""


@dataclass(frozen=True)
class Packer:
    """What packs matrices of one type.

    Attributes:
        nbytes: (n, k) -> packed bytes of a matrix [n, k].
        pack: takes the bytes of a matrix in the file, uint8, the address of the packed bytes, n and k.
    """

    nbytes: Callable[[int, int], int]
    pack: Callable[[NDArray[np.uint8], int, int, int], None]


class Backend(ABC):
    """One kind of device.

    Attributes:
        name: of its device.
        native_loops: whether it generates many tokens in one call (`Program.repeat`, rounds of drafts) faster than one
            by one.
    """

    name: str
    native_loops = False

    @abstractmethod
    def target(self, level: str | None = None) -> Target:
        """This machine as a target.

        Args:
            level: a level of the device; by default the best one.

        Raises:
            TargetError: this machine has no such device, or not this level.
        """

    @abstractmethod
    def build(self, program: Lowered, target: Any, on_kernel: OnKernel) -> Built:
        """Makes the code of a lowered program: selects the kernel of each node, and links them.

        Raises:
            CompileError: an op has no kernel for its types.
        """

    @abstractmethod
    def load(self, stored: Loadable) -> Code:
        """Loads a compiled program.

        Raises:
            CompileError: the code does not load.
        """

    @abstractmethod
    def workers(self, count: int, builder: Builder) -> Workers:
        """Starts workers.

        Raises:
            ArgumentError: `count` is out of range.
            ResourceError: the system refuses them.
        """

    @abstractmethod
    def packer(self, dtype: DType, workers: Any, builder: Builder) -> Packer:
        """What packs weights of a type into the layout that its kernels read, see `rlx.passes.layout`."""

    def prepare_packing(self, dtypes: Iterable[DType], builder: Builder) -> None:
        """Compiles what `packer` needs, where it needs code, and loads nothing."""
        return

    def allocate(self, nbytes: int, huge: bool = False) -> AlignedBuffer:
        """Zeroed memory that programs of this backend can read, for weights and states.

        Raises:
            ResourceError: there is not enough.
        """
        return AlignedBuffer(nbytes, huge)

    def bandwidth(self, workers: Any, nbytes: int) -> float:
        """The rate in 10^9 bytes per second at which all workers together read a buffer of `nbytes`, measured.

        Raises:
            ArgumentError: this backend is not made for speed.
        """
        raise ArgumentError("no speed to measure", where=f"device {self.name!r}", hint="Choose another device.")

    def peaks(self, workers: Any, builder: Builder) -> dict[str, float]:
        """The arithmetic peak of all workers, in 10^9 operations per second, by kind: "int8", "bf16", "f32", ...

        Raises:
            ArgumentError: as `bandwidth`.
        """
        raise ArgumentError("no speed to measure", where=f"device {self.name!r}", hint="Choose another device.")

    def assembly(self, text: str, target: Any) -> str:
        """The machine code, as text, of a module that `build` put into its files as "<name>.ll"."""
        raise NotImplementedError


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


@dataclass(frozen=True)
class TokenRun:
    """Steps of one row, each of which takes the token that the step before chose; `Program.repeat` runs them.

    Attributes:
        count: maximum number of steps.
        rows: number of rows of the embedding table; a token id beyond it ends the run.
        stops: token ids that end the run.
        seconds: time limit; the run ends after the current step.
        extents: symbol values of the first step.
        carried: an output of a step, and the input of the next step that receives it.
        first: a program with the same outputs for the first step, which may have several rows: its inputs are set and
            it is `prepared`. `extents` and the position are then those of its last row.
    """

    count: int
    rows: int
    stops: Sequence[int]
    seconds: float
    extents: Mapping[str, int]
    carried: tuple[str, str] | None = None
    first: Program | None = None


class Program(ABC):
    """One instance of a compiled program, with memory of its own: ready to run once its weights and states are bound.

    Args:
        manifest: see `Built`.
        workers: number of workers that run it.

    Attributes:
        inputs: name -> memory of an input for the largest call, filled from the start.
        extents: the symbol values of the next or the last step.
        times: int64 [workers, regions + 1], the clock at the start of a step and after each region.
        then: a follow-up program that reads results of this one.
        closed: whether its memory was released.
        observers: follow its steps; changed by `observe` and `ignore` only.
        finish: called when the program is closed.
    """

    then: Program | None = None
    closed = False
    finish: Callable[[], object] | None = None

    def __init__(self, manifest: Manifest, workers: int) -> None:
        self.manifest = manifest
        self.observers: tuple[Observer, ...] = ()
        self.extents: Mapping[str, int] = {}
        self.arena_bytes: int = manifest["arena"] + workers * manifest["private"]
        self.arena = AlignedBuffer(self.arena_bytes, huge=True)  # followed by the private memory of each worker
        self.times = np.zeros((workers, len(manifest["regions"]) + 1), np.int64)
        self._unbound = {*manifest["weights"], *manifest["states"]}
        self._limits = [(symbol, *manifest["bounds"][symbol]) for symbol in manifest["symbols"]]
        shapes = {row: tuple(map(dims.parse_dim, manifest["outputs"][row]["shape"])) for row in manifest["outputs"]}
        # For each result its shape and the symbols in it; and a cache of its views, by the values of these symbols.
        self._shapes = {name: (shape, sorted(set().union(*map(dims.symbols, shape)))) for name, shape in shapes.items()}
        self._views: dict[tuple[Any, ...], Array] = {}
        self.inputs = {name: self._view(row, self._most(row)) for name, row in manifest["inputs"].items()}

    @property
    def name(self) -> str:
        return f"{self.manifest['name']}/{self.manifest['phase']}"

    # -- memory -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def bind(self, addresses: Mapping[str, int]) -> None:
        """Sets the addresses of weights and states; ignores names that the program does not use."""

    def bind_slots(self, states: Mapping[str, tuple[int, int]]) -> None:
        """Sets where the states lie that have a slot for each sequence, and selects slot 0.

        A program of several segments finds the slots itself; others are moved to a slot by `select_slot`.

        Args:
            states: by name the address of slot 0 and the bytes of a slot. A state that is written beside another one,
                whose name ends in "'", has the slots of the other.
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
        beside = slot if written is None else written
        self.bind({name: start + slot * nbytes for name, (start, nbytes) in self._slotted.items()})
        self.bind({f"{name}'": start + beside * nbytes for name, (start, nbytes) in self._slotted.items()})

    @abstractmethod
    def address(self, name: str) -> int:
        """The address of a weight or state that is bound."""

    def lead(self, then: Program) -> None:
        """Makes `then` the follow-up program: its states are results of this program with the same names."""
        then.bind({name: self.result(name) for name in self.manifest["outputs"]})
        self.then = then

    def result(self, name: str) -> int:
        """Address of a result."""
        return int(self.arena.address + self.manifest["outputs"][name]["offset"])

    def output(self, name: str, **extents: int) -> Array:
        """A view of a result in the arena, valid until the next step."""
        shape, symbols = self._shapes[name]
        key = (name, *[extents.get(symbol) for symbol in symbols])
        if key not in self._views:
            sizes = tuple(dims.value(d, extents) for d in shape)
            self._views[key] = self._view(self.manifest["outputs"][name], sizes)
        return self._views[key]

    def _most(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        limits = {s: (low, high) for s, (low, high) in self.manifest["bounds"].items()}
        return tuple(dims.bounds(dims.parse_dim(d), limits)[1] for d in row["shape"])

    def _view(self, row: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
        return self.arena.view(DTYPES[row["dtype"]].numpy or "uint8", shape, row["offset"])

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
        if self.observers:
            self._observed()
        else:
            self.launch()

    def _observed(self) -> None:
        for observer in self.observers:
            observer.before(self)
        start = time.perf_counter()
        self.launch()
        self.tell(time.perf_counter() - start, 1)
        if self.log is not None:
            self.tell_log(self.log)

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

    def tell_log(self, log: StepLog) -> None:
        """Tells the observers of the clocks of a call."""
        for observer in self.observers:
            if observer.logs:
                observer.logged(self, log)

    def record(self, logs: bool) -> None:
        """Whether the calls from the next one on log their clocks."""
        return

    @property
    def log(self) -> StepLog | None:
        """The clocks of the last call, if they are logged."""
        return None

    def prepare(self, extents: Mapping[str, int]) -> None:
        """Checks that everything is bound, and keeps the symbol values; `ArgumentError` as `run`."""
        self.check_bound()
        for symbol, low, high in self._limits:
            if not low <= extents.get(symbol, -1) <= high:
                found = extents.get(symbol, "nothing")
                raise ArgumentError(f"{symbol} must lie in {low}..{high}, found {found}", where=f"program {self.name}")
        self.extents = extents

    def check_bound(self, name: Callable[[str], str] = str) -> None:
        """Raises an `ArgumentError` if weights have no values; `name` turns their names into those the caller uses."""
        if self._unbound:
            names = ", ".join(sorted(map(name, self._unbound))[:5])
            hint = "Give them when compiling (bind=...), with bind(), or with the call."
            raise ArgumentError(f"weights have no values: {names}", where=f"program {self.name}", hint=hint)

    def repeat(self, run: TokenRun) -> list[int]:
        """Runs steps of one row; each step takes the token that the step before chose.

        For programs whose output `token` i32[1] becomes the input `tokens`. The first token, and its position if there
        is an input `positions`, are in `inputs`. PAST_SEQ and the position grow by one per step.

        Returns:
            The tokens found, 1 to `run.count`.

        Raises:
            ArgumentError: as `run`.
        """
        env, found, end = dict(run.extents), list[int](), time.monotonic() + run.seconds
        self.prepare(env)
        program: Program = run.first or self
        while True:
            program.run(**program.extents)
            found.append(int(program.output("token", **program.extents).reshape(-1)[0]))
            ended = not 0 <= found[-1] < run.rows or found[-1] in run.stops
            if ended or len(found) >= run.count or time.monotonic() >= end:
                return found
            self.inputs["tokens"][:1] = found[-1]
            if run.carried:
                value = program.output(run.carried[0], **program.extents).reshape(-1)
                self.inputs[run.carried[1]].reshape(-1)[: value.size] = value
            if "positions" in self.inputs:
                self.inputs["positions"][:1] += 1
            env["PAST_SEQ"] = env.get("PAST_SEQ", 0) + 1
            program = self
            self.prepare(env)

    def close(self) -> None:
        """Releases the memory."""
        if self.then:
            self.then.close()
        self.closed = True
        if self.finish:
            self.finish()
        self.arena.close()


def manifest_of(program: Lowered, symbol: Callable[[Node], str], *, signed_codes: bool = False) -> dict[str, Any]:
    """The manifest of a lowered program, see `Built`.

    Args:
        symbol: the name of a node's kernel.
        signed_codes: whether packed weights have signed codes, see `rlx.backends.cpu.layouts`.
    """
    graph = program.graph
    number = {node: i for i, node in enumerate(graph.nodes())}
    prologues, regions = (
        [[[number[n], symbol(n)] for n in nodes] for nodes in some] for some in (program.prologues, program.regions)
    )
    layouts = {n.inputs[0].name: n["layout"] for n in program.load}
    weights, states = graph.leaves("weight").values(), graph.leaves("state").values()
    return {
        "name": graph.name,
        "phase": graph.phase,
        "symbols": program.symbols,
        "bounds": {s: list(graph.bounds[s]) for s in program.symbols},
        "arena": program.arena,
        "private": program.private,
        "signed_codes": signed_codes,
        "prologues": prologues,
        "regions": regions,
        "inputs": {n.name: _place(program, n) for n in graph.leaves("input").values()},
        "outputs": {name: _place(program, n) for name, n in graph.outputs.items()},
        "weights": {n.name: weight_row(n, layouts.get(n.name, ROWS_LAYOUT)) for n in weights},
        "states": {n.name: _described(n) | {"layout": n["layout"]} for n in states},
    }


def _described(node: Node) -> dict[str, Any]:
    return {"dtype": node.dtype.name, "shape": [str(d) for d in node.shape]}


def _place(program: Lowered, node: Node) -> dict[str, Any]:
    return _described(node) | {"offset": program.buffer(node).offset}


def uses(program: Lowered, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(kernel symbol, name of the value that it computes) for every call of a step, in order."""
    nodes, names = program.graph.nodes(), program.graph.names()
    for calls in chain(*zip(manifest["prologues"], manifest["regions"], strict=True)):
        yield from ((symbol, names[nodes[number]]) for number, symbol in calls)
