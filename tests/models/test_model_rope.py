"""Rope frequencies against closed formulas in float64, evaluated one frequency at a time."""

from __future__ import annotations

from math import pi
from pathlib import Path

import numpy as np
import pytest
from golden_files import Tensor, Tensors, read_gguf
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import WeightError
from rlx.ir.dtypes import F32
from rlx.models import build, from_gguf
from rlx.models.rope import Llama3, Rope, inv_freq


def plain(base: float, dims: int) -> np.ndarray:
    return np.array([base ** (-2 * i / dims) for i in range(dims // 2)])


@given(st.floats(100, 1e7), st.sampled_from([2, 32, 64, 80, 128, 256]), st.sampled_from([1.0, 2.5, 8.0]))
def test_plain_and_linear(base: float, dims: int, factor: float) -> None:
    found = inv_freq(Rope(base, dims, factor=factor))
    assert found.dtype == np.float32
    # The exponent is a float32, as in transformers, and an error of it counts ln(base) times, 16 at most.
    np.testing.assert_allclose(found, plain(base, dims) / factor, rtol=1.3e-6)
    assert found[0] == np.float32(1 / factor)


def llama3_divisor(frequency: float, s: Llama3) -> float:
    """As the fact sheets state it, by wavelength."""
    wavelength = 2 * pi / frequency
    if wavelength < s.context / s.high:
        return 1.0
    if wavelength > s.context / s.low:
        return s.factor
    smooth = (s.context / wavelength - s.low) / (s.high - s.low)
    return 1 / ((1 - smooth) / s.factor + smooth)


@pytest.mark.parametrize("context", [64, 128, 8192])
def test_llama3(context: int) -> None:
    scaling = Llama3(factor=32.0, low=1.0, high=4.0, context=context)
    frequencies = plain(500_000.0, 64)
    divisors = np.array([llama3_divisor(f, scaling) for f in frequencies])
    assert 1.0 in divisors and 32.0 in divisors and ((divisors > 1) & (divisors < 32)).any()
    found = inv_freq(Rope(500_000.0, 64, llama3=scaling))
    np.testing.assert_allclose(found, frequencies / divisors, rtol=1e-6)


def test_divisors_of_a_gguf_file_are_llama3_scaling(goldens: Path) -> None:
    """llama.cpp's converter wrote the tensor from the same configuration that the safetensors carry."""
    metadata, tensors = read_gguf(goldens / "llama" / "model-f16.gguf")
    rope = from_gguf(metadata, tensors.has).rope
    assert rope.divisors == "rope_freqs.weight"
    scaled = inv_freq(Rope(500_000.0, 32, llama3=Llama3(32.0, 1.0, 4.0, 64)))
    np.testing.assert_allclose(inv_freq(rope, tensors.array("rope_freqs.weight")), scaled, rtol=1e-6)


def test_divisors_of_the_wrong_size_are_refused(goldens: Path) -> None:
    metadata, tensors = read_gguf(goldens / "llama" / "model-f16.gguf")
    config = from_gguf(metadata, tensors.has)
    wrong = Tensors(tensors | {"rope_freqs.weight": Tensor(F32, np.ones(8, np.float32))})
    with pytest.raises(WeightError, match=r"rope_freqs.weight: expected shape \[16\], found \[8\]"):
        build(config, wrong, F32)
