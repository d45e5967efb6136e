"""Rope frequencies against closed formulas in float64, evaluated one frequency at a time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, log, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import read, read_gguf

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.models import from_gguf
from rlx.models.keys import Keys
from rlx.models.rope import Llama3, Rope, Yarn, from_hf, inv_freq
from rlx.models.rope import from_gguf as rope_from_gguf


def plain(base: float, dims: int) -> np.ndarray:
    return np.array([base ** (-2 * i / dims) for i in range(dims // 2)])


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


# -- yarn -------------------------------------------------------------------------------------------------------------


def yarn_frequency(i: int, base: float, dims: int, s: Yarn) -> float:
    """Pair i by the definition in transformers, which is the paper's (arXiv 2309.00071, section 3.2) but for a ramp
    between the two borders in numbers of pairs.
    """
    border = {b: dims * log(s.context / (2 * pi * b)) / (2 * log(base)) for b in (s.fast, s.slow)}
    low, high = (floor(border[s.fast]), ceil(border[s.slow])) if s.whole else (border[s.fast], border[s.slow])
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    divided = min(1.0, max(0.0, (i - low) / (high - low)))
    kept = base ** (-2 * i / dims)
    return kept / s.factor * divided + kept * (1 - divided)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("base", "dims", "factor", "context", "fast", "slow"),
    [(1e6, 128, 4.0, 32768, 32.0, 1.0), (1e4, 64, 16.0, 4096, 32.0, 1.0), (1e7, 32, 2.5, 100, 8.0, 2.0),
     (1e4, 64, 8.0, 400, 1.0, 1.0), (150000.0, 64, 32.0, 4096, 32.0, 1.0)],
)  # fmt: skip
def test_yarn(base: float, dims: int, factor: float, context: int, fast: float, slow: float, whole: bool) -> None:
    scaling = Yarn(factor, fast, slow, context, whole)
    found = inv_freq(Rope(base, dims, yarn=scaling))
    expected = np.array([yarn_frequency(i, base, dims, scaling) for i in range(dims // 2)])
    np.testing.assert_allclose(found, expected, rtol=1.5e-6)
    assert found[-1] < base ** (-(dims - 2) / dims) * 1.01 / factor
    if context > 100:
        assert found[0] == 1.0 and not np.allclose(found, plain(base, dims) / factor)


def hf_rope(**parameters: Any) -> Rope:
    return from_hf(Keys({"rope_parameters": parameters}, "f"), (64, 64), 1e4, None, 1.0, 4096)[0]


def mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 1 + 0.1 * weight * log(factor)


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ({}, mscale(40)),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.707, "mscale_all_dim": 1.3}, mscale(40, 0.707) / mscale(40, 1.3)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.5}, mscale(40)),
        ({"attention_factor": 2.0, "mscale": 1.0, "mscale_all_dim": 2.0}, 2.0),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_of_a_config_scales_sines_and_cosines(given: dict[str, float], scale: float) -> None:
    rope = hf_rope(**{"rope_type": "yarn", "factor": 40.0, "rope_theta": 5e5, **given})
    assert rope.scale == pytest.approx(scale, rel=1e-12)
    weight = given.get("mscale_all_dim", 0.0)
    assert rope.yarn == Yarn(given.get("factor", 40.0), 32.0, 1.0, 4096, weight=weight) and rope.base == 5e5
    assert rope.yarn.head_scale == pytest.approx(mscale(given.get("factor", 40.0), weight), rel=1e-12)


def gguf_rope(**values: Any) -> Rope:
    given = {f"llama.rope.{name.replace('__', '.')}": value for name, value in values.items()}
    return rope_from_gguf(Keys(given, "f", "llama."), 64, None, lambda _: False, 4096)[0]


def test_yarn_of_a_gguf_file() -> None:
    """llama.cpp cancels the factor that it multiplies by and then takes that of transformers, times the file's own."""
    given = {"scaling__type": "yarn", "scaling__factor": 40.0}
    rope = gguf_rope(**given)
    assert rope.yarn == Yarn(40.0, 32.0, 1.0, 4096) and rope.scale == pytest.approx(mscale(40))
    assert gguf_rope(**given, scaling__original_context_length=512).yarn == Yarn(40.0, 32.0, 1.0, 512)
    borders = gguf_rope(**given, scaling__yarn_beta_fast=16.0, scaling__yarn_beta_slow=2.0)
    assert borders.yarn == Yarn(40.0, 16.0, 2.0, 4096)
    assert gguf_rope(**given, scaling__attn_factor=0.5).scale == pytest.approx(0.5 * mscale(40))
    logs = gguf_rope(**given, scaling__yarn_log_multiplier=0.707)
    assert logs.scale == pytest.approx(mscale(40) / mscale(40, 0.707))
    with pytest.raises(UnsupportedModelError, match=r"'llama\.rope\.scaling\.yarn_ext_factor' is 0\.5"):
        gguf_rope(**given, scaling__yarn_ext_factor=0.5)
    assert gguf_rope(scaling__attn_factor=1.25) == Rope(1e4, 64, scale=1.25)


