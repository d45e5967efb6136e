"""Quantize: chooses, per linear, what its activations are, and makes their preparation a node of its own.

Linears over the same input then share one preparation (equal nodes are one node), which fusion can merge with the norm
that feeds it.

| weights | activations with precision "auto" |
|---|---|
| blocks, where the target has tiles of bf16 and a prompt always has enough rows | bf16 |
| integer codes | int8 rows (q8a) |
| bf16, where the graph allows it, the target has dots of bf16 and rows are those of a prompt | bf16 |
| any other | f32 |

Whether rounding to bf16 does harm where weights are as they were trained depends on the model, so a linear says that it
may (its attribute `bf16`, which ends here: from now on the operand's dtype says it). One row, as in decode, waits for
its weights: bf16 activations are no faster there, so it keeps f32. So do the rows of a batch, which get the bits that
each would get alone. f16 weights have three bits more than bf16 and always take f32.

Attention over caches of 16 bits has products of bf16 where the target has dots of bf16 and a prompt always has enough
rows to share what is converted: keys and values lose at most three bits more. Where every linear keeps f32, as with f16
weights, attention does too: it would be the largest error, ten times that of a cache in f16. Two more things say that a
model magnifies such rounding, and keep f32: caches of f32, and scores that are not scaled to the head's size, as in
Gemma 4 (its golden checkpoints fall to cosines of 0.995 and 0.997).

Over blocks bf16 rounds less than the int8 rows that it replaces, so the graph is not asked. Tiles want weights in bf16,
which takes as long as about 16 rows of int8 products; for experts, whose rows must be copied together, as about 32 rows
an expert, which few models have in the usual buckets. Experts in bf16 need no more than 8 to be faster than by dot
products, and gain much with more, so there it counts how many a program may have, not how many it always has.
"""

from __future__ import annotations

from rlx.ir import dims, ops
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import BF16, F16, F32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.options import Options

_MANY_ROWS, _TILE_DEPTH = 16, 32
_BLOCK_ROWS, _BF16_ROWS = 32, 8  # of an expert
_LARGEST_SCALE = 2.0  # of scores, as a multiple of the usual 1 / sqrt(head size)
_WEIGHT = {"linear": 1, "expert_linear": 2}  # number of the weight among an op's operands


def quantize(graph: Graph, options: Options) -> Graph:
    """With precision "auto", linears take the activations of the table above, and attention multiplies bf16."""

    rounds = any(activations(node, options) != "f32" for node in graph.nodes() if node.op in _WEIGHT)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "attention":
            attends = rounds and attends_in_bf16(old, options)
            return ops.make(old.op, *inputs, **{**dict(old.attrs), "bf16": attends})
        if old.op not in _WEIGHT:
            return ops.rebuild(old, inputs)
        out = activations(old, options)
        if out != "f32" and inputs[0].dtype is F32:
            inputs = (ops.quantize(inputs[0], out), *inputs[1:])
        attrs = {**dict(old.attrs), "bf16": False}
        if old.op == "expert_linear":
            attrs["tiles"] = out == "bf16" and experts_in_tiles(old, options)
        return ops.make(old.op, *inputs, **attrs)

    return graph.map(visit)


def attends_in_bf16(node: Node, options: Options) -> bool:
    """Whether the products of an attention are of bf16, as the text above has it."""
    rows, _, width = node.inputs[0].shape
    if not isinstance(width, int) or options.precision == "exact" or not options.bf16_dots:
        return False
    fits = width % _TILE_DEPTH == 0 and node.inputs[1].dtype in (F16, BF16)
    return fits and node["scale"] <= _LARGEST_SCALE / width**0.5 and _many(rows, options)


def _many(rows: DimLike, options: Options) -> bool:
    """Whether there are always enough rows to pay for the conversion of what they share."""
    return not options.sequences and dims.bounds(rows, options.bounds)[0] >= _MANY_ROWS


def experts_in_tiles(node: Node, options: Options) -> bool:
    """Whether tiles of bf16 serve experts, by how many rows one gets on average."""
    x, ids, weight = node.inputs[:3]
    experts, slots = (dims.bounds(size, options.bounds)[1] for size in (weight.shape[0], ids.shape[1]))
    least, most = (rows * slots / experts for rows in dims.bounds(x.shape[0], options.bounds))
    enough = least >= _BLOCK_ROWS if weight.dtype.is_quantized else most >= _BF16_ROWS
    fits = weight.dtype.is_quantized or dims.bounds(x.shape[-1], options.bounds)[0] % _TILE_DEPTH == 0
    return options.bf16_tiles and not options.sequences and fits and enough


def activations(node: Node, options: Options) -> str:
    """What a linear's first operand should be: `f32`, `q8a` or `bf16`."""
    weight, (rows, *_, k) = node.inputs[_WEIGHT[node.op]], node.inputs[0].shape
    if options.precision == "exact":
        return "f32"
    tiles = options.bf16_tiles and _many(rows, options) if node.op == "linear" else experts_in_tiles(node, options)
    if weight.dtype.is_quantized and tiles:
        return "bf16"
    if weight.dtype.has_integer_codes:
        return "q8a"
    in_pairs = isinstance(k, int) and k % 2 == 0
    allowed = node["bf16"] and options.bf16_dots and in_pairs and rows != 1 and not options.sequences
    return "bf16" if allowed and weight.dtype is BF16 else "f32"
