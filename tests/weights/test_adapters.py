"""Adapter files: what is read of them is what was written, and what cannot be had exactly is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import Pairs, write_gguf, write_peft

from rlx.errors import ConfigError, UnsupportedModelError, WeightError
from rlx.weights.adapters import open_adapter

Array = np.ndarray[Any, Any]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def pair(rank: int = 4, n: int = 6, k: int = 8, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rank, k)).astype(np.float32), rng.standard_normal((n, rank)).astype(np.float32)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 1.0)),
        ({"use_rslora": True}, (8 / 4**0.5, 8 / 8**0.5)),
        ({"alpha_pattern": {"q_proj": 1}}, (0.25, 1.0)),
        ({"alpha_pattern": {"^" + DOWN: 16, "oj": 3, "^q_proj": 3}}, (2.0, 2.0)),
    ],
)
def test_a_peft_folder(tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]) -> None:
    """The rank is that of the tensors, of each its own."""
    pairs = {Q: pair(4), DOWN: pair(8, seed=1)}
    folder = write_peft(tmp_path / "one", pairs, **config)
    for path in (folder, folder / "adapter_model.safetensors"):
        found = open_adapter(path, "llama")
        for name, (a, b), scale in zip(
            ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"), pairs.values(), scales, strict=True
        ):
            np.testing.assert_array_equal(found.pairs[name][0], a)
            np.testing.assert_array_equal(found.pairs[name][1], b * np.float32(scale))
    other = write_peft(tmp_path / "two", pairs, **config)
    assert open_adapter(other, "llama").digest == found.digest
    other = write_peft(tmp_path / "two", {**pairs, Q: pair(4, seed=9)}, **config)
    assert open_adapter(other, "llama").digest != found.digest


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 2.0), (0.0, 1.0)])
def test_a_gguf_file(tmp_path: Path, alpha: float, scale: float) -> None:
    a, b = pair()
    found = open_adapter(write_gguf(tmp_path / "a.gguf", "qwen3", {"blk.2.ffn_up": (a, b)}, alpha), "qwen3")
    assert (found.format, list(found.pairs)) == ("gguf", ["blk.2.ffn_up.weight"])
    np.testing.assert_array_equal(found.pairs["blk.2.ffn_up.weight"][1], b * np.float32(scale))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4': it is of another base"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern has regular expressions"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModelError, ConfigError), match=message):
        open_adapter(write_peft(tmp_path, {Q: pair()}, **config), "llama")


@pytest.mark.parametrize(
    ("pairs", "kind", "message"),
    [
        ({"model.layers.0.self_attn.x_proj": pair()}, UnsupportedModelError, "no 'model.layers.0.self_attn.x_proj'"),
        ({Q: (pair()[0], pair(3)[1])}, WeightError, r"A \[4, 8\] and B \[6, 3\] are no pair of one rank"),
        ({Q: (pair()[0] * np.float32(np.inf), pair()[1])}, WeightError, "infinite or NaN"),
        ({}, WeightError, "the adapter has no tensors"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, pairs: Pairs, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        open_adapter(write_peft(tmp_path, pairs), "llama")
