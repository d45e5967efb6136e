"""Quantize: chooses the dtype of each linear's activations, and makes their quantization a node.

Linears over the same input share this node, because equal nodes are one node. Fusion can join it with the norm before.

| weights | activations with precision "auto" |
|---|---|
| quantized, if the target has bf16 tiles and a call always has enough rows, and not `deterministic` | bf16 |
| with integer codes | int8 rows (q8a) |
| bf16 and f16, if the model allows it and the target has bf16 dot products | bf16; with tiles f32 for one row |
| any other | f32 |

**The number of rows.** On a target without bf16 tiles the choice never depends on it. So a row has the same bits in a
prompt, in a decode step, as a draft and in a batch. Tiles add their products in another order than the program of one
row, and over quantized weights need some rows to pay. So on a target with tiles the choice depends on the number of
rows, unless the option `deterministic` forbids it. Then quantized weights take int8 rows and attention f32, whatever
the number of rows.

**bf16 and f16 weights.** Whether rounding their activations to bf16 does harm depends on the model, so the model says
for each linear if it is allowed (the attribute `bf16`; this pass removes it, and the operand's dtype says what was
chosen). f16 weights are rounded to bf16 where they are multiplied, and lose three bits unless they were made from bf16:
only vision towers allow it.

**Attention** multiplies bf16 over 16-bit caches, and over plain keys and values, if the target has bf16 dot products.
Keys and values in caches then lose at most three bits. Attention keeps f32 if every linear does, as with f32 weights,
because it would be the largest error, ten times that of an f16 cache. It also keeps f32 in models that magnify such
rounding: those with f32 caches, and those whose scores are not scaled to the head size, such as Gemma 4 (whose golden
checkpoints fall to cosines of 0.995 and 0.997), unless the model says that it does no harm (the attribute `any_scale`,
which this pass removes, too). In the towers of Gemma 4 it adds a tenth to the rounding of the linears.

**Quantized weights.** bf16 rounds less than the int8 rows that it replaces, so the model is not asked. Tiles need
weights in bf16. Unpacking them takes as long as about 12 rows of int8 products. The rows of an expert must also be
gathered, which takes as long as about 32 rows per expert. Few models reach that in the usual buckets. bf16 experts are
faster in tiles from 8 rows on, and gain much with more rows, so for them the largest number of rows counts.
"""

from __future__ import annotations

from rlx.ir import dims, ops
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import BF16, F16, F32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.capabilities import Capabilities
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log

_LARGEST_SCALE = 2.0  # of scores, as a multiple of the usual 1 / sqrt(head size)
_WEIGHT = {"linear": 1, "expert_linear": 2}  # number of the weight among an op's operands


