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
from rlx.backends.cpu.kernels.cache.kv import (
    EXTENTS,
    HEAD_DIM,
    HEADS,
    SPREAD,
    STORE,
    cache_dtype,
    cache_holes,
    cache_offset,
)
from rlx.backends.cpu.kernels.cache.kv_blocks import QUANTIZED, put_head
from rlx.backends.cpu.kernels.rows.norm import EPS, norm_factor, weighted_value
from rlx.backends.cpu.kernels.rows.quantize import VALUE, plain
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
#: Holes of `rope` besides those of `kv.py` and `norm.py`: number of rotated elements; strides from one pair to the
#: next, and from a pair's first element to its second.
N_ROT: int = HOLE
STEP: int = HOLE
GAP: int = HOLE
#: `FACTOR(x, src)` of the norm of the head at `src`. `PUT(x, w, angles, out, src, row, head, past, ctx)` rotates it.
FACTOR: Helper = HOLE
PUT: Helper = HOLE
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
        return loop_kernel(_rope_angles, {**holes, "COMPONENTS": 1, "COMPONENT": only_component}, params)
    count = len(sections)
    if interleaved:
        borders = [count * size for size in sections[1:]]
    else:
        borders = list(itertools.accumulate(sections[:-1]))
    borders += [0 if interleaved else half] * (4 - count)
    holes |= dict(zip(("SECOND", "THIRD", "FOURTH"), borders, strict=True))
    holes |= {"COMPONENTS": count, "COMPONENT": in_turns if interleaved else in_sections}
    return loop_kernel(_rope_angles, holes, params)


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
) -> Kernel:
    """x f32[seq, heads, head_dim], [w f32[head_dim],] angles f32[seq, n_rot] -> out. A unit is row * heads + head.

    Args:
        n_rot: number of rotated elements of a head, even.
        style: `interleaved` or `neox`.
        norm_eps: epsilon of an RMS norm with weight w, which is applied to each head first; None for no norm.
        store: `rows`: out is f32[seq, heads, head_dim]. `k_tiles`: out is the K cache of `kv_dtype`, written at
            position past + row; extents past, ctx.
        wrap: positions of the cache are taken modulo ctx.

    Raises:
        ArgumentError: the style or store is unknown, or `kv_dtype` does not fit the store.
        ShapeError: `n_rot` is odd or larger than a head, or the block size of `kv_dtype` does not divide the head.
    """
    if style not in ("interleaved", "neox"):
        raise ArgumentError(f"style must be interleaved or neox, found {style!r}", where="rope")
    if n_rot % 2 or not 0 <= n_rot <= head_dim:
        raise ShapeError(f"n_rot must be even and at most {head_dim}, found {n_rot}", where="rope")
    tiles, normed = _is_tiles(store, kv_dtype), norm_eps is not None
    holes: dict[str, Any] = {"HEADS": heads, "HEAD_DIM": head_dim, "N_ROT": n_rot, "HALF": n_rot // 2}
    holes |= {"STEP": 2, "GAP": 1} if style == "interleaved" else {"STEP": 1, "GAP": n_rot // 2}
    if norm_eps is None:
        holes |= {"VALUE": plain, "FACTOR": no_norm}
    else:
        holes |= {"VALUE": weighted_value, "FACTOR": factor_of_head, "EPS": float(norm_eps)}
    out = cache_dtype(kv_dtype or F32)
    if not tiles or out in QUANTIZED:
        holes |= {"SPREAD": 1, "STORE": keep_f32}
    if tiles:
        holes |= cache_holes(out, head_dim, store, wrap)
    if out in QUANTIZED:
        holes |= {"PUT": put_blocks, "HEAD": stack_memory("f32", head_dim)}
    else:
        holes |= {"PUT": put_tiles if tiles else put_row}
    params = [("x", F32), *([("w", F32)] if normed else []), ("angles", F32), ("out", out)]
    return loop_kernel(_TEMPLATES[tiles, normed], holes, params, EXTENTS if tiles else ())


def _is_tiles(store: str, kv_dtype: str | DType | None) -> bool:
    if store not in ("rows", "k_tiles"):
        raise ArgumentError(f"store must be rows or k_tiles, found {store!r}", where="rope")
    if (kv_dtype is not None) != (store == "k_tiles"):
        raise ArgumentError(f"store={store!r} with kv_dtype={kv_dtype!r}", where="rope", hint="k_tiles needs a dtype")
    return store == "k_tiles"


def only_component(i: int) -> int:
    return 0


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


def _rope_angles(positions: Ptr, inv_freq: Ptr, out: Ptr, begin: int, end: int) -> None:
    for row in range(begin, end):
        for i in range(HALF):
            angle = f32(positions[row * COMPONENTS + COMPONENT(i)]) * inv_freq[i]
            out[row * (2 * HALF) + i] = cos(angle) * f32(SCALE)
            out[row * (2 * HALF) + HALF + i] = sin(angle) * f32(SCALE)


def no_norm(x: Ptr, src: int) -> Scalar:
    return f32(1.0)


def factor_of_head(x: Ptr, src: int) -> Scalar:
    return norm_factor(x, src, HEAD_DIM, EPS, f32(0.0))


def rotate_head(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, src: int, row: int, dst: int) -> None:
    """Rotates one head of a row: elements 0 .. HEAD_DIM - 1 by VALUE, to out[dst ..]."""
    factor = FACTOR(x, src)
    turn = row * N_ROT
    for i in range(HALF):
        c = angles[turn + i]
        s = angles[turn + HALF + i]
        a = VALUE(x, w, w, src, i * STEP, factor, f32(0.0))
        b = VALUE(x, w, w, src, i * STEP + GAP, factor, f32(0.0))
        out[dst + (i * STEP) * SPREAD] = STORE(a * c - b * s)
        out[dst + (i * STEP + GAP) * SPREAD] = STORE(a * s + b * c)
    for i in range(N_ROT, HEAD_DIM):
        out[dst + i * SPREAD] = STORE(VALUE(x, w, w, src, i, factor, f32(0.0)))


def put_row(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, src: int, row: int, head: int, past: int, ctx: int) -> None:
    rotate_head(x, w, angles, out, src, row, src)


def put_tiles(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, src: int, row: int, head: int, past: int, ctx: int) -> None:
    rotate_head(x, w, angles, out, src, row, cache_offset(head, past + row, ctx))


def put_blocks(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, src: int, row: int, head: int, past: int, ctx: int) -> None:
    rotated = HEAD()
    rotate_head(x, w, angles, rotated, src, row, 0)
    put_head(rotated, 0, out, head, past + row, ctx)


def rotate_heads(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    for unit in range(begin, end):
        row = unit // HEADS
        PUT(x, w, angles, out, unit * HEAD_DIM, row, unit - row * HEADS, past, ctx)


def _rope(x: Ptr, angles: Ptr, out: Ptr, begin: int, end: int) -> None:
    rotate_heads(x, x, angles, out, 0, 0, begin, end)


def _rope_norm(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, begin: int, end: int) -> None:
    rotate_heads(x, w, angles, out, 0, 0, begin, end)


def _rope_write(x: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    rotate_heads(x, x, angles, out, past, ctx, begin, end)


def _rope_norm_write(x: Ptr, w: Ptr, angles: Ptr, out: Ptr, past: int, ctx: int, begin: int, end: int) -> None:
    rotate_heads(x, w, angles, out, past, ctx, begin, end)


#: By whether they write to a cache, and whether they norm.
_TEMPLATES: dict[tuple[bool, bool], Helper] = {
    (False, False): _rope,
    (False, True): _rope_norm,
    (True, False): _rope_write,
    (True, True): _rope_norm_write,
}
