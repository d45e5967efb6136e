"""A backend: the machine that programs are compiled for and run on, behind one interface.

The compiler and the engine know this module only; `rlx.backends.backend` finds a backend by the name of its device. A
backend says what passes may ask (`Target.capabilities`), makes code from a lowered program (`build`: its kernel table
and its linker), loads it (`load`), and runs it (`Program`) on workers that it starts (`workers`), over its
`memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlx.backends import reference
from rlx.backends.memory import Buffer, Memory
from rlx.backends.program import Manifest, Program
from rlx.errors import ArgumentError
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import program as passes
from rlx.passes.capabilities import Capabilities
from rlx.passes.layout import ROWS_LAYOUT, weight_row
from rlx.passes.options import Options
from rlx.sampling.choice import Choose, choose_rows
from rlx.store.key import sources_of

if TYPE_CHECKING:
    from rlx.backends.drafts import Heads, Rounds
    from rlx.backends.reference.formats import Formats
    from rlx.passes.pipeline import Pass
    from rlx.store.entry import Entry

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
        """The facts that passes may ask for."""

    @property
    def tuning(self) -> Mapping[str, int]:
        """The measured numbers that change code, such as those of `rlx tune`. Part of the compile key."""

    def describe(self) -> dict[str, str]:
        """Everything else that changes code. Part of the compile key."""


class Builder(Protocol):
    """Compiles small pieces of code beside programs, through the compile cache."""

    @property
    def target(self) -> Any:
        """The target of all of them."""

    def once(self, what: str, build: Callable[[], Files], load: Callable[[Entry], T], **fields: Any) -> T:
        """Loads the files of `build` with `load`; `build` runs only if the cache has none for these fields of a key.

        Args:
            what: it is, for whoever waits for it.
        """


@dataclass(frozen=True)
class Built:
    """A program as a backend compiled it.

    Attributes:
        files: its code by file name, and "kernels/<symbol>.txt", the readable source of each kernel.
        manifest: plain JSON data: `name` and `phase` of the program, `symbols` and their `bounds`; `arena`, the bytes
            of its values, and `private`, those of each worker;
            `inputs`, `outputs`, `weights` and `states` by name; and for each region `regions` and `prologues`: [number
            of the node, symbol of its kernel] in order. Where there are nodes `call`, `calls` has for each its `region`
            and `body`, the places of its `operands` and `result`, and the names of its `weights`.
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
    files: Entry
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
    """Runs programs: the threads of a CPU, the stream of a card."""

    @property
    def n(self) -> int:
        """How many work at a time."""

    def close(self) -> None:
        """Stops them. Can be called more than once."""


@dataclass(frozen=True)
class Packer:
    """Packs matrices of one type.

    Attributes:
        nbytes: (n, k) -> packed bytes of a matrix [n, k].
        pack: takes the bytes of a matrix in the file, uint8, the memory for the packed bytes, n and k.
    """

    nbytes: Callable[[int, int], int]
    pack: Callable[[NDArray[np.uint8], Buffer, int, int], None]


@dataclass(frozen=True)
class Loop:
    """A loop kernel outside of programs, in the language of `rlx.scalars`.

    Attributes:
        name: with `version` it tells kernels of this kind apart in the compile cache.
        what: it is, for whoever waits for it.
        kind: of its compile key.
        version: digest of its sources.
        function, holes: the kernel, and the values of its holes; called when it must be compiled.
        buffers: name and type of each buffer.
        extents: names of the sizes that it takes.
    """

    name: str
    what: str
    kind: str
    version: str
    function: Callable[[], tuple[Callable[..., Any], Mapping[str, Any]]]
    buffers: Sequence[tuple[str, DType]]
    extents: Sequence[str] = ()


