"""What a backend is: the machine that programs are compiled for and run on, behind one interface.

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
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

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
        pack: takes the bytes of a matrix in the file, uint8, the memory for the packed bytes, n and k.
    """

    nbytes: Callable[[int, int], int]
    pack: Callable[[NDArray[np.uint8], Buffer, int, int], None]


class Backend(ABC):
    """One kind of device.

    Attributes:
        name: of its device.
        memory: that its programs work on: weights, states and arenas.
        native_loops: whether it generates many tokens in one call (`Program.repeat`, rounds of drafts) faster than one
            by one.
    """

    name: str
    memory: Memory
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
