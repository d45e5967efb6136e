"""The importance of each input of a model's linear layers: sums of squares over a text, for `rlx quantize`.

Runners stage, over an engine whose programs keep every value: a matrix that multiplies large inputs must be rounded
more carefully in those columns. Of y = W x the expected squared error is the sum over the columns of the squared errors
of W times the mean square of x, as far as the inputs are uncorrelated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import models
from rlx.backends.program import Observer, Program
from rlx.backends.reference.formats import Formats
from rlx.compiler.compile import CompiledProgram
from rlx.engine.engine import Engine
from rlx.errors import ArgumentError, PromptError
from rlx.ir import dims
from rlx.ir import text as ir_text
from rlx.ir.node import Node
from rlx.passes import pipeline
from rlx.passes.options import PASSES
from rlx.weights.importance import Floats, Importance, Sums
from rlx.weights.names import file_names

ROWS = 64  # of a step: every value of it stays in memory
WINDOW = 512
#: The profile of an engine whose programs compute each linear layer by itself, from float32 values that stay.
PROFILE: Mapping[str, Any] = {
    "precision": {"mode": "exact"},
    "fusion": {"skip": True},
    "passes": dict.fromkeys(PASSES, False),
    "buckets": {"seq": [1, ROWS]},
}


@dataclass
class _Inputs(Observer):
    """Adds the inputs of the linear layers of one program, after each of its steps.

    Attributes:
        sums: by the name of the weight.
    """

    compiled: CompiledProgram
    sums: Importance
    each_step: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        graph = ir_text.loads(self.compiled.final)
        self._lowered, nodes = pipeline.place(graph, self.compiled.options), graph.nodes()
        calls = [
            (region, nodes[number]) for region, row in enumerate(self.compiled.manifest["regions"]) for number, _ in row
        ]
        self._layers = [(region, node) for region, node in calls if node.op in ("linear", "expert_linear")]

    def after(self, program: Program, seconds: float, steps: int) -> None:
        for region, node in self._layers:
            value = partial(self._value, program, region)
            if node.op == "linear":
                x = value(node.inputs[0]).reshape(-1, int(str(node.inputs[0].shape[-1])))
                self._add(node.inputs[1], np.zeros(len(x), int), x)
            else:
                x, ids = value(node.inputs[0]), value(node.inputs[1])
                x = x if x.ndim == 3 else x[:, None]
                x = np.broadcast_to(x, (*ids.shape, x.shape[-1]))
                self._add(node.inputs[2], ids.reshape(-1), x.reshape(-1, x.shape[-1]))

    def _value(self, program: Program, region: int, node: Node) -> npt.NDArray[Any]:
        shape = tuple(dims.value(size, program.extents) for size in node.shape)
        place = self._lowered.operand(node, region)
        raw = program.memory_of(place, node.dtype.size(shape)).contents()
        return Formats().read(node.dtype, raw, shape)

    def _add(self, weight: Node, matrices: npt.NDArray[Any], x: Floats) -> None:
        leaf = weight.inputs[0] if weight.op == "pack" else weight
        if leaf.name not in self.sums:
            count = int(str(leaf.shape[0])) if len(leaf.shape) == 3 else 1
            self.sums[leaf.name] = Sums(np.zeros((count, x.shape[1])), np.zeros(count))
        found = self.sums[leaf.name]
        for matrix in np.unique(matrices):
            own = x[matrices == matrix]
            found.squares[matrix] += np.square(own).sum(0)
            found.counts[matrix] += len(own)


def importance(
    engine: Engine, ids: Sequence[int], window: int = WINDOW, done: Callable[[int], None] = lambda count: None
) -> Importance:
    """The importance of the inputs of all linear layers, by the GGUF names of their weights.

    Args:
        engine: opened with `PROFILE`; it has computed nothing yet.
        ids: a text. It is cut into whole windows, and the rest is left out.
        window: tokens that the model sees together; the tokenizer's prefix, such as BOS, is in the place of the first.
        done: called with the number of windows that are done, after each.

    Raises:
        PromptError: there are fewer tokens than a window has.
        ArgumentError: the CPU computes experts beside a card.
    """
    if engine.n_cpu_moe:
        what = "the inputs of experts that the CPU computes beside a card are not seen"
        raise ArgumentError(what, where=f"device {engine.device!r}", hint='Choose device="cpu".')
    if len(ids) < window:
        hint = "give a longer one, or smaller windows"
        raise PromptError(f"it has {len(ids)} tokens, and a window {window}", where="text", hint=hint)
    sums: Importance = {}
    engine._programs.observer = lambda compiled: _Inputs(compiled, sums)
    prefix = engine.tokenizer.prefix
    for number in range(len(ids) // window):
        sequence = engine.open_sequence(shared=False)
        row = [*prefix, *ids[number * window + len(prefix) : (number + 1) * window]]
        try:
            for at in range(0, window, ROWS):
                engine.append(sequence, row[at : at + ROWS])
        finally:
            sequence.discard()
        done(number + 1)
    return _in_file(engine, sums)


def _in_file(engine: Engine, sums: Importance) -> Importance:
    """The sums by the names of a GGUF file; those of parts that it has in one tensor are added up."""
    weights, found = engine.weights, Importance()
    sources = {view.name: view.source for view in models.views(engine.config, weights.has)}
    for name, each in sorted(sums.items()):
        stored = file_names(sources.get(name, name), weights.family)[0]
        before = found.get(stored, Sums(np.zeros(1), np.zeros(1)))
        found[stored] = Sums(before.squares + each.squares, before.counts + each.counts)
    return found