@dataclass(frozen=True)
class FeatureUse:
    """The features of a machine beside those of a target, by name, sorted.

    Attributes:
        used: what the code may use.
        unused: what the machine has and the code does not use -> the reason.
        lacking: what the machine lacks and the code of some target of this architecture would use.
    """

    used: tuple[str, ...]
    unused: dict[str, str]
    lacking: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """The result for one value of a number of a tuning.

    Attributes:
        speed: of all that was timed, in `unit`: "GB/s" of weights, or "GFLOP/s". Measured for the current value,
            computed from `ratio` for the others.
        ratio: time relative to the current value.
        chosen: whether it is used from now on.
    """

    name: str
    value: int
    speed: float
    unit: str
    ratio: float
    chosen: bool


@dataclass(frozen=True)
class Outcome:
    """The result of `Backend.tune`.

    Attributes:
        rows: for every number that was measured, the original value first.
        skipped: the numbers for which there was no time; they are unchanged.
    """

    tuning: Mapping[str, int]
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]


class Backend(ABC):
    """One kind of device.

    Attributes:
        name: of its device.
        memory: that its programs work on: weights, states and arenas.
        native_loops: whether runs of steps (`Program.steps`) are faster than steps one by one.
        native_rounds: whether one call drafts with a head and verifies several times (`rounds`), too.
        calls_host: whether the host may compute parts of its programs, the nodes `call`.
        batch_rows: largest row counts of programs for rows of several sequences, besides the largest bucket.
        call_rows: largest row counts of more buckets, if nobody chose buckets: of calls that have other kernels, or in
            which a row is quicker.
        shared_rows: largest row count of a prompt that shares a step with other prompts: a longer one fills the device.
    """

    name: str
    memory: Memory
    native_loops = False
    native_rounds = False
    calls_host = False
    batch_rows: tuple[int, ...] = (8, 32)
    call_rows: tuple[int, ...] = ()
    shared_rows = 64

    @property
    def sources(self) -> tuple[str, ...]:
        """Patterns of the sources that its code depends on: its folder, and what devices share. Part of the key."""
        name = type(self).__module__.removeprefix("rlx.backends.")
        return sources_of(*([name.split(".")[0]] if name != type(self).__module__ else []))

    def versions(self) -> Mapping[str, Any]:
        """Versions of the compilers that its code depends on. Part of the key."""
        return {}

    def passes(self, phase: str) -> tuple[Pass, ...] | None:
        """The passes over the graph of a program, in order, before it is scheduled; None for the usual ones.

        A device may add passes to the usual ones, replace them, leave them out, or order them otherwise.

        Args:
            phase: "prefill", "decode" or "batch".
        """
        return None

    def description(self) -> str:
        """The device of this machine in a few words. `TargetError` if it is missing."""
        return self.target().level

    def without_code(self) -> Backend:
        """The mode of this device that makes no machine code, for RLX_JIT=0, if it has one."""
        return self

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
        """The packer of weights of a type into the layout that its kernels read, see `rlx.passes.layout`."""

    def prepare_packing(self, dtypes: Iterable[DType], builder: Builder) -> None:
        """Compiles what `packer` needs, where it needs code, and loads nothing."""
        return

    def prepare_choosing(self, builder: Builder) -> None:
        """Compiles what `chooser` needs, where it needs code."""
        return

    def chooser(self, workers: Any, builder: Builder) -> Choose:
        """A function that chooses the tokens of some rows of logits."""
        return choose_rows

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

    def assembly(self, text: str, target: Any, form: str | None = None) -> str:
        """The machine code, as text, of a module that `build` put into its files as "<name>.ll".

        Args:
            form: "ptx" or "sass", of a card; by default what is assembly for the device.

        Raises:
            ArgumentError: the device has no such form (`no_form`), or what makes it is not installed.
        """
        raise NotImplementedError

    def stored_assembly(self, described: Mapping[str, Any], text: str, code: bytes) -> str:
        """As `assembly`, of stored code for any target; the first line says so if it is made by another LLVM.

        Args:
            described: what `Target.describe` says of the target.
            code: the stored code of the module.

        Raises:
            CompileError: the module cannot be read here.
        """
        raise NotImplementedError

    def formats(self, manifest: Manifest) -> Formats:
        """The reader and writer of a program's values in this device's memory, for `RLX_VERIFY`."""
        return reference.formats.Formats()

    # -- the machine --------------------------------------------------------------------------------------------------

    def levels(self) -> list[str]:
        """The levels that the hardware has, the narrowest first; `target` refuses those that may not be used."""
        return []

    def feature_use(self, target: Any) -> FeatureUse:
        """The features of this machine that code for a target uses, or why not."""
        return FeatureUse((), {}, ())

    # -- tuning -------------------------------------------------------------------------------------------------------

    def default_tuning(self, target: Any) -> Mapping[str, int]:
        """The tuning of a target before anything is measured; empty where there is nothing to tune."""
        return {}

    def with_tuning(self, target: Any, tuning: Mapping[str, int]) -> Any:
        """The target with this tuning, unless it has one of its own.

        Raises:
            ArgumentError: a number is out of its range.
        """
        return target

    def tune(
        self,
        target: Any,
        workers: Any,
        builders: Callable[[Any], Builder],
        seconds: float,
        progress: Callable[[int, int], None],
    ) -> Outcome:
        """Measures which tuning suits this machine.

        Args:
            builders: makes a builder for a target with a candidate, whose code nobody else uses.
            seconds: about how long.
            progress: called with what is done, and how much there is.

        Raises:
            ArgumentError: as `bandwidth`.
        """
        raise ArgumentError("there is nothing to tune", where=f"device {self.name!r}", hint="Choose another device.")

    # -- drafts -------------------------------------------------------------------------------------------------------

    def rounds(self, models: tuple[Program, Program], heads: Heads, **limits: Any) -> Rounds:
        """Rounds of drafts of a head in one native call, where there are `native_rounds`.

        Args:
            models: two programs that alternate, each on the recurrent states that the other one wrote; twice the same
                program without recurrent states.
            heads: prepared; the head has processed all rows before the first round.
            limits: as of `rlx.backends.cpu.launch.drafts.run_rounds`.
        """
        raise NotImplementedError

    # -- loop kernels -------------------------------------------------------------------------------------------------

    def loop(self, loop: Loop, workers: Any, builder: Builder) -> Callable[..., None]:
        """A loop kernel, compiled through the builder's cache: a function that runs it over arrays, with all workers.

        The function takes the arrays of the buffers, contiguous, then the values of the extents, then the number of
        units.
        """
        raise ArgumentError("no loop kernels", where=f"device {self.name!r}", hint="Choose another device.")


