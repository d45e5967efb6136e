"""Encoders: every bit of the simple formats, the errors of the K formats, and numbers at the edges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as reference
from numpy.typing import NDArray

from rlx.backends.cpu.loops import kernel_of, python_form
from rlx.backends.cpu.target import Target
from rlx.compiler.compile import Compiler
from rlx.errors import WeightError
from rlx.export import quantizers
from rlx.export.quantizers import ENCODERS, Quantizer, encoder
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType

Floats = NDArray[np.float32]
SIMPLE = [F16, BF16, Q8_0, Q4_0, Q5_0, Q5_1]
K_TYPES = [Q4_K, Q5_K, Q6_K]
WEIGHED = [Q4_0, Q5_0, Q5_1, *K_TYPES]


@pytest.fixture(scope="module")
def quantizer() -> Iterator[Quantizer]:
    with Quantizer(2) as made:
        yield made


def decoded(raw: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """What the `gguf` package reads."""
    if dtype is F16:
        return raw.view(np.float16).reshape(shape).astype(np.float64)
    rows = raw.reshape(*shape[:-1], -1)
    return dequantize(rows, GGMLQuantizationType(dtype.ggml or 0)).astype(np.float64)


def rms(error: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(error))))


def rounded_trip(quantizer: Quantizer, x: Floats, dtype: DType) -> NDArray[np.float64]:
    return decoded(quantizer.encode(x, dtype, "x"), dtype, x.shape)


# ------------------------------------------------------------------------------------------------ simple formats


def corners() -> Floats:
    """Rows of 32 with ties, halves, zeros, one sign, an outlier, and numbers that are subnormal as half floats."""
    x = np.random.default_rng(3).standard_normal((96, 64)).astype(np.float32)
    x[0], x[1], x[2] = 0, 5, -5
    x[3] = np.tile([1.0, -1.0], 32)
    x[4] = np.tile([-1.0, 1.0], 32)
    x[5] = np.arange(64) / 2
    x[6], x[7] = np.abs(x[6]), -np.abs(x[7])
    x[8, 7] = 1000
    x[9:20] *= 1e-6
    x[20:30] *= 1e-3
    x[30:40] *= 400
    x[40] = np.linspace(-127, 127, 64)
    x[41] = (np.arange(64) % 32 - 16) / 16
    return x


@pytest.mark.parametrize("dtype", SIMPLE)
@pytest.mark.parametrize("std", [1e-4, 0.02, 1.0, 10.0])
def test_simple_formats_equal_the_reference_bit_by_bit(quantizer: Quantizer, dtype: DType, std: float) -> None:
    x = (corners() * np.float32(std)).astype(np.float32)
    expected = reference(x, GGMLQuantizationType(dtype.ggml or 0))
    found = quantizer.encode(x, dtype, "x")
    np.testing.assert_array_equal(found, np.ascontiguousarray(expected).view(np.uint8).reshape(-1))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("width", [1, 31, 1025])
def test_float_types_take_rows_of_any_length(quantizer: Quantizer, dtype: DType, width: int) -> None:
    x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    expected = reference(x, GGMLQuantizationType(dtype.ggml or 0))
    np.testing.assert_array_equal(quantizer.encode(x, dtype), np.ascontiguousarray(expected).view(np.uint8).reshape(-1))


def test_halves_round_to_even(quantizer: Quantizer) -> None:
    """Every half float, and what lies next to halfway between two of them."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) * np.float32(0.5)
    near = [halves, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    positive: Floats = np.concatenate(near, dtype=np.float32)
    x = np.concatenate([positive, -positive])
    np.testing.assert_array_equal(quantizer.encode(x, F16).view(np.uint16), x.astype(np.float16).view(np.uint16))


# ------------------------------------------------------------------------------------------------ K formats


def samples() -> dict[str, Floats]:
    g = np.random.default_rng(7)
    shape = (64, 1024)
    normal = g.standard_normal(shape).astype(np.float32)
    laplace = g.laplace(size=shape).astype(np.float32)
    uniform = g.uniform(-1, 1, shape).astype(np.float32)
    small = np.float32(0.02)
    return {
        "normal": normal * small,
        "laplace": laplace * small,
        "uniform": uniform * small,
        "shifted": normal * np.float32(0.01) + np.float32(0.03),
        "negative": -np.abs(laplace) * small,
        "heavy": normal * np.abs(normal) * laplace * small,
    }


# RMS errors of llama.cpp's encoders on these numbers: ggml_quantize_chunk of its 0.3.36 Python release.
PEER = {
    ("normal", Q4_K): 1.4256e-03,
    ("normal", Q5_K): 7.2259e-04,
    ("normal", Q6_K): 3.5490e-04,
    ("laplace", Q4_K): 2.3843e-03,
    ("laplace", Q5_K): 1.2069e-03,
    ("laplace", Q6_K): 6.1077e-04,
    ("uniform", Q4_K): 6.3009e-04,
    ("uniform", Q5_K): 3.1931e-04,
    ("uniform", Q6_K): 1.5576e-04,
    ("shifted", Q4_K): 8.8094e-04,
    ("shifted", Q5_K): 4.3620e-04,
    ("shifted", Q6_K): 3.7984e-04,
    ("negative", Q4_K): 1.4646e-03,
    ("negative", Q5_K): 7.5958e-04,
    ("negative", Q6_K): 6.1055e-04,
    ("heavy", Q4_K): 4.4253e-03,
    ("heavy", Q5_K): 2.4145e-03,
    ("heavy", Q6_K): 1.2671e-03,
}


@pytest.mark.parametrize(("sample", "dtype"), PEER)
def test_k_formats_lose_less_than_the_peer(quantizer: Quantizer, sample: str, dtype: DType) -> None:
    x = samples()[sample]
    assert rms(x - rounded_trip(quantizer, x, dtype)) < PEER[sample, dtype]


def best_scales(x: NDArray[np.float64]) -> float:
    """Squared error with the best of many scales for each 16 numbers, in float64: a bound that Q6_K cannot reach."""
    groups = x.reshape(-1, 1, 16)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)
    inverse = -np.linspace(18, 33, 600)[:, None] / np.where(peak == 0, 1, peak)
    codes = np.clip(np.rint(groups * inverse), -32, 31)
    fit = np.sum(groups * codes, -1) / np.maximum(np.sum(codes * codes, -1), 1)
    return float(np.sum(np.min(np.sum(np.square(groups - fit[..., None] * codes), -1), -1)))


