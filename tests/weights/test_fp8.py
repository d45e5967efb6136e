"""FP8 checkpoints: codes and scales joined, against float64 and a table of e4m3 made from its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import bf16, checkpoint

from rlx.errors import ModelFileError, RlxError, UnsupportedModelError, WeightError
from rlx.ir.dtypes import F8_E4M3
from rlx.weights import ModelWeights, open_weights
from rlx.weights.safetensors import SafetensorsFile

N, K = 70, 96
NAME, FILE = "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"
BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 64]}}
Array = np.ndarray[Any, Any]


def e4m3() -> Array:
    """The 256 values: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, all ones is NaN (OCP FP8)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(code & 127 == 127, np.nan, np.where(code > 127, -value, value))


def codes(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def scales(seed: int, *shape: int) -> Array:
    """float32 on the bf16 grid."""
    return np.asarray(np.random.default_rng(seed).integers(1, 200, shape) / 64, np.float32)


def decoded(raw: Array, *shape: int) -> Array:
    """The values of `F8_E4M3` blocks: a float32 scale, then 32 codes."""
    blocks = raw.reshape(*shape[:-1], shape[-1] // 32, 36)
    factor = np.ascontiguousarray(blocks[..., :4]).view("<f4").astype(np.float64)
    return (e4m3()[blocks[..., 4:]] * factor).reshape(shape)


def test_the_table_is_that_of_the_format() -> None:
    values = e4m3()
    assert np.nanmax(values) == 448 and values[1] == 2.0**-9 and values[0x38] == 1.0 and values[0xB9] == -1.125
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]


SCALES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "blocks": ("_scale_inv", (3, 2), BLOCKS),
    "blocks of compressed-tensors": (
        "_scale",
        (3, 2),
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float", "block_structure": [32, 64]}}
                },
            }
        },
    ),
    "rows": ("_scale", (N, 1), {"quantization_config": {"quant_method": "fbgemm_fp8"}}),
    "rows in a vector": ("_scale", (N,), {}),
    "one for all": ("_scale_inv", (), {}),
    "one for all in a vector": ("_scale", (1,), {}),
}


