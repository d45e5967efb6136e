"""Variants of a model's graph: rows in place of token embeddings, other attention masks, positions of several
components, verification of drafts.

Part of the models stage. Each maps a finished graph to another one, so they work for every family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlx.ir import ops
from rlx.ir.dims import PAST_SEQ, SEQ
from rlx.ir.dtypes import I32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.config import ModelConfig

_OVER_WEIGHTS = ("rms_norm", "layer_norm", "linear")  # their last operand may be a weight
_OF_LAYER = re.compile(r"blk\.([0-9]+)\.")  # the name of a layer's weight
# Ops between two updates of recurrent states that are cheap enough to be computed twice.
_CHEAP = frozenset(["rms_norm", "reshape", *(name for name, row in ops.OPS.items() if row.elementwise)])


@dataclass(frozen=True)
class EmbeddedRows:
    """How a model takes rows that are no embeddings of its tokens, such as those of an image.

    Attributes:
        sections: how many pairs turn by each component of a position, interleaved (M-RoPE); (): positions have one.
        two_way: in which layers rows may see later ones: "none", "all", or "sliding", those with a window.
        deepstack: how many of the first layers add a further part of each row, see `with_rows`.
    """

    sections: tuple[int, ...] = ()
    two_way: str = "none"
    deepstack: int = 0

    @property
    def name(self) -> str:
        """For the names of programs."""
        components = "-components" * bool(self.sections)
        parts = f"-deepstack-{self.deepstack}" * bool(self.deepstack)
        return f"embeds{components}{parts}" + f"-two-way-{self.two_way}" * (self.two_way != "none")

    @staticmethod
    def of(config: ModelConfig) -> EmbeddedRows:
        """Those of a model."""
        return EmbeddedRows(config.rope.sections, config.two_way, config.deepstack)


def with_embedded_rows(graph: Graph, kind: EmbeddedRows) -> Graph:
    """The model with the inputs for embedded rows: `with_rows`, and what it needs of the other two."""
    graph = with_rows(graph, kind.deepstack)
    graph = with_components(graph, kind.sections) if kind.sections else graph
    return graph if kind.two_way == "none" else with_visible(graph, windowed_only=kind.two_way == "sliding")


def with_rows(graph: Graph, deepstack: int = 0) -> Graph:
    """The model whose first layer may get other rows than the embeddings of tokens, such as those of an image.

    It has two more inputs: "rows" f32 [SEQ, hidden], with the embedding's scale applied, and "row_index" i32 [SEQ], the
    row that takes the place of each token's embedding, negative for none. The tokens in these places still need valid
    ids, because they are looked up, also in the embedding tables that layers have of their own.

    Args:
        deepstack: rows are [SEQ, (1 + deepstack) * hidden]; part i + 1 is added after layer i (arXiv 2406.04334).
    """
    entering = inputs_of_layers(graph) if deepstack else {}
    parts = {entering[layer]: layer for layer in range(1, deepstack + 1)}

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        new = ops.rebuild(old, inputs)
        is_table = old.op == "embedding" and old.inputs[0].name == "token_embd.weight"
        if (part := 0 if is_table else parts.get(old)) is None:
            return new
        width = old.shape[1]
        assert isinstance(width, int)
        rows = graph.input("rows", [SEQ, (1 + deepstack) * width])
        own = ops.slice(rows, part * width, (part + 1) * width) if deepstack else rows
        index = graph.input("row_index", [SEQ], I32)
        return new + ops.overlay_rows(ops.clamp(new, 0, 0), own, index) if part else ops.overlay_rows(new, own, index)

    return graph.map(visit)


def inputs_of_layers(graph: Graph) -> dict[int, Node]:
    """Number of each layer -> the value that enters it, f32 [SEQ, hidden]; with several streams the first one.

    It is what the layer's first weight is applied to. The number after the last layer stands for what the last one
    returns, if the graph has the output "hidden".
    """
    found: dict[int, Node] = {}
    for node in graph.nodes():
        if node.op in _OVER_WEIGHTS and (named := _OF_LAYER.match(node.inputs[-1].name)):
            found.setdefault(int(named[1]), node.inputs[0])
    if "hidden" in graph.outputs:
        found[max(found) + 1] = graph.outputs["hidden"].inputs[0]
    return found


@dataclass(frozen=True)
class Features:
    """What a draft head reads of a model: a projection of the values that enter some layers, joined (arXiv 2503.01840).

    Attributes:
        layers: numbers of the layers; the number after the last stands for what the last one returns.
        width: of the projection.
        dtype: of its matrix.
        name: before the names of its weights, "NAME.fc.weight" [width, layers * hidden] and those of norms.
        norms: RMS norms before the projection: "" for none, "whole" for one over the joined values, "NAME.input_norm",
            "each" for one over each of them, "NAME.fc_norm.0" and so on.
        eps: of the norms.
    """

    layers: tuple[int, ...]
    width: int
    dtype: DType
    name: str
    norms: str = ""
    eps: float = 0.0


def with_features(graph: Graph, kind: Features) -> Graph:
    """The model whose output "hidden" f32 [SEQ, kind.width] is what a draft head reads."""
    inputs = inputs_of_layers(graph)
    parts = [inputs[layer] for layer in kind.layers]

    def normed(x: Node, name: str) -> Node:
        return ops.rms_norm(x, graph.weight(f"{kind.name}.{name}.weight", x.shape[-1:]), eps=kind.eps)

    if kind.norms == "each":
        parts = [normed(part, f"fc_norm.{number}") for number, part in enumerate(parts)]
    joined = ops.concat(*parts)
    joined = normed(joined, "input_norm") if kind.norms == "whole" else joined
    weight = graph.weight(f"{kind.name}.fc.weight", [kind.width, joined.shape[-1]], kind.dtype)
    return graph.replace(outputs={**graph.outputs, "hidden": ops.linear(joined, weight)})


@dataclass(frozen=True, eq=False)
class LowRank:
    """The stacks of low-rank changes of a model's linear layers.

    Attributes:
        count: matrices of each stack; number 0 is zero.
        ranks: weight of a linear layer -> the rank of its stacks.
        dtypes: name of a stack -> its type.
    """

    count: int
    ranks: Mapping[str, int]
    dtypes: Mapping[str, DType]


def with_adapters(graph: Graph, kind: LowRank) -> Graph:
    """The model with the input "adapter" i32 [SEQ, 1]: which low-rank change each row gets, 0 for none.

    Linear layers over W [n, k] become x W^T + (x A^T) B^T, with the matrices of the row's number of the stacks
    "W.lora_a" [count, rank, k] and "W.lora_b" [count, n, rank].
    """
    numbers = graph.input("adapter", [SEQ, 1], I32)

    def stack(weight: str, half: str, *shape: int) -> Node:
        name = f"{weight}.lora_{half}"
        return graph.weight(name, [kind.count, *shape], kind.dtypes[name])

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        new = ops.rebuild(old, inputs)
        if old.op != "linear" or (rank := kind.ranks.get(old.inputs[1].name)) is None:
            return new
        (n, k), name = old.inputs[1].shape, old.inputs[1].name
        assert isinstance(n, int) and isinstance(k, int)
        low = ops.expert_linear(inputs[0], numbers, stack(name, "a", rank, k))
        return new + ops.reshape(ops.expert_linear(low, numbers, stack(name, "b", n, rank)), new.shape)

    return graph.map(visit)


def with_bias(graph: Graph, heads: int) -> Graph:
    """The model with the input "bias" f32 [SEQ, heads, PAST_SEQ + SEQ] on the attention of every layer.

    Args:
        heads: 1, for all query heads, or the number of query heads.
    """
    bias = graph.input("bias", [SEQ, heads, PAST_SEQ + SEQ])

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        return ops.rebuild(old, (*inputs, bias), mask="bias") if old.op == "attention" else ops.rebuild(old, inputs)

    return graph.map(visit)


def with_visible(graph: Graph, *, windowed_only: bool = False) -> Graph:
    """The model with the input "visible" i32 [SEQ], the last position that each row sees, in place of causal masks.

    Args:
        windowed_only: whether layers without a window stay causal.
    """
    visible = graph.input("visible", [SEQ], I32)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op != "attention" or (windowed_only and old["window"] is None):
            return ops.rebuild(old, inputs)
        return ops.rebuild(old, (*inputs, visible), mask="visible")

    return graph.map(visit)


def with_components(graph: Graph, sections: tuple[int, ...]) -> Graph:
    """The model whose input "positions" is i32 [SEQ, len(sections)], with interleaved sections: `ops.rope_angles`.

    In a prompt without images all components of a position are equal, and the results are those of the plain model.
    """
    positions = graph.input("positions", [SEQ, len(sections)], I32)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op != "rope_angles":
            return ops.rebuild(old, inputs)
        return ops.rebuild(old, (positions, *inputs[1:]), sections=sections, interleaved=True)

    return graph.map(visit)


def verifying(graph: Graph) -> Graph:
    """The model for verifying drafts, of which some may be rejected: recurrent states are unchanged.

    The states after all tokens are written to states beside them, whose names end in "'". There are additional outputs,
    "saved.0" and so on: the values that `advancing` needs to advance the states by the accepted tokens only.
    """
    saved = {name: node for node, name in _saved_values(graph).items()}
    return graph.replace(outputs={**graph.outputs, **saved}).map(_aside)


def advancing(graph: Graph) -> Graph:
    """Only the updates of a model's recurrent states, for the first SEQ of the rows of `verifying`.

    It writes to the same states beside. The outputs "saved.0" and so on are states here: they persist between calls.
    """
    saved = _saved_values(graph)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        return graph.state(saved[old], old.shape) if old in saved else _aside(old, inputs)

    effects = {node.inputs[0].name: node for node in graph.nodes() if ops.OPS[node.op].effect}
    return graph.replace(outputs=effects).map(visit)


def _aside(node: Node, inputs: tuple[Node, ...]) -> Node:
    """A node over other operands; an update in place is redirected to the state beside."""
    if not ops.OPS[node.op].effect:
        return ops.rebuild(node, inputs)
    state = inputs[0]
    return ops.rebuild(node, (*inputs, ops.leaf("state", f"{state.name}'", state.shape, state.dtype)), aside=True)


def _saved_values(graph: Graph) -> dict[Node, str]:
    """Inputs of the updates of recurrent states, without weights and results of other such updates: value -> name."""
    nodes = graph.nodes()
    again: set[Node] = set()  # computed from the result of an update
    for node in nodes:
        if ops.OPS[node.op].effect or (node.op in _CHEAP and not again.isdisjoint(node.inputs)):
            again.add(node)
    needed = {node for node in nodes if ops.OPS[node.op].effect}
    for node in reversed(nodes):
        if node in needed:
            needed.update(again.intersection(node.inputs))
    read = [i for node in nodes if node in needed for i in node.inputs]
    values = dict.fromkeys(i for i in read if i not in again and i.op not in ("weight", "state"))
    return {node: f"saved.{i}" for i, node in enumerate(values)}
