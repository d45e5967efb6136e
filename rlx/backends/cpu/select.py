"""Kernel selection: chooses the kernel for each node, by a table from op to the function that builds the call.

A call names the kernel, the values whose buffers it takes, the run-time extents and the number of work units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from rlx.backends.cpu import segments
from rlx.backends.cpu.kernel import CHUNKS, SCRATCH, Call, Kernel, Units
from rlx.backends.cpu.kernels.attention import attention, bf16
from rlx.backends.cpu.kernels.attention import shape as shape_kernels
from rlx.backends.cpu.kernels.attention import split as split_kernels
from rlx.backends.cpu.kernels.cache import kv
from rlx.backends.cpu.kernels.delta import conv, delta
from rlx.backends.cpu.kernels.experts import experts as experts_kernels
from rlx.backends.cpu.kernels.linear import linear, pick
from rlx.backends.cpu.kernels.rows import (
    copy,
    custom,
    elementwise,
    embedding,
    gather,
    lookup,
    mix,
    norm,
    quantize,
    reduce,
    rope,
    runs,
    softmax,
)
from rlx.backends.cpu.layouts import BLOCK_ROWS
from rlx.backends.cpu.target import Target
from rlx.backends.sizes import rows, static
from rlx.errors import CompileError, CustomOpError
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.segments import is_segmented
from rlx.ir.tracing import Untraceable, meaning_of
from rlx.passes.program import root


def width(node: Node) -> int:
    """Elements of a row: the last axis, which must be static because kernels have it as a literal."""
    return static(node, -1)


def _call(
    node: Node, kernel: Kernel, units: Units, *extents: DimLike, args: Sequence[int] = (), scratch: DimLike = 0
) -> Call:
    return Call(node, kernel, tuple(args) or tuple(range(len(node.inputs) + 1)), extents, units, scratch)


def _embedding(n: Node, target: Target) -> Call:
    table = n.inputs[0]
    if table.op == "pack" and table["layout"] == "file":
        kernel = lookup.lookup(table.dtype, width(n), n["scale"])
        return _call(n, kernel, Units(rows(n), times=lookup.pieces(table.dtype, width(n))))
    return _call(
        n, embedding.embedding(table.dtype, width(n), n["scale"], signed=target.isa.signed_codes), Units(rows(n))
    )


def _linear(n: Node, target: Target) -> Call:
    x, w = n.inputs[:2]
    if len(w.shape) == 3:
        return _linear_of_heads(n, target)
    flags = {name: n[name] for name in ("residual", "bias", "gated", "out")}
    single = rows(n) == 1
    kernel = linear.linear(w.dtype, width(n), width(w), x.dtype.name, target, single=single, **flags)
    act, k, matrices = x.dtype.name, width(w), 2 if n["gated"] else 1
    again = linear.macro_rows(k, act, target)
    count = Units(width(n), BLOCK_ROWS)
    if again is not None:
        count = Units(rows(n), again, linear.units(width(n)), ranges=2 * CHUNKS, few=linear.FEW_IN_TILES)
    count = replace(count, together=linear.together(act, k, width(n), matrices, target, single=single))
    return _call(n, kernel, count, *([] if single else [rows(n)]), width(n))


def _linear_of_heads(n: Node, target: Target) -> Call:
    """Each head by its own matrix: what experts are, if each is chosen once by every row."""
    (x, w), heads = n.inputs, static(n.inputs[1], 0)
    return _experts(n, x, w, target, experts=heads, slots=heads, x_slots=True, each=True)


def _expert_linear(n: Node, target: Target) -> Call:
    x, ids, w = n.inputs[:3]
    options = {"x_slots": len(x.shape) == 3, "gated": n["gated"], "tiles": n["tiles"]}
    return _experts(n, x, w, target, experts=static(w, 0), slots=static(ids, 1), **options)


def _experts(n: Node, x: Node, w: Node, target: Target, **options: Any) -> Call:
    options["single"] = single = n.shape[0] == 1
    kernel = experts_kernels.expert_linear(w.dtype, width(n), width(w), x.dtype.name, target, **options)
    sizes = {name: options[name] for name in ("experts", "slots", "single")}
    count = experts_kernels.units(w.dtype, width(n), width(w), **sizes)
    matrices = 2 if n["gated"] else 1
    together = 1 if single else linear.together(x.dtype.name, width(w), width(n), matrices, target)
    return _call(n, kernel, Units(count, together=together), *([] if single else [n.shape[0]]))


def _kv_write(n: Node, target: Target) -> Call:
    cache, x = n.inputs[:2]
    kernel = kv.kv_write(static(x, 1), width(x), n["dtype"], layout=_cache_layout(cache), wrap=n["wrap"])
    return _write(n, kernel, target)


def _write(n: Node, kernel: Kernel, target: Target) -> Call:
    """The call for a cache write. Its buffers are the operands after the cache, then the result."""
    cache, x = n.inputs[:2]
    last = len(n.inputs) - bool(n["page"])
    call = _call(n, kernel, Units(rows(x)), n["at"], cache.shape[1], args=(*range(1, last), len(n.inputs)))
    if not n["page"]:
        return call

    together = 16 if _cache_layout(cache) == "k_tiles" else 1
    return segments.paged_write(call, static(x, 1), together, target)


def _rope_kv_write(n: Node, target: Target) -> Call:
    cache, x, angles = n.inputs[0], n.inputs[1], n.inputs[-2 if n["page"] else -1]
    if _cache_layout(cache) != "k_tiles":
        raise CompileError("rotated rows go into a key cache only", where=repr(n))
    store = {"store": "k_tiles", "kv_dtype": n["dtype"], "wrap": n["wrap"]}
    kernel = rope.rope(static(x, 1), width(x), width(angles), n["style"], norm_eps=n["norm_eps"], **store)
    return _write(n, kernel, target)


def _as_cache(n: Node, target: Target) -> Call:
    heads, positions = static(n, 0), n.shape[1] - n["room"]
    kernel = kv.as_cache(heads, width(n), n.dtype, _cache_layout(n), n["order"])
    return _call(n, kernel, Units(positions, times=heads), positions, n.shape[1])


def _cache_layout(cache: Node) -> str:
    return {"tiles": "k_tiles", "rows": "rows"}[root(cache)["layout"]]


def _attention(n: Node, target: Target, columns: int = 0) -> Call:
    """The call for attention; of one row with `columns`, those of segments, for a row each of several sequences."""
    q, k = n.inputs[:2]
    shape = (static(q, 1), static(k, 0), width(q))
    options = {
        "kv_dtype": k.dtype,
        **{name: n[name] for name in ("scale", "window", "softcap", "mask", "out", "sinks")},
        "paged": bool(n["page"]),
    }
    options["bias"] = static(n.inputs[3 + n["sinks"]], 1) if n["mask"] == "bias" else None
    options["split"] = split_kernels.split(shape[1], n["window"])
    extents: tuple[DimLike, ...] = (q.shape[0], n["length"] - q.shape[0], k.shape[1])
    if q.shape[0] == 1:  # decode needs no tiles of query rows
        # Tiles need many rows: where there are some, a segment of one row keeps f32, as a decode step does.
        dotted = bf16.DottedRow if n["bf16"] and not target.has_bf16_tiles else None
        together = (
            shape_kernels.joined(*shape[:2]) if n["page"] and n["window"] is None and n["mask"] == "causal" else 1
        )
        columns = columns if options["split"] and together > 1 else 0
        kernel = attention.attention(*shape, target, rows_static=1, writer=dotted, columns=columns, **options)
        extents = (*extents, n.inputs[-1].shape[0]) if columns else extents
        call = _attention_of_a_row(n, kernel, shape, options["split"], extents)
        return replace(call, reads_past=True, joins=together if columns else 1)
    units = Units(q.shape[0], shape_kernels.row_tile(*shape[:2], bf16=n["bf16"]), static(k, 0))
    in_bf16 = bf16.TiledAttention if target.has_bf16_tiles else bf16.DottedAttention
    writer = in_bf16 if n["bf16"] else None
    return _call(n, attention.attention(*shape, target, writer=writer, **options), units, *extents)


def _attention_of_a_row(
    n: Node, kernel: Kernel, shape: tuple[int, int, int], split: split_kernels.Split | None, extents: Sequence[DimLike]
) -> Call:
    """The call for one query row. Units share its positions if there are too few KV heads for all workers."""
    heads, kv_heads, head_dim = shape
    if split is None:
        return _call(n, kernel, Units(kv_heads), *extents)
    busy = kv_heads * split.parts
    units = Units(busy) if split_kernels.few(kv_heads, split) else Units(n["length"], split.least, kv_heads, busy)
    scratch = split_kernels.scratch_bytes(heads // kv_heads, head_dim, split) * busy
    return _call(n, kernel, units, *extents, args=(*range(len(n.inputs)), SCRATCH, len(n.inputs)), scratch=scratch)


def _elementwise(n: Node, target: Target) -> Call:
    full = n.shape
    kind = {full[-1:]: "row", (*full[:-1], 1): "column", (1,): "scalar", full: "full"}
    kinds = [kind[i.shape] for i in n.inputs]
    return _call(n, elementwise.elementwise(n["expr"], kinds, width(n), target, out=n["out"]), Units(rows(n)), rows(n))


def _relabel(n: Node, target: Target) -> Call:
    return _call(n, gather.relabel(), Units(n.shape[0]))


def _mix(n: Node, target: Target) -> Call:
    values, coefficients = n.inputs
    kernel = mix.mix(static(coefficients, 1), static(values, 1), width(n), target)
    return _call(n, kernel, Units(n.shape[0], times=mix.chunks(width(n))))


def _slice(n: Node, target: Target) -> Call:
    outer, inner = _around(n, n["axis"])
    size = static(n.inputs[0], n["axis"])
    kernel = runs.slice_rows(size * inner, n["start"] * inner, n["stop"] * inner, target)
    return _call(n, kernel, Units(n.shape[0], times=outer))


def _concat(n: Node, target: Target) -> Call:
    outer, inner = _around(n, n["axis"])
    kernel = runs.concat_rows([static(i, n["axis"]) * inner for i in n.inputs], target)
    return _call(n, kernel, Units(n.shape[0], times=outer))


def _around(n: Node, axis: int) -> tuple[int, int]:
    """The sizes around an axis: (contiguous runs per index of axis 0, elements per index of the axis)."""
    sizes = [static(n, i) for i in range(1, len(n.shape))]
    return prod(sizes[: axis - 1]), prod(sizes[axis:])


def _linear_pick(n: Node, target: Target) -> Call:
    x, w = n.inputs
    count = static(w, 0)
    inner = linear.linear(w.dtype, count, width(w), x.dtype.name, target, single=True)
    kernel = pick.linear_pick(inner, n["cap"], target)
    return _call(n, kernel, Units(count, BLOCK_ROWS), count, args=(0, 1, SCRATCH, 2), scratch=pick.SCRATCH_BYTES)


def _top_k(n: Node, target: Target) -> Call:
    scratch = rows(n) * (4 * n["k"])  # the k largest values of a row, which the kernel writes and nothing reads
    kernel = reduce.top_k(width(n.inputs[0]), n["k"], n["groups"], n["kept"])
    return _call(n, kernel, Units(rows(n)), args=(0, SCRATCH, 1), scratch=scratch)


def _last_row(n: Node, target: Target) -> Call:
    x = n.inputs[0]
    return _call(n, copy.last_row(prod(d for d in x.shape[1:] if isinstance(d, int))), Units(1), x.shape[0])


def _take_rows(n: Node, target: Target) -> Call:
    return _call(n, copy.take_rows(prod(static(n, axis) for axis in range(1, len(n.shape)))), Units(n.shape[0]))


def _causal_conv(n: Node, target: Target) -> Call:
    kernel = conv.causal_conv(width(n), width(n.inputs[2]), target, aside=n["aside"])
    return _call(n, kernel, Units(width(n), conv.CHANNELS), rows(n))


def _gated_delta(n: Node, target: Target) -> Call:
    state, keys = n.inputs[:2]
    heads, key_dim, value_dim = (static(state, axis) for axis in range(3))
    fixed = 1 if n.shape[0] == 1 and not n["aside"] else None
    shape = (heads, static(keys, 1), key_dim, value_dim)
    options = {"scale": n["scale"], "order": n["heads"], "corrects": n["corrects"], "aside": n["aside"]}
    kernel = delta.gated_delta(*shape, target, rows_static=fixed, **options)
    count = delta.units(heads, key_dim, value_dim)
    return _call(n, kernel, Units(count), *([n.shape[0]] if kernel.extents else []))


def _custom(n: Node, target: Target) -> Call:
    """The kernel of a custom op."""
    op = OPS[n.op].custom
    assert op is not None
    units = op.units(n)
    if units is None:
        raise CompileError("its work units are a product of symbols", where=repr(n), hint="Bind one of them.")
    known = {**dict(n.attrs), **op.sizes(n)}
    if wrong := [name for name in op.constants if not isinstance(known[name], int | float | dims.Dim)]:
        what = f"the attribute {wrong[0]} is {known[wrong[0]]!r}, and a kernel takes numbers only"
        raise CustomOpError(what, where=f"custom op {n.op}")
    constants = tuple((name, None if isinstance(known[name], dims.Dim) else known[name]) for name in op.constants)
    extents = [known[name] for name, value in constants if value is None]
    return _call(n, custom.custom(op, constants), Units(units), *extents)


Build = Callable[[Node, Target], Call]


def _per_row(kernel: Callable[[Node], Kernel], of: int | None = None) -> Build:
    """The call of a kernel whose units are the rows of the result, or of an operand."""
    return lambda n, target: _call(n, kernel(n), Units(rows(n if of is None else n.inputs[of])))


def _rope_angles(n: Node) -> Kernel:
    return rope.rope_angles(width(n) // 2, **{name: n[name] for name in ("scale", "sections", "interleaved")})


def _rope(n: Node) -> Kernel:
    x, angles = n.inputs[0], n.inputs[-1]
    return rope.rope(static(x, 1), width(x), width(angles), n["style"], norm_eps=n["norm_eps"])


def _reduce(n: Node) -> Kernel:
    x, kind = n.inputs[0], n.op.removeprefix("reduce_")
    if n["axis"] == -1:
        return reduce.row_reduce(width(x), kind)
    return reduce.column_reduce(static(x, 1), width(x), kind)


KERNELS: dict[str, Build] = {
    "embedding": _embedding,
    "linear": _linear,
    "expert_linear": _expert_linear,
    "overlay_rows": _per_row(lambda n: gather.overlay_rows(width(n))),
    "rms_norm": _per_row(lambda n: norm.rms_norm(width(n), n["eps"], out=n["out"], weighted=len(n.inputs) > 1)),
    "layer_norm": _per_row(lambda n: norm.layer_norm(width(n), n["eps"], out=n["out"], weights=len(n.inputs) - 1)),
    "quantize": _per_row(lambda n: quantize.quantize(width(n), n["out"])),
    "rope_angles": _per_row(_rope_angles),
    "rope": _per_row(_rope),
    "kv_write": _kv_write,
    "rope_kv_write": _rope_kv_write,
    "as_cache": _as_cache,
    "attention": _attention,
    "elementwise": _elementwise,
    "softmax": _per_row(lambda n: softmax.softmax(width(n))),
    "argmax": _per_row(lambda n: reduce.argmax(width(n.inputs[0])), of=0),
    "pick": _per_row(lambda n: reduce.pick(width(n.inputs[0])), of=0),
    "linear_pick": _linear_pick,
    "top_k": _top_k,
    "last_row": _last_row,
    "take_rows": _take_rows,
    "reduce_mean": _per_row(_reduce),
    "reduce_sum": _per_row(_reduce),
    "take": _per_row(lambda n: gather.take(width(n.inputs[0]), width(n), shared=len(n.inputs[0].shape) == 1)),
    "relabel": _relabel,
    "mix": _mix,
    "slice": _slice,
    "concat": _concat,
    "causal_conv": _causal_conv,
    "gated_delta": _gated_delta,
}


def select(node: Node, target: Target) -> Call:
    """The kernel call for a node; `CompileError` if no kernel supports it."""
    own = OPS[node.op].custom
    build = _custom if own and own.kernel else KERNELS.get(node.op)
    if own and build is None:
        raise _without_kernel(node)
    if build is None:
        raise CompileError(f"no kernel serves {node!r}", hint=f"Ops with kernels: {', '.join(KERNELS)}.")
    if not is_segmented(node):
        return build(node, target)

    if build is _attention:
        build = partial(_attention, columns=static(node.inputs[-1], 1))
    return segments.segmented(node, lambda single: build(single, target), target)


def _without_kernel(node: Node) -> CustomOpError:
    """The error for a custom op that has no kernel, and whose meaning no other ops compute."""
    try:
        meaning_of(node)
        reason = "its meaning was not traced"
    except Untraceable as error:
        reason = f"its meaning cannot be traced: {error}"
    hint = 'Give custom_op a kernel=, use only functions in the meaning that have ops, or choose device="reference".'
    return CustomOpError(f"it has no kernel, and {reason}", where=f"custom op {node.op}", hint=hint)