def expanded(scale: Array, n: int, k: int) -> Array:
    """A scale for each of [n, k] by plain indexing."""
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(1, 1), (n, k))
    if scale.size == n:
        return np.broadcast_to(scale.reshape(n, 1), (n, k))
    return np.array([[scale[i // 32, j // 64] for j in range(k)] for i in range(n)])


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_matrix_is_codes_times_scales(tmp_path: Path, kind: str, dtype: str) -> None:
    suffix, shape, config = SCALES[kind]
    code, scale = codes(0, N, K), scales(1, *shape)
    stored = scale if dtype == "float32" else bf16(scale)
    tensors = {FILE: ("float8_e4m3fn", code), FILE + suffix: (dtype, stored)}
    tensors[FILE.replace("weight", "input_scale")] = ("float32", np.ones(1, np.float32))
    with ModelWeights(open_weights(checkpoint(tmp_path, tensors, config)), "llama") as weights:
        info = weights.info(NAME)
        assert (
            info.dtype is F8_E4M3 and info.shape == (N, K) and info.nbytes == F8_E4M3.size((N, K)) and info.name == FILE
        )
        expected = e4m3()[code] * expanded(scale.astype(np.float64), N, K)
        np.testing.assert_array_equal(decoded(weights.raw(NAME), N, K), expected)
        (piece,) = weights.pieces(NAME)
        assert piece.tobytes() == weights.raw(NAME).tobytes() and piece.nbytes == info.nbytes
        assert weights.unused == ["model.layers.0.self_attn.q_proj.input_scale"]  # scales of activations
        weights.define("blk.0.head.weight", NAME, 1, 4, 7)
        rows = expected.reshape(-1, 7, K)[:, 1:5].reshape(-1, K)
        np.testing.assert_array_equal(decoded(weights.raw("blk.0.head.weight"), *rows.shape), rows)
        weights.release(NAME)
        with pytest.raises(WeightError, match="has type f8_e4m3, expected f32, f16 or bf16"):
            weights.array(NAME)


def test_experts_with_scales_of_their_own(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, Array]] = {}
    for e in range(3):
        name = f"model.layers.0.mlp.experts.{e}.up_proj.weight"
        tensors |= {name: ("float8_e4m3fn", codes(e, N, K)), f"{name}_scale_inv": ("float32", scales(e + 9, 3, 2))}
    with ModelWeights(open_weights(checkpoint(tmp_path, tensors, BLOCKS)), "qwen3moe") as weights:
        name = "blk.0.ffn_up_exps.weight"
        assert weights.info(name).shape == (3, N, K) and weights.info(name).dtype is F8_E4M3 and not weights.unused
        for e, piece in enumerate(weights.pieces(name)):
            expected = e4m3()[codes(e, N, K)] * expanded(scales(e + 9, 3, 2).astype(np.float64), N, K)
            np.testing.assert_array_equal(decoded(piece, N, K), expected)
        assert weights.raw(name).nbytes == weights.info(name).nbytes


@pytest.mark.parametrize("shape", [(2, 3, 2), (2, N, 1), (2, N), (2, 1, 1), (2,), ()])
def test_fused_experts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name, scale = "model.layers.0.mlp.experts.gate_up_proj", scales(3, *shape)
    tensors = {name: ("float8_e4m3fn", codes(0, 2, N, K)), f"{name}_scale_inv": ("float32", scale)}
    with ModelWeights(open_weights(checkpoint(tmp_path, tensors, BLOCKS)), "qwen35moe") as weights:
        pieces = list(weights.pieces("blk.0.ffn_gate_up_exps.weight"))
        assert len(pieces) == 2
        for e, piece in enumerate(pieces):
            own = scale[e] if shape else scale
            expected = e4m3()[codes(0, 2, N, K)[e]] * expanded(own.astype(np.float64), N, K)
            np.testing.assert_array_equal(decoded(piece, N, K), expected)


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        ({}, {}, WeightError, rf"'{FILE}' has no scales; names tried: {FILE}_scale_inv, {FILE}_scale$"),
        ({"_scale": ("int32", np.ones(1, np.int32))}, {}, WeightError, "has type i32, expected a float"),
        ({"_scale_inv": ("float32", scales(0, 3, 2))}, {}, WeightError, r"shape \[3, 2\] .* which is missing"),
        ({"_scale_inv": ("float32", scales(0, 3, 3))}, BLOCKS, WeightError, r"shape \[3, 3\] .* 32 by 64 as"),
        ({"_scale": ("float32", scales(0, N + 1))}, BLOCKS, WeightError, r"shape \[71\] for codes of shape \[70, 96\]"),
        (
            {"_scale_inv": ("float32", scales(0, 3, 2))},
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 48]}},
            UnsupportedModelError,
            "are for 48 columns, expected a multiple of 32",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, tuple[str, Array]], config: dict[str, Any], error: type[RlxError], message: str
) -> None:
    found = {FILE: ("float8_e4m3fn", codes(0, N, K))} | {FILE + suffix: each for suffix, each in tensors.items()}
    with open_weights(checkpoint(tmp_path, found, config)) as loader, pytest.raises(error, match=message) as caught:
        ModelWeights(loader, "llama")
    assert type(caught.value) is error and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "hqq", "bits": 4}, r"\(quantization_config: hqq\)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"\(quantization_config: fp8 with fmt e5m2\)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors pack-quantized\)"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "compressed-tensors float-quantized",
        ),
        ({"bits": 4}, "another scheme"),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_name(tmp_path: Path, scheme: dict[str, Any], message: str) -> None:
    directory = checkpoint(tmp_path, {"a": ("float32", scales(0, 1))}, {"quantization_config": scheme})
    with pytest.raises(ModelFileError, match="the weights are quantized .*" + message):
        SafetensorsFile(directory)
