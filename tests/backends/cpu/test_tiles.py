"""The tile vocabulary: int8 dot products on every kind of target, 16-bit floats, masks, loops and reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from levels import DOT_TARGETS, LEVELS, name
from native import run

from rlx.backends.cpu import dots
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import I8X64, I32X16, Emitter
from rlx.ir.dtypes import BF16, F16, F32

targets = pytest.mark.parametrize("target", LEVELS, ids=name)
dot_targets = pytest.mark.parametrize("target", DOT_TARGETS, ids=name)


def dot_kernel(target: Target, bits: int, count: int) -> Kernel:
    """out i32[16] += sums over `count` steps of codes [count, 64] times x i8[count, 64]."""
    e = Emitter(target, ["codes", "x", "out"], [])
    acc = e.load(I32X16, e.args["out"])
    width = dots.span(target, bits)
    for first in range(0, count, width):
        steps = range(first, min(first + width, count))
        codes = [e.load(I8X64, e.at(e.args["codes"], 64 * i)) for i in steps]
        acc = dots.dot_u8s8(e, acc, codes, [e.load(I8X64, e.at(e.args["x"], 64 * i)) for i in steps], bits)
    e.store(acc, e.args["out"])
    return e.finish("dot", "")


@dot_targets
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("extreme", [False, True])
def test_dots_are_exact_to_the_last_extreme(target: Target, bits: int, extreme: bool) -> None:
    rng, count = np.random.default_rng(bits), 11
    signed = bits == 8 and target.isa.signed_codes
    least, most = (-128, 127) if signed else (0, 2**bits - 1)
    codes = rng.integers(least, most, (count, 64), dtype=np.int8 if signed else np.uint8, endpoint=True)
    x = rng.integers(-127, 128, (count, 64), dtype=np.int8)
    if extreme:  # what saturates i16 where it could: both neighbours at their largest
        codes[:] = rng.choice([least, most], (count, 1))
        x[:] = rng.choice([-127, 127], (count, 1))
    start = rng.integers(-1000, 1000, 16, dtype=np.int32)
    got = start.copy()
    run(dot_kernel(target, bits, count), target, codes, x, got, end=1)
    products = codes.astype(np.int64) * x
    np.testing.assert_array_equal(got, start + products.reshape(count, 16, 4).sum(axis=(0, 2)))


def magnitudes_kernel(target: Target) -> Kernel:
    """The same for codes of 8 bits whose magnitudes and signs are stored apart."""
    e = Emitter(target, ["codes", "x", "out"], [])
    codes = [e.load(I8X64, e.at(e.args["codes"], 64 * i)) for i in range(8)]
    sizes, signs, start = dots.magnitudes(e, codes)
    acc = e.b.add(e.load(I32X16, e.args["out"]), start)
    for i in range(8):
        x = e.load(I8X64, e.at(e.args["x"], 64 * i))
        acc = dots.dot_tile(e, [acc], [i], 1, lambda i, _: sizes[i], lambda *_, x=x: x, sign=lambda i, _: signs[i])[0]
    e.store(acc, e.args["out"])
    return e.finish("dot", "")


@pytest.mark.parametrize("target", [t for t in DOT_TARGETS if t.isa.moves_signs], ids=name)
@pytest.mark.parametrize("extreme", [False, True])
def test_magnitudes_and_signs_are_exact_too(target: Target, extreme: bool) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (8, 64), dtype=np.int8)
    x = rng.integers(-127, 128, (8, 64), dtype=np.int8)
    if extreme:  # -128 times 127 in both products of a pair is the least sum that i16 holds
        codes[:] = rng.choice([-128, -127, 127], (8, 1))
        x[:] = rng.choice([-127, 127], (8, 1))
    start = rng.integers(-1000, 1000, 16, dtype=np.int32)
    got = start.copy()
    run(magnitudes_kernel(target), target, codes, x, got, end=1)
    products = codes.astype(np.int64) * x
    np.testing.assert_array_equal(got, start + products.reshape(8, 16, 4).sum(axis=(0, 2)))


def convert_kernel(target: Target, dtype: Any, to_f32: bool, count: int) -> Kernel:
    e = Emitter(target, ["x", "out"], [])
    size = 4 if dtype is F32 else 2
    with e.loop(0, count, 16) as loop:
        x, out = (
            e.at(e.args["x"], (loop.i, size if to_f32 else 4)),
            e.at(e.args["out"], (loop.i, 4 if to_f32 else size)),
        )
        e.store_from_f32(F32 if to_f32 else dtype, e.load_as_f32(dtype if to_f32 else F32, x), out)
    return e.finish("convert", "")


@targets
def test_every_f16_and_bf16_is_read_exactly(target: Target) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    got = np.empty(bits.size, np.float32)
    run(convert_kernel(target, F16, True, bits.size), target, bits, got, end=1)
    want = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(got[finite].view(np.uint32), want[finite].view(np.uint32))
    run(convert_kernel(target, BF16, True, bits.size), target, bits, got, end=1)
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


@targets
def test_f32_is_rounded_to_f16_and_bf16_as_ieee_says(target: Target) -> None:
    rng = np.random.default_rng(1)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = halves[np.isfinite(halves)].astype(np.float64)
    between = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)  # every tie
    tiny = rng.standard_normal(1000).astype(np.float32) * np.float32(1e-6)
    x = np.concatenate([finite, between, np.nextafter(between, np.float32(np.inf)), tiny])
    x = np.concatenate([x, [65519.0, 65520.0, 1e30, -1e30, np.inf, -np.inf, np.nan, 2.0**-25, 2.0**-24]])
    x = np.resize(x.astype(np.float32), (x.size + 15) // 16 * 16)
    got = np.empty(x.size, np.uint16)
    run(convert_kernel(target, F16, False, x.size), target, x, got, end=1)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.view(np.float16), x.astype(np.float16))
    bits = np.concatenate(
        [rng.integers(0, 2**32, 4096, dtype=np.uint32), np.arange(0x3F7F0000, 0x3F810000, 16, dtype=np.uint32)]
    )
    y = bits.view(np.float32)
    run(convert_kernel(target, BF16, False, y.size), target, y, got := np.empty(y.size, np.uint16), end=1)
    nan = np.isnan(y)
    want = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan((got[nan].astype(np.uint32) << 16).view(np.float32)).all()


@targets
def test_loops_carry_values_and_reductions_reach_every_lane(target: Target) -> None:
    e = Emitter(target, ["x", "out"], ["n"])
    with e.loop(0, e.args["n"], 3, [e.f32(0), e.f32(-1e30)]) as loop:
        x = e.load_as_f32(F32, e.at(e.args["x"], (loop.i, 64)))
        loop.values = [e.b.fadd(loop.values[0], x), e.max(loop.values[1], x)]
    e.store(e.reduce_add(loop.results[0]), e.args["out"])
    e.store(e.reduce_max(loop.results[1]), e.at(e.args["out"], 64))
    with e.when(e.b.icmp_signed(">", loop.i, e.i64(8))):
        e.store(e.f32(5), e.at(e.args["out"], 128))
    kernel = e.finish("loops", "")
    x = np.arange(10 * 16, dtype=np.float32).reshape(10, 16)
    for n in (0, 1, 7, 10):
        out = np.zeros((3, 16), np.float32)
        run(kernel, target, x, out, n=n, end=1)
        taken = x[0:n:3]
        assert (out[0] == taken.sum()).all()
        assert (out[1] == (taken.max() if n else -1e30)).all()
        assert (out[2] == (5 if n > 6 else 0)).all()
