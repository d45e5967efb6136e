"""Caches of q8_0 and q4_0: their writers against the `gguf` package's bytes, attention over them against float64."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from attention_case import Case
from forms import Form, call, forms
from levels import LEVELS, name, widest_and_another
from native import aligned
from numpy.typing import NDArray

from rlx.backends.cpu.kernels.cache.kv import kv_write
from rlx.backends.cpu.kernels.rows.rope import rope
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import Q4_0, Q8_0, DType

Array = NDArray[Any]
targets = pytest.mark.parametrize("target", LEVELS, ids=name)
types = pytest.mark.parametrize("dtype", [Q8_0, Q4_0], ids=str)

SEQ, HEADS, CTX, PAST = 5, 3, 48, 14


def encoded(x: Array, dtype: DType) -> Array:
    """Bytes [..., row] of GGUF blocks."""
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(np.ascontiguousarray(x), gguf.GGMLQuantizationType[dtype.name.upper()])


def decoded(raw: Array, dtype: DType) -> Array:
    return gguf.quants.dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType[dtype.name.upper()])


def tiled(raw: Array, dtype: DType) -> Array:
    """GGUF rows [heads, ctx, row] as tiles of keys, element by element as `cache.py` says they lie."""
    heads, ctx, row = raw.shape
    blocks = raw.reshape(heads, ctx // 16, 16, row // dtype.nbytes, dtype.nbytes)
    scales, codes = np.moveaxis(blocks[..., :2], 2, 3), blocks[..., 2:]
    out = np.zeros((heads, ctx // 16, row // dtype.nbytes, 16 * dtype.nbytes), np.uint8)
    out[..., :32] = scales.reshape(*out.shape[:3], 32)
    for element in range(32):
        if dtype is Q8_0:
            at = 32 + 16 * element
            out[..., at : at + 16] = np.moveaxis(codes[..., element], 2, 3)
            continue
        nibbles = (codes[..., element % 16] >> (4 * (element // 16))) & 15
        at = 32 + 64 * (element // 8) + element % 8 // 2
        out[..., at : at + 64 : 4] |= np.moveaxis(nibbles, 2, 3) << (4 * (element % 2))
    return out.reshape(heads, ctx // 16, 16 * row)


class BlockCase(Case):
    """A cache of random blocks whose unwritten positions hold scales of NaN."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: DType, ctx: int, filled: int) -> None:
        rng = np.random.default_rng([heads, head_dim])
        self.shape, self.dtype, self.ctx, self.filled = (heads, kv_heads, head_dim), dtype, ctx, filled
        raw = encoded(rng.standard_normal((2, kv_heads, ctx, head_dim)).astype(np.float32), dtype)
        self.k, self.v = decoded(raw, dtype).astype(np.float64)
        raw[:, :, filled:] = 0xFF
        self.keys, self.values = aligned(tiled(raw[0], dtype)), aligned(raw[1])
        self.q = aligned(rng.standard_normal((filled, heads, head_dim)).astype(np.float32))


# ---------------------------------------------------------------------------------------------------- attention


@types
@pytest.mark.parametrize(
    ("target", "shape"),
    [(t, s) for i, s in enumerate([(8, 2, 64), (3, 3, 96), (2, 1, 256)]) for t in widest_and_another(i)],
    ids=lambda v: name(v) if isinstance(v, Target) else str(v),
)
def test_against_softmax_in_float64(target: Target, dtype: DType, shape: tuple[int, int, int]) -> None:
    case = BlockCase(*shape, dtype, ctx=224, filled=211)
    for past, seq in [(0, 1), (16, 2), (63, 1), (130, 33), (180, 31)]:
        case.check(target, past, seq)
    if target is LEVELS[-1]:
        case.check(target, 200, 1, rows_static=1)


@targets
@types
def test_bits_depend_neither_on_neighbours_nor_on_the_split(target: Target, dtype: DType) -> None:
    case = BlockCase(8, 2, 64, dtype, ctx=112, filled=101)  # the kernels are those of the first shape above
    whole = case.native(target, 0, 101, 0.125)
    for past, seq in [(0, 1), (3, 60), (63, 20), (100, 1)]:
        np.testing.assert_array_equal(case.native(target, past, seq, 0.125), whole[past : past + seq])
    np.testing.assert_array_equal(case.native(target, 100, 1, 0.125, rows_static=1), whole[100:])


# ---------------------------------------------------------------------------------------------------- writers


def hard_rows(head_dim: int) -> Array:
    """Normal and far magnitudes, ties of codes and of the largest element, zeros."""
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((SEQ, HEADS, head_dim)) * np.exp(rng.uniform(-15, 9, (SEQ, HEADS, 1)))
    x[0] = rng.integers(-16, 17, (HEADS, head_dim)) / 2
    x[1, 0, :32], x[1, 1, :32], x[1, 2, :32] = 0.0, -0.0, 1e-42
    x[2, 0, 5], x[2, 0, 9], x[2, 1, 9], x[2, 1, 5] = 1e5, -1e5, 1e5, -1e5
    x[3, 0, :32] = np.arange(32) - 15.5
    x[3, 1, :32] = (np.arange(32) - 16) * (127 / 32)
    return x.astype(np.float32)


