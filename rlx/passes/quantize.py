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
from rlx.passes.report import SILENT, Log

_MANY_ROWS, _TILE_DEPTH = 16, 32
_BLOCK_ROWS, _BF16_ROWS = 32, 8  # of an expert
_LARGEST_SCALE = 2.0  # of scores, as a multiple of the usual 1 / sqrt(head size)
_WEIGHT = {"linear": 1, "expert_linear": 2}  # number of the weight among an op's operands


def quantize(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """With precision "auto", linears take the activations of the table above, and attention multiplies bf16."""
    names = graph.names()
    choices = {n: _choice(n, options) for n in graph.nodes() if n.op in _WEIGHT}
    rounds = any(kind != "f32" for kind, _ in choices.values())
    for node, (kind, reason) in choices.items():
        (log.done if kind != "f32" else log.missed)(f"{kind} activations", names[node], reason)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "attention":
            refusal = _keeps_f32(old, options) if rounds else "every linear keeps f32 activations"
            if refusal:
                log.missed("bf16 attention", names[old], refusal)
            else:
                log.done("bf16 attention", names[old], "a 16-bit cache, and always enough rows")
            return ops.make(old.op, *inputs, **{**dict(old.attrs), "bf16": refusal is None})
        if old.op not in _WEIGHT:
            return ops.rebuild(old, inputs)
        out, _ = choices[old]
        if out != "f32" and inputs[0].dtype is F32:
            inputs = (ops.quantize(inputs[0], out), *inputs[1:])
        attrs = {**dict(old.attrs), "bf16": False}
        if old.op == "expert_linear":
            attrs["tiles"] = out == "bf16" and _experts_in_tiles(old, options)
        return ops.make(old.op, *inputs, **attrs)

    return graph.map(visit)


def _keeps_f32(node: Node, options: Options) -> str | None:
    """Why the products of an attention are of f32; None if they are of bf16."""
    rows, _, width = node.inputs[0].shape
    if options.precision == "exact":
        return "precision is exact"
    if not options.bf16_dots:
        return "a program of one row, or no bf16 dot products on the target"
    if not isinstance(width, int) or width % _TILE_DEPTH:
        return f"the head size is no multiple of {_TILE_DEPTH}"
    if node.inputs[1].dtype not in (F16, BF16):
        return f"the cache is {node.inputs[1].dtype}, not f16 or bf16"
    if node["scale"] > _LARGEST_SCALE / width**0.5:
        return "the scores are not scaled to the head size"
    return None if _many(rows, options) else f"a call may have fewer than {_MANY_ROWS} rows"


def _many(rows: DimLike, options: Options) -> bool:
    """Whether there are always enough rows to pay for the conversion of what they share."""
    return not options.sequences and dims.bounds(rows, options.bounds)[0] >= _MANY_ROWS


def _experts_in_tiles(node: Node, options: Options) -> bool:
    """Whether tiles of bf16 serve experts, by how many rows one gets on average."""
    x, ids, weight = node.inputs[:3]
    experts, slots = (dims.bounds(size, options.bounds)[1] for size in (weight.shape[0], ids.shape[1]))
    least, most = (rows * slots / experts for rows in dims.bounds(x.shape[0], options.bounds))
    enough = least >= _BLOCK_ROWS if weight.dtype.is_quantized else most >= _BF16_ROWS
    fits = weight.dtype.is_quantized or dims.bounds(x.shape[-1], options.bounds)[0] % _TILE_DEPTH == 0
    return options.bf16_tiles and not options.sequences and fits and enough


def _choice(node: Node, options: Options) -> tuple[str, str]:
    """What a linear's first operand should be, `f32`, `q8a` or `bf16`, and why."""
    weight, (rows, *_, k) = node.inputs[_WEIGHT[node.op]], node.inputs[0].shape
    if options.precision == "exact":
        return "f32", "precision is exact"
    tiles = options.bf16_tiles and _many(rows, options) if node.op == "linear" else _experts_in_tiles(node, options)
    if weight.dtype.is_quantized and tiles:
        return "bf16", f"{weight.dtype} weights, bf16 tiles and enough rows"
    if weight.dtype.has_integer_codes:
        return "q8a", f"{weight.dtype} weights have integer codes"
    if weight.dtype is not BF16:
        return "f32", f"the weights are {weight.dtype}"
    if rows == 1 or options.sequences:
        return "f32", "bf16 weights are read for one row: bf16 activations are no faster"
    if not node["bf16"]:
        return "f32", "the model does not allow bf16 activations"
    if not options.bf16_dots:
        return "f32", "no bf16 dot products on the target, or turned off"
    return ("bf16", "bf16 weights") if isinstance(k, int) and k % 2 == 0 else ("f32", "an odd number of inputs")