def no_form(device: str, form: str) -> ArgumentError:
    """The error of a form of machine code that a device does not have."""
    hint = "This device has llvm and asm; cuda has llvm, ptx and sass."
    return ArgumentError(f"no code has the form {form}", where=f"device {device!r}", hint=hint)


def manifest_of(program: Lowered, symbol: Callable[[Node], str]) -> dict[str, Any]:
    """The manifest of a lowered program, see `Built`.

    Args:
        symbol: the name of a node's kernel.
    """
    graph = program.graph
    number = {node: i for i, node in enumerate(graph.nodes())}
    every = [(i, node) for i, region in enumerate(program.regions) for node in region]
    calls = [_call(program, i, node) for i, node in every if node.op == "call"]
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
        "prologues": prologues,
        "regions": regions,
        "inputs": {n.name: _place(program, n) for n in graph.leaves("input").values()},
        "outputs": {name: _place(program, n) for name, n in graph.outputs.items()},
        "weights": {n.name: weight_row(n, layouts.get(n.name, ROWS_LAYOUT)) for n in weights},
        "states": {n.name: _described(n) | {"layout": n["layout"]} for n in states},
        **({"calls": calls} if calls else {}),
    }


def _call(program: Lowered, region: int, node: Node) -> dict[str, Any]:
    """A row of the manifest's calls."""
    values = [i for i in node.inputs if i.op != "pack"]
    return {
        "region": region,
        "body": node["body"],
        "operands": [_place(program, i) for i in values],
        "weights": [i.inputs[0].name for i in node.inputs if i.op == "pack"],
        "result": _place(program, node),
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