def best_lines(x: NDArray[np.float64], top: int) -> float:
    """The same for 32 numbers on a line with codes 0 to `top`: many steps, and many places of the lowest code."""
    best = np.full(x.size // 32, np.inf)
    groups = x.reshape(-1, 1, 32)
    low, high = np.minimum(groups.min(-1), 0)[..., None], np.maximum(groups.max(-1), 0)[..., None]
    for shift in np.linspace(-0.06, 0.06, 9):
        first = low + shift * (high - low)
        inverse = np.linspace(top - 6, top + 3, 90)[:, None] / np.maximum(high - low, 1e-12)
        codes = np.clip(np.rint((groups - first) * inverse), 0, top)
        mean, middle = groups.mean(-1, keepdims=True), codes.mean(-1, keepdims=True)
        spread = np.maximum(np.sum(np.square(codes - middle), -1), 1e-12)
        step = (np.sum((codes - middle) * (groups - mean), -1) / spread)[..., None]
        best = np.minimum(best, np.sum(np.square(groups - mean - step * (codes - middle)), -1).min(-1))
    return float(best.sum())


@pytest.mark.parametrize(("dtype", "allowed"), [(Q4_K, 1.035), (Q5_K, 1.06), (Q6_K, 1.045)])
@pytest.mark.parametrize("sample", ["normal", "laplace", "uniform"])
def test_k_formats_come_close_to_what_brute_force_finds(
    quantizer: Quantizer, sample: str, dtype: DType, allowed: float
) -> None:
    x = samples()[sample][:8]
    wide = x.astype(np.float64)
    bound = best_scales(wide) if dtype is Q6_K else best_lines(wide, 15 if dtype is Q4_K else 31)
    found = float(np.sum(np.square(wide - rounded_trip(quantizer, x, dtype))))
    assert np.sqrt(found / bound) < allowed


@pytest.mark.parametrize("dtype", K_TYPES)
@pytest.mark.parametrize("outlier", [100.0, -100.0])
def test_an_outlier_spoils_only_its_superblock(quantizer: Quantizer, dtype: DType, outlier: float) -> None:
    x = samples()["normal"][:1, :768].copy()
    plain = rounded_trip(quantizer, x, dtype)
    x[0, 300] = outlier
    found = rounded_trip(quantizer, x, dtype)
    assert found[0, 300] == pytest.approx(outlier, rel=0.01)
    np.testing.assert_array_equal(found[0, :256], plain[0, :256])
    np.testing.assert_array_equal(found[0, 512:], plain[0, 512:])


@pytest.mark.parametrize("dtype", K_TYPES)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-20, 1e-9, 1e-7, 1e-5, 1e3, 1e5, 3e6])
def test_every_magnitude(quantizer: Quantizer, dtype: DType, scale: float) -> None:
    """Never worse than zeros, never infinite; and as good as at 1 where half floats reach."""
    x = samples()["uniform"][:2, :512] / np.float32(0.02) * np.float32(scale)
    found = rounded_trip(quantizer, x, dtype)
    error, size = rms(x - found), rms(x.astype(np.float64))
    assert np.isfinite(found).all()
    assert error <= size * (0.06 if scale >= 1e-5 else 1.0001)


