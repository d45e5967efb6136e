"""The CPU beside a card: its programs of what the card's programs call, and the weights that they read.

The same compiler makes them, and the weights lie as the device "cpu" has them. A program is that of a layer's experts
(`rlx.passes.outline`) for a number of rows; layers with equal experts share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rlx import env
from rlx.backends import Device, backend
from rlx.backends.device import Workers
from rlx.backends.memory import Array, Buffer
from rlx.backends.program import Called, Program
from rlx.compiler.compile import CompiledProgram, Compiler, Progress
from rlx.compiler.tensors import Source, Tensors
from rlx.engine.opening.setup import Setup
from rlx.errors import ArgumentError
from rlx.ir import dims
from rlx.ir.graph import Graph
from rlx.ir.text import body
from rlx.passes.layout import weight_table

if TYPE_CHECKING:
    from rlx.compiler.packed_cache import PackedWeightCache

#: A graph, its smallest and largest number of rows, and whether these belong to several sequences.
Form = tuple[str, int, int, bool]


class Host:
    """Computes the experts of some layers.

    Args:
        graph: the model, in which they are called.
        setup: of the model on the card.
        progress, using: as of `Compiler`.

    Attributes:
        compiler: of its programs.

    Raises:
        ArgumentError: every step is to be verified.
    """

    def __init__(
        self,
        graph: Graph,
        setup: Setup,
        progress: Progress,
        using: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        if env.verify():
            hint = 'Give n_cpu_moe=0, or device="cpu".'
            raise ArgumentError("what two devices compute is not compared", where="RLX_VERIFY", hint=hint)
        device = backend(Device.CPU)
        level = setup.profile.level if setup.profile.level in device.levels() else None
        if env.target() == setup.target.level:  # it is that of the card
            level = level or "native"
        self._setup, self.compiler = setup, Compiler(device.target(level), setup.cache, progress, using)
        self._rows = _rows(graph, self.compiler)
        self._programs: dict[Form, Program] = {}

    @cached_property
    def _workers(self) -> Workers:
        return self.compiler.workers(self._setup.threads)

    @cached_property
    def tensors(self) -> Tensors:
        """The weights."""
        return Tensors(self.compiler, self._workers)

    def load(
        self,
        source: Source,
        progress: Progress | None,
        kept: Callable[[Compiler, Mapping[str, Any]], PackedWeightCache | None],
    ) -> None:
        """Packs the weights; `kept` gives the packed-weight cache, if there is one."""
        self.tensors.load(self._rows, source, progress, kept(self.compiler, self._rows))

    def prepare(self) -> None:
        """Compiles the packers of the weights and the loop of the workers, or finds them in the cache."""
        self.compiler.prepare_packing(self._rows)
        _ = self._workers

    def compile(self, compiled: CompiledProgram) -> None:
        """Compiles what a program of the card calls, or finds it in the cache."""
        for form in dict.fromkeys(_forms(compiled)):
            self._compiled(form)

    def called(self, compiled: CompiledProgram) -> list[Called]:
        """What computes the calls of a program of the card."""
        return [partial(_run, self._program(form)) for form in _forms(compiled)]

    def _program(self, form: Form) -> Program:
        if form not in self._programs:
            self._programs[form] = self._compiled(form).instance(self._workers)
        return self._programs[form]

    def _compiled(self, form: Form) -> CompiledProgram:
        text, low, high, several = form
        options = self._setup.profile.options((low, high), all_rows=True, segments=several and low < high)
        return self.compiler.program(body(text), options)

    def close(self) -> None:
        """Stops the workers, which read the memory of the others, and frees memory."""
        found = (self.__dict__.get(part) for part in ("_workers", "tensors"))
        for each in (*filter(None, found), *self._programs.values()):
            each.close()


def _rows(graph: Graph, made: Compiler) -> dict[str, Any]:
    """The rows of the manifests' table for the weights of calls, as the CPU has them."""
    found, layouts = dict[str, Any](), made.target.capabilities.layouts
    for node in graph.nodes():
        if node.op == "call":
            table = weight_table(body(node["body"]), layouts)
            found |= {each.name: table[f"in{i}"] for i, each in enumerate(node.inputs) if each.op == "weight"}
    return found


def _forms(compiled: CompiledProgram) -> Iterator[Form]:
    """The program of each call."""
    bounds = {name: tuple(limits) for name, limits in compiled.manifest["bounds"].items()}
    for row in compiled.manifest.get("calls", ()):
        low, high = dims.bounds(dims.parse_dim(row["result"]["shape"][0]), bounds)
        yield row["body"], low, high, compiled.options.segments


def _run(program: Program, operands: Sequence[Array], weights: Sequence[Buffer], result: Array) -> None:
    """Computes a call by a program."""
    names = [f"in{i}" for i in range(len(operands) + len(weights))]
    program.bind(dict(zip(names[len(operands) :], weights, strict=True)))
    for name, value in zip(names, operands, strict=False):
        program.inputs[name].reshape(-1)[: value.size] = value.reshape(-1)
    program.run(SEQ=len(result))
    result[...] = program.output("out", SEQ=len(result))