def quantize(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """With precision "auto", linears take the activations of the table above, and attention multiplies bf16."""
    names = graph.names()
    choices = {n: _choice(n, options) for n in graph.nodes() if n.op in _WEIGHT}
    rounds = any(kind != "f32" for kind, _ in choices.values())
    for node, (kind, reason) in choices.items():
        if kind == "f32":
            log.missed("rounded activations", names[node], reason)
        else:
            log.done(f"{kind} activations", names[node], reason)

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if old.op == "attention":
            refusal = _keeps_f32(old, options) if rounds else "every linear keeps f32 activations"
            if refusal:
                log.missed("bf16 attention", names[old], refusal)
            else:
                keys = "plain keys" if old.inputs[1].op == "as_cache" else "a 16-bit cache"
                log.done("bf16 attention", names[old], keys)
                inputs = (inputs[0], *(_in_bf16(cache) for cache in inputs[1:3]), *inputs[3:])
            return ops.make(old.op, *inputs, **{**dict(old.attrs), "bf16": refusal is None, "any_scale": False})
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


def _in_bf16(cache: Node) -> Node:
    """Keys or values for products of bf16: plain ones are rounded where they get the form of a cache."""
    return ops.rebuild(cache, cache.inputs, dtype="bf16") if cache.op == "as_cache" else cache


def _keeps_f32(node: Node, options: Options) -> str | None:
    """Why the products of an attention are of f32; None if they are of bf16."""
    rows, _, width = node.inputs[0].shape
    if options.precision == "exact":
        return "precision is exact"
    if not options.bf16_dots:
        return "no bf16 dot products on the target, or turned off"
    if options.deterministic and options.capabilities.bf16_tiles:
        return "deterministic: tiles add in another order than a program of one row"
    if not isinstance(width, int) or not multiplies_bf16(width, options.capabilities):
        return f"the head size is odd or below {options.capabilities.bf16_depth}"
    if node.inputs[1].op != "as_cache" and node.inputs[1].dtype not in (F16, BF16):
        return f"the cache is {node.inputs[1].dtype}, not f16 or bf16"
    if node["scale"] > _LARGEST_SCALE / width**0.5 and not node["any_scale"]:
        return "the scores are not scaled to the head size"
    many = options.deterministic or _many(rows, options)
    return None if many else f"a call may have fewer than {options.capabilities.bf16_rows} rows"


def multiplies_bf16(width: int, has: Capabilities) -> bool:
    """Whether attention can multiply heads of `width` elements in bf16."""
    return has.bf16_dots and width >= has.bf16_depth and width % 2 == 0


def _many(rows: DimLike, options: Options) -> bool:
    """Whether there are always enough rows to pay for the conversion of what they share.

    The rows that get logits count as all rows of a call: of a step that only decodes they are as many.
    """
    return dims.bounds(dims.SEQ if rows == dims.OUTS else rows, options.bounds)[0] >= options.capabilities.bf16_rows


def _experts_in_tiles(node: Node, options: Options) -> bool:
    """Whether tiles of bf16 serve experts, by how many rows one gets on average."""
    x, ids, weight = node.inputs[:3]
    experts, slots = (dims.bounds(size, options.bounds)[1] for size in (weight.shape[0], ids.shape[1]))
    least, most = (rows * slots / experts for rows in dims.bounds(x.shape[0], options.bounds))
    has = options.capabilities
    enough = least >= has.expert_rows if weight.dtype.is_quantized else most >= has.expert_rows_bf16
    fits = weight.dtype.is_quantized or dims.bounds(x.shape[-1], options.bounds)[0] % has.bf16_depth == 0
    return options.bf16_tiles and not options.decodes and fits and enough


def _choice(node: Node, options: Options) -> tuple[str, str]:
    """The type that a linear's first operand should have, `f32`, `q8a` or `bf16`, and why."""
    weight, (rows, *_, k) = node.inputs[_WEIGHT[node.op]], node.inputs[0].shape
    if options.precision == "exact":
        return "f32", "precision is exact"
    plain = node.op == "linear" and len(weight.shape) == 2  # heads have no tiles
    tiles = (plain and options.bf16_tiles and _many(rows, options)) or (
        node.op == "expert_linear" and _experts_in_tiles(node, options)
    )
    if weight.dtype.is_quantized and tiles:
        return "bf16", f"{weight.dtype} weights, bf16 tiles and enough rows"
    if weight.dtype.has_integer_codes:
        return "q8a", f"{weight.dtype} weights have integer codes"
    if weight.dtype not in (BF16, F16):
        return "f32", f"the weights are {weight.dtype}"
    if (rows == 1 or (options.decodes and not plain)) and not options.deterministic:
        few = "one row" if rows == 1 else "few rows without tiles"
        return "f32", f"{weight.dtype} weights are read for {few}: bf16 activations are no faster"
    if not node["bf16"]:
        return "f32", "the model does not allow bf16 activations"
    if not options.bf16_dots:
        return "f32", "no bf16 dot products on the target, or turned off"
    even = isinstance(k, int) and k % 2 == 0
    return ("bf16", f"{weight.dtype} weights") if even else ("f32", "an odd number of inputs")
