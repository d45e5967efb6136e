"""Rotary position embedding (arXiv 2104.09864): the table of angles, and the rotation of heads.

An RMS norm of each head can be fused before the rotation.

    (a, b) -> (a cos - b sin, a sin + b cos)     for the pairs (2i, 2i + 1), "interleaved", or (i, i + n/2), "neox"

Elements from n on are not rotated. Rotated keys can be written directly to the K cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.cache.kv import EXTENTS, cache_dtype, cache_holes, cache_offset
from rlx.backends.cpu.kernels.cache.kv_blocks import QUANTIZED, put_head
from rlx.backends.cpu.kernels.rows.norm import rms_factor, weighted_value
from rlx.backends.cpu.kernels.rows.quantize import plain
from rlx.backends.cpu.loops import loop_kernel
from rlx.errors import ArgumentError, ShapeError
from rlx.ir.dtypes import F32, I32, DType
from rlx.scalars import HOLE, Helper, Ptr, Scalar, cos, f32, keep_f32, sin, stack_memory

#: Holes of `rope_angles`: number of pairs, factor of cosines and sines; components of a position, the pairs where the
#: sections of components 1, 2 and 3 begin, or end if they are interleaved, `COMPONENT(i)` of pair i.
HALF: int = HOLE
SCALE: float = HOLE
COMPONENTS: int = HOLE
SECOND: int = HOLE
THIRD: int = HOLE
FOURTH: int = HOLE
COMPONENT: Helper = HOLE
#: Holes of `rope`: number of heads, elements of a head, elements from one row of x to the next, epsilon of the norm.
HEADS: int = HOLE
HEAD_DIM: int = HOLE
X_STRIDE: int = HOLE
EPS: float = HOLE
#: Number of rotated elements; strides from one pair to the next, and from a pair's first element to its second.
N_ROT: int = HOLE
STEP: int = HOLE
GAP: int = HOLE
#: Stride of a head's elements in the output, the conversion to the stored type, the value that is rotated.
SPREAD: int = HOLE
STORE: Helper = HOLE
VALUE: Helper = HOLE
#: Memory for a rotated head, before it is quantized in blocks.
HEAD: Helper = HOLE


def rope_angles(
    half: int, *, scale: float = 1.0, sections: Sequence[int] | None = None, interleaved: bool = False
) -> Kernel:
    """positions i32[seq], inv_freq f32[half] -> f32[seq, 2 * half]: cosines, then sines, of position * inv_freq.

    The product is rounded to f32, as in all reference implementations. `scale` (the attention factor of YaRN) is a
    factor of the cosines and sines. With `sections`, positions are i32[seq, len(sections)], of at most four components,
    and each pair turns by one of them, as `rlx.ir.meaning.component` says. Buffers: positions, inv_freq, out. A unit is
    a row. Calls `cosf` and `sinf` of libm.
    """
    params = [("positions", I32), ("inv_freq", F32), ("out", F32)]
    holes: dict[str, Any] = {"HALF": half, "SCALE": float(scale)}
    if sections is None:
        return loop_kernel(_rope_angles, holes, params)
    count = len(sections)
    if interleaved:
        borders = [count * size for size in sections[1:]]
    else:
        borders = list(itertools.accumulate(sections[:-1]))
    borders += [0 if interleaved else half] * (4 - count)
    holes |= dict(zip(("SECOND", "THIRD", "FOURTH"), borders, strict=True))
    holes |= {"COMPONENTS": count, "COMPONENT": in_turns if interleaved else in_sections}
    return loop_kernel(_rope_angles_of_components, holes, params)


def rope(
    heads: int,
    head_dim: int,
    n_rot: int,
    style: str,
    *,
    norm_eps: float | None = None,
    store: str = "rows",
    kv_dtype: str | DType | None = None,
    wrap: bool = False,
    x_stride: int | None = None,
) -> Kernel:
    """x f32[seq, heads, head_dim], [w f32[head_dim],] angles f32[seq, n_rot] -> out. A unit is row * heads + head.

    Args:
        n_rot: number of rotated elements of a head, even.
        style: `interleaved` or `neox`.
        norm_eps: epsilon of an RMS norm with weight w, which is applied to each head first; None for no norm.
        store: `rows`: out is f32[seq, heads, head_dim]. `k_tiles`: out is the K cache of `kv_dtype`, written at
            position past + row; extents past, ctx.
        wrap: positions of the cache are taken modulo ctx.
        x_stride: elements from one row of x to the next, if x is a slice of wider rows.

    Raises:
        ArgumentError: the style or store is unknown, or `kv_dtype` does not fit the store.
        ShapeError: `n_rot` is odd or larger than a head, or the block size of `kv_dtype` does not divide the head.
    """
    if style not in ("interleaved", "neox"):
        raise ArgumentError(f"style must be interleaved or neox, found {style!r}", where="rope")
    if n_rot % 2 or not 0 <= n_rot <= head_dim:
        raise ShapeError(f"n_rot must be even and at most {head_dim}, found {n_rot}", where="rope")
    tiles, normed = _is_tiles(store, kv_dtype), norm_eps is not None
    holes: dict[str, Any] = {"HEADS": heads, "HEAD_DIM": head_dim, "X_STRIDE": x_stride or heads * head_dim}
    holes |= {"STEP": 2, "GAP": 1} if style == "interleaved" else {"STEP": 1, "GAP": n_rot // 2}
    holes |= {"N_ROT": n_rot, "HALF": n_rot // 2, "VALUE": weighted_value if normed else plain}
    holes |= {"EPS": float(norm_eps)} if norm_eps is not None else {}
    out = cache_dtype(kv_dtype or F32)
    into = "blocks" if out in QUANTIZED else store
    holes |= {} if into == "k_tiles" else {"SPREAD": 1, "STORE": keep_f32}
    holes |= cache_holes(out, head_dim, store, wrap) if tiles else {}
    holes |= {"HEAD": stack_memory("f32", head_dim)} if into == "blocks" else {}
    params = [("x", F32), *([("w", F32)] if normed else []), ("angles", F32), ("out", out)]
    return loop_kernel(_TEMPLATES[into, normed], holes, params, EXTENTS if tiles else ())


def _is_tiles(store: str, kv_dtype: str | DType | None) -> bool:
    if store not in ("rows", "k_tiles"):
        raise ArgumentError(f"store must be rows or k_tiles, found {store!r}", where="rope")
    if (kv_dtype is not None) != (store == "k_tiles"):
        raise ArgumentError(f"store={store!r} with kv_dtype={kv_dtype!r}", where="rope", hint="k_tiles needs a dtype")
    return store == "k_tiles"


def _rope_angles(positions: Ptr, inv_freq: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        position = f32(positions[row])
        for i in range(HALF):
            angle = position * inv_freq[i]
            out[row * (2 * HALF) + i] = cos(angle) * f32(SCALE)
            out[row * (2 * HALF) + HALF + i] = sin(angle) * f32(SCALE)


def in_sections(i: int) -> int:
    """The component whose section pair i lies in."""
    first = 1 if i >= SECOND else 0
    second = 1 if i >= THIRD else 0
    third = 1 if i >= FOURTH else 0
    return first + second + third


def in_turns(i: int) -> int:
    """The component whose turn is at pair i, or 0 if that has had all of its pairs."""
    which = i % COMPONENTS
    border = SECOND if which == 1 else FOURTH
    border = THIRD if which == 2 else border
    return which if i < border else 0


def _rope_angles_of_components(positions: Ptr, inv_freq: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        for i in range(HALF):
            angle = f32(positions[row * COMPONENTS + COMPONENT(i)]) * inv_freq[i]
            out[row * (2 * HALF) + i] = cos(angle) * f32(SCALE)
            out[row * (2 * HALF) + HALF + i] = sin(angle) * f32(SCALE)


def turn_head(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, src: int, turn: int, dst: int, factor: Scalar) -> None:
    """Rotates one head: elements 0 .. HEAD_DIM - 1 by VALUE, angles from `turn` on, to out[dst ..]."""
    for i in range(HALF):
        c = angles[turn + i]
        s = angles[turn + HALF + i]
        a = VALUE(x, w, w, src, i * STEP, factor, f32(0.0))
        b = VALUE(x, w, w, src, i * STEP + GAP, factor, f32(0.0))
        out[dst + (i * STEP) * SPREAD] = STORE(a * c - b * s)
        out[dst + (i * STEP + GAP) * SPREAD] = STORE(a * s + b * c)
    for i in range(N_ROT, HEAD_DIM):
        out[dst + i * SPREAD] = STORE(VALUE(x, w, w, src, i, factor, f32(0.0)))


def _rope(x: Ptr, angles: Ptr, out: Ptr, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        src = row * X_STRIDE + (unit - row * HEADS) * HEAD_DIM
        turn_head(x, x, angles, out, src, row * N_ROT, unit * HEAD_DIM, f32(1.0))


def _rope_norm(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        src = row * X_STRIDE + (unit - row * HEADS) * HEAD_DIM
        turn_head(x, w, angles, out, src, row * N_ROT, unit * HEAD_DIM, rms_factor(x, src, HEAD_DIM, EPS))


def _rope_tiles(x: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        head = unit - row * HEADS
        src = row * X_STRIDE + head * HEAD_DIM
        turn_head(x, x, angles, out, src, row * N_ROT, cache_offset(head, past + row, ctx), f32(1.0))


def _rope_norm_tiles(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        head = unit - row * HEADS
        src = row * X_STRIDE + head * HEAD_DIM
        dst = cache_offset(head, past + row, ctx)
        turn_head(x, w, angles, out, src, row * N_ROT, dst, rms_factor(x, src, HEAD_DIM, EPS))


def _rope_blocks(x: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    turned = HEAD()
    for unit in range(begin, end):
        row = unit // HEADS
        head = unit - row * HEADS
        turn_head(x, x, angles, turned, row * X_STRIDE + head * HEAD_DIM, row * N_ROT, 0, f32(1.0))
        put_head(turned, 0, out, head, past + row, ctx)


def _rope_norm_blocks(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    turned = HEAD()
    for unit in range(begin, end):
        row = unit // HEADS
        head = unit - row * HEADS
        src = row * X_STRIDE + head * HEAD_DIM
        turn_head(x, w, angles, turned, src, row * N_ROT, 0, rms_factor(x, src, HEAD_DIM, EPS))
        put_head(turned, 0, out, head, past + row, ctx)


_TEMPLATES: dict[tuple[str, bool], Helper] = {
    ("rows", False): _rope,
    ("rows", True): _rope_norm,
    ("k_tiles", False): _rope_tiles,
    ("k_tiles", True): _rope_norm_tiles,
    ("blocks", False): _rope_blocks,
    ("blocks", True): _rope_norm_blocks,
}