@pytest.mark.parametrize("dtype", K_TYPES)
def test_the_compiled_encoder_does_what_its_text_says(quantizer: Quantizer, dtype: DType) -> None:
    x = samples()["laplace"][0, :256]
    out = np.zeros(dtype.nbytes, np.uint8)
    with np.errstate(over="ignore"):
        python_form(kernel_of(encoder(dtype)))(x, x, out, 0, 1)
    error = rms(x - decoded(out, dtype, (1, 256))[0])
    assert error == pytest.approx(rms(x - rounded_trip(quantizer, x[None], dtype)[0]), rel=0.01)


# ------------------------------------------------------------------------------------------------ by importance


@pytest.mark.parametrize("dtype", WEIGHED)
@pytest.mark.parametrize("kind", ["laplace", "uniform"])
def test_important_columns_get_smaller_errors(quantizer: Quantizer, dtype: DType, kind: str) -> None:
    """Two matrices in a stack, whose columns count from 1 to 100 and the other way round."""
    x = samples()[kind][:32, :512].reshape(2, 16, 512)
    weights = np.geomspace(1, 100, 512, dtype=np.float32)
    weights = np.stack([np.random.default_rng(2).permutation(weights), weights])

    def error(raw: NDArray[np.uint8]) -> float:
        return rms((x - decoded(raw, dtype, x.shape)) * np.sqrt(weights)[:, None])

    plain, weighed = (error(quantizer.encode(x, dtype, "x", given)) for given in (None, weights))
    assert weighed < 0.97 * plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizers, "SLICE", 3 * 256)  # slices that begin within a row
        np.testing.assert_array_equal(
            np.concatenate([*quantizer.pieces(x, dtype, "x", weights)]), quantizer.encode(x, dtype, "x", weights)
        )


@pytest.mark.parametrize("dtype", ENCODERS)
def test_equal_importance_is_none(quantizer: Quantizer, dtype: DType) -> None:
    x = samples()["laplace"][:, :512]
    same = np.full((1, 512), 3, np.float32)
    plain, weighed = (quantizer.encode(x, dtype, "x", given) for given in (None, same))
    if dtype in WEIGHED:
        error, other = (rms(x - decoded(raw, dtype, x.shape)) for raw in (plain, weighed))
        assert other < error * (1.001 if dtype in K_TYPES else 1)
    else:
        np.testing.assert_array_equal(plain, weighed)


# ------------------------------------------------------------------------------------------------ all formats


@pytest.mark.parametrize("dtype", ENCODERS)
def test_workers_and_slices_change_nothing(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = samples()["laplace"][:, :512]
    with Quantizer(1) as one, Quantizer(3) as three:
        whole = one.encode(x, dtype)
        monkeypatch.setattr(quantizers, "SLICE", 5 * 1024)
        pieces = list(three.pieces(x, dtype, "x"))
    assert len(pieces) == 7
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("dtype", [F32, *ENCODERS])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused_by_name(quantizer: Quantizer, dtype: DType, bad: float) -> None:
    x = np.ones((3, 256), np.float32)
    x[2, 200] = bad
    with pytest.raises(WeightError, match=f"blk.7.ffn_up.weight: the tensor holds {bad}"):
        quantizer.encode(x, dtype, "blk.7.ffn_up.weight")


@pytest.mark.parametrize("dtype", ENCODERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_greatest_numbers(quantizer: Quantizer, dtype: DType, sign: int) -> None:
    """The limit itself can be encoded; what is beyond is refused, because its scale would be infinite."""
    limit = ENCODERS[dtype].limit
    x = np.linspace(-0.5, 0.5, 256, dtype=np.float32)[None] * np.float32(0.99 * limit)
    x[0, 3] = np.float32(sign * limit)
    found = rounded_trip(quantizer, x, dtype)
    assert np.isfinite(found).all()
    assert found[0, 3] == pytest.approx(sign * limit, rel=0.2)
    x[0, 3] = np.float32(sign * limit * 1.002)
    with pytest.raises(WeightError, match=f"{dtype} ends at .* Choose BF16 or F32"):
        quantizer.encode(x, dtype, "x")


@pytest.mark.parametrize("dtype", [Q4_0, Q8_0, Q4_K, Q6_K])
def test_code_for_other_machines_does_the_same(dtype: DType) -> None:
    """The baseline has neither fused multiplication nor rounding instructions."""
    x = samples()["laplace"][:16]
    with Quantizer(1) as here, Quantizer(1) as other:
        other.compiler = Compiler(Target.host("generic"), other.compiler.cache)
        a, b = here.encode(x, dtype), other.encode(x, dtype)
    if dtype in SIMPLE:
        np.testing.assert_array_equal(a, b)
    errors = [rms(x - decoded(raw, dtype, x.shape)) for raw in (a, b)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