def written(cache: Array, dtype: DType, row: int, layout: str) -> Array:
    """All rows [ctx, heads, row] that a cache holds, as GGUF blocks."""
    if layout == "rows":
        return cache.reshape(HEADS, CTX, row).swapaxes(0, 1)
    blocks = cache.reshape(HEADS, CTX // 16, row // dtype.nbytes, 16 * dtype.nbytes)
    out = np.zeros((HEADS, CTX // 16, 16, row // dtype.nbytes, dtype.nbytes), np.uint8)
    for t in range(16):
        out[:, :, t, :, :2] = blocks[..., 2 * t : 2 * t + 2]
        for element in range(32):
            if dtype is Q8_0:
                out[:, :, t, :, 2 + element] = blocks[..., 32 + 16 * element + t]
                continue
            byte = blocks[..., 32 + 64 * (element // 8) + 4 * t + element % 8 // 2]
            nibble = (byte >> (4 * (element % 2))) & 15
            out[:, :, t, :, 2 + element % 16] |= nibble << (4 * (element // 16))
    return out.reshape(HEADS, CTX, row).swapaxes(0, 1)


@forms
@types
@pytest.mark.parametrize("layout", ["rows", "k_tiles"])
def test_written_bytes_are_those_of_gguf(form: Form, dtype: DType, layout: str) -> None:
    x = hard_rows(96)
    row = dtype.row_bytes(96)
    cache = np.full(HEADS * CTX * row, 0x5A, np.uint8)
    call(form, kv_write(HEADS, 96, dtype, layout), x, cache, end=SEQ * HEADS, past=PAST, ctx=CTX)
    rows = written(cache, dtype, row, layout)
    got, want = rows[PAST : PAST + SEQ], encoded(x, dtype)
    values = decoded(want, dtype)
    np.testing.assert_array_equal(decoded(got, dtype), values)
    normal = np.repeat(np.abs(x).reshape(SEQ, HEADS, -1, 32).max(-1) > 1e-30, dtype.nbytes, -1)
    np.testing.assert_array_equal(got[normal], want[normal])  # codes of what rounds to zero do not matter
    untouched = written(np.full_like(cache, 0x5A), dtype, row, layout)
    np.testing.assert_array_equal(np.delete(rows, np.s_[PAST : PAST + SEQ], axis=0), untouched[SEQ:])


@forms
@types
def test_what_is_not_finite_stays_so(form: Form, dtype: DType) -> None:
    x = np.ones((SEQ, HEADS, 64), np.float32)
    x[0, 0, 3], x[1, 1, 40], x[2, 2, 63] = np.nan, np.inf, -np.inf
    cache = np.zeros(HEADS * CTX * dtype.row_bytes(64), np.uint8)
    call(form, kv_write(HEADS, 64, dtype), x, cache, end=SEQ * HEADS, past=PAST, ctx=CTX)
    rows = written(cache, dtype, dtype.row_bytes(64), "rows")[PAST : PAST + SEQ]
    with np.errstate(invalid="ignore"):
        got = decoded(rows, dtype).reshape(SEQ, HEADS, 2, 32)
    bad = ~np.isfinite(x.reshape(got.shape)).all(-1)
    assert np.isnan(got[bad]).all()
    np.testing.assert_allclose(got[~bad], 1, rtol=1e-3)  # a scale of 1/127 is no f16


@forms
@types
@pytest.mark.parametrize("norm_eps", [None, 1e-6])
@pytest.mark.parametrize(("style", "past"), [("neox", PAST), ("interleaved", 45)])
def test_turned_keys_become_the_blocks_of_turned_rows(
    form: Form, dtype: DType, norm_eps: float | None, style: str, past: int
) -> None:
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((SEQ, HEADS, 64)).astype(np.float32), rng.uniform(0.5, 2, 64).astype(np.float32)
    turn = rng.uniform(-3, 3, (SEQ, 24))
    angles = np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
    inputs = [x, angles] if norm_eps is None else [x, w, angles]
    row = dtype.row_bytes(64)
    cache = np.full(HEADS * CTX * row, 0x5A, np.uint8)
    options: dict[str, Any] = {"norm_eps": norm_eps}
    kernel = rope(HEADS, 64, 48, style, store="k_tiles", kv_dtype=dtype, wrap=True, **options)
    call(form, kernel, *inputs, cache, end=SEQ * HEADS, past=past, ctx=CTX)
    turned = np.zeros_like(x)
    call(form, rope(HEADS, 64, 48, style, **options), *inputs, turned, end=SEQ * HEADS)
    rows = written(cache, dtype, row, "k_tiles")
    places = [(past + i) % CTX for i in range(SEQ)]
    if norm_eps is None:  # the same arithmetic on the same numbers
        np.testing.assert_array_equal(rows[places], encoded(turned, dtype))
    step = np.abs(turned).max() / (127 if dtype is Q8_0 else 8)
    np.testing.assert_allclose(decoded(rows[places], dtype), turned, rtol=0, atol=1.01 * step)
    untouched = written(np.full_like(cache, 0x5A), dtype, row, "k_tiles")
    np.testing.assert_array_equal(np.delete(rows, places, axis=0), untouched[SEQ:])