# -- parts of a head --------------------------------------------------------------------------------------------------


def test_proportional_rope_is_that_of_the_divisors_in_gguf_files() -> None:
    """As Gemma 4's: a quarter of the pairs turns, as if all did; GGUF divides the others by 1e30."""
    rope = hf_rope(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6)
    found = inv_freq(rope)
    divisors = np.r_[np.ones(8), np.full(24, 1e30)].astype(np.float32)
    np.testing.assert_allclose(found, inv_freq(Rope(1e6, 64), divisors), rtol=0, atol=1e-29)
    np.testing.assert_allclose(found[:8], plain(1e6, 64)[:8], rtol=1.3e-6)
    assert (found[8:] == 0).all()
    halved = inv_freq(hf_rope(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6, factor=2.0))
    np.testing.assert_array_equal(halved, found / 2)
    assert hf_rope(rope_type="proportional").turning is None
    assert hf_rope(rope_type="proportional", partial_rotary_factor=0.33).turning == 20, "whole pairs of 21.1"


def test_a_part_of_each_head(goldens: Path) -> None:
    """Another than a proportional one counts its exponents over the part alone."""
    rope = hf_rope(rope_type="default", partial_rotary_factor=0.25, rope_theta=1e7)
    assert rope == Rope(1e7, 16)
    np.testing.assert_allclose(inv_freq(rope), plain(1e7, 16), rtol=1.3e-6)
    found = {read(goldens / "qwen35" / file)[0].rope for file in ("hf", "model-f16.gguf")}
    assert found == {replace(rope, sections=(3, 3, 2))}
    with pytest.raises(
        ConfigError, match=r"'rope_parameters\.partial_rotary_factor' is 0\.05, expected an even number"
    ):
        hf_rope(rope_type="default", partial_rotary_factor=0.05)


def test_long_sequences_have_other_divisors() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    settings = {"rope_scaling": scaling, "original_max_position_embeddings": 8}
    rope, _ = from_hf(Keys(settings, "config.json"), (4, 4), 10_000.0, None, 1.0, 64)
    assert rope.at_length(8).divisors == (1.0, 2.0) and rope.at_length(9).divisors == (3.0, 4.0)
    assert rope.scale == pytest.approx(2**0.5)  # sqrt(1 + ln(64 / 8) / ln(8))
    np.testing.assert_allclose(inv_freq(rope.at_length(9), (3.0, 4.0)), [1 / 3, 0.01 / 4], rtol=1e-6)
    settings["rope_scaling"] = {**scaling, "factor": 64.0}
    assert from_hf(Keys(settings, "config.json"), (4, 4), 10_000.0, None, 1.0, 64)[0].scale == pytest.approx(3**0.5)


@pytest.mark.parametrize(("pairs", "sections"), [(64, (24, 20, 20)), (8, (3, 3, 2)), (12, (4, 4, 4))])
def test_heads_have_as_many_of_the_usual_sections_as_fit(pairs: int, sections: tuple[int, ...]) -> None:
    keys = Keys({}, "config.json")
    rope, _ = from_hf(keys, (2 * pairs, 2 * pairs), 1e4, None, None, 64, (24, 20, 20))
    assert rope.sections == sections
