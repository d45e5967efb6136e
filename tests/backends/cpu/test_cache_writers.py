"""What writes rows into caches, as Python and as machine code, against the rounding of NumPy and the gguf package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from forms import Form, assert_any_split, call, compiled, forms
from native import Array

from rlx.backends.cpu.kernels.cache.kv import kv_write
from rlx.backends.cpu.kernels.rows.rope import rope

#: Error of a turned head that was normed before.
NORM_REL = 2e-6

SEQ, HEADS, CTX, PAST = 5, 3, 48, 14
STORED: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def data(head_dim: int, n_rot: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(head_dim + n_rot)
    x = rng.standard_normal((SEQ, HEADS, head_dim)).astype(np.float32)
    turn = rng.uniform(-3, 3, (SEQ, n_rot // 2))
    angles = np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
    return x, rng.standard_normal(head_dim).astype(np.float32), angles


def stored(x: Array, dtype: str) -> Array:
    """f32 values in the cache's type, rounded by NumPy or the gguf package."""
    if dtype == "bf16":
        return gguf.quants.quantize(np.ascontiguousarray(x), gguf.GGMLQuantizationType.BF16).view(np.uint16)
    with np.errstate(over="ignore"):
        return x.astype(STORED[dtype])


def values(cache: Array) -> Array:
    if cache.dtype != np.uint16:
        return cache.astype(np.float32)
    wide: Array = cache.astype(np.uint32) << 16
    return wide.view(np.float32)


def rows_of(cache: Array, head_dim: int, layout: str) -> Array:
    """A cache as [ctx, heads, head_dim]."""
    if layout == "rows":
        return cache.reshape(HEADS, CTX, head_dim).swapaxes(0, 1)
    tiles = cache.reshape(HEADS, CTX // 16, head_dim, 16)
    return tiles.transpose(1, 3, 0, 2).reshape(CTX, HEADS, head_dim)


@forms
@pytest.mark.parametrize("norm_eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_rope_into_the_cache(form: Form, dtype: str, norm_eps: float | None) -> None:
    """Written rows are the rounded turned heads; every other byte of the cache stays."""
    x, w, angles = data(16, 12)
    cache = np.full(HEADS * CTX * 16, 0x1234, STORED[dtype])
    kernel = rope(HEADS, 16, 12, "neox", norm_eps=norm_eps, store="k_tiles", kv_dtype=dtype)
    inputs = [x, angles] if norm_eps is None else [x, w, angles]
    call(form, kernel, *inputs, cache, end=SEQ * HEADS, past=PAST, ctx=CTX)
    turned = np.zeros_like(x)
    call(form, rope(HEADS, 16, 12, "neox", norm_eps=norm_eps), *inputs, turned, end=SEQ * HEADS)
    rows = rows_of(cache, 16, "k_tiles")
    if norm_eps is None:  # the same arithmetic on the same numbers
        np.testing.assert_array_equal(rows[PAST : PAST + SEQ], stored(turned, dtype))
    tolerance = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype] + NORM_REL
    np.testing.assert_allclose(values(rows[PAST : PAST + SEQ]), turned, rtol=tolerance, atol=1e-7)
    untouched = np.delete(rows, np.s_[PAST : PAST + SEQ], axis=0)
    assert (untouched == np.array(0x1234, STORED[dtype])).all()


@forms
@pytest.mark.parametrize("layout", ["rows", "k_tiles"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_kv_write(form: Form, dtype: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((SEQ, HEADS, 24)) * np.exp(rng.uniform(-20, 12, (SEQ, HEADS, 24)))).astype(np.float32)
    x[0, 0, :4] = [np.inf, -np.inf, np.nan, -0.0]
    cache = np.full(HEADS * CTX * 24, 0x1234, STORED[dtype])
    call(form, kv_write(HEADS, 24, dtype, layout), x, cache, end=SEQ * HEADS, past=PAST, ctx=CTX)
    rows = rows_of(cache, 24, layout)
    written, wanted = rows[PAST : PAST + SEQ].copy(), stored(x, dtype)
    assert np.isnan(values(written[:1, :1, 2:3])).all()
    written[0, 0, 2] = wanted[0, 0, 2] = 0
    np.testing.assert_array_equal(written, wanted)
    untouched = np.delete(rows, np.s_[PAST : PAST + SEQ], axis=0)
    assert (untouched == np.array(0x1234, STORED[dtype])).all()


@forms
@pytest.mark.parametrize("into", ["rows", "k_tiles", "rope"])
@pytest.mark.parametrize("past", [0, 43, 45, 48, 1_000_003])
def test_a_cache_that_wraps(form: Form, into: str, past: int) -> None:
    """Position p lies at p modulo the capacity; every other byte stays."""
    x, _, angles = data(16, 16)
    cache = np.full(HEADS * CTX * 16, 0x1234, np.float16)
    if into == "rope":
        kernel = rope(HEADS, 16, 16, "neox", store="k_tiles", kv_dtype="f16", wrap=True)
        call(form, kernel, x, angles, cache, end=SEQ * HEADS, past=past, ctx=CTX)
        turned = np.zeros_like(x)
        call(form, rope(HEADS, 16, 16, "neox"), x, angles, turned, end=SEQ * HEADS)
    else:
        call(form, kv_write(HEADS, 16, "f16", into, wrap=True), x, cache, end=SEQ * HEADS, past=past, ctx=CTX)
        turned = x
    rows = rows_of(cache, 16, "rows" if into == "rows" else "k_tiles")
    places = [(past + i) % CTX for i in range(SEQ)]
    np.testing.assert_array_equal(rows[places], turned.astype(np.float16))
    assert (np.delete(rows, places, axis=0) == np.float16(0x1234)).all()


@compiled
def test_writers_units_are_independent(form: Form) -> None:
    x, w, angles = data(16, 16)
    end, extents = SEQ * HEADS, {"past": 0, "ctx": CTX}
    out, cache = np.zeros_like(x), np.zeros(HEADS * CTX * 16, np.uint16)
    assert_any_split(form, rope(HEADS, 16, 16, "neox", norm_eps=1e-6), [x, w, angles], out, end=end)
    tiles = rope(HEADS, 16, 16, "interleaved", norm_eps=1e-6, store="k_tiles", kv_dtype="f16")
    assert_any_split(form, tiles, [x, w, angles], cache, end=end, **extents)
    assert_any_split(form, kv_write(HEADS, 16, "bf16"), [x], cache, end=end, **extents)
