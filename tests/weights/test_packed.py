"""Checkpoints by GPTQ, AWQ, compressed-tensors and bitsandbytes: packed here number by number, and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import bf16, checkpoint

from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.dtypes import F32, Q4_0, Q8_0, DType
from rlx.ir.stored import dequantize
from rlx.weights import ModelWeights, open_weights

N, K, GROUP = 16, 64, 32
LAYER, NAME = "model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight"
Array = np.ndarray[Any, Any]
Made = tuple[dict[str, tuple[str, Array]], dict[str, Any], Array]


def drawn(low: int, high: int, *shape: int) -> Array:
    return np.random.default_rng([low + 999, high, *shape]).integers(low, high, shape)


def words(codes: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Four-bit codes [m, 8 x] -> int32 [m, x]: code `order[i]` of eight in bits 4 i on."""
    found = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for place, which in enumerate(order):
        found |= codes[:, which::8].astype(np.uint32) << np.uint32(4 * place)
    return found.view(np.int32)


def scales(*shape: int) -> Array:
    """On the grid of bf16 and of float16."""
    return np.asarray(drawn(1, 100, *shape) / 64, np.float32)


def awq(zeros: Array) -> Made:
    order, codes, factor = (0, 2, 4, 6, 1, 3, 5, 7), drawn(0, 16, K, N), scales(K // GROUP, N)
    parts = {
        f"{LAYER}.qweight": ("int32", words(codes, order)),
        f"{LAYER}.qzeros": ("int32", words(zeros, order)),
        f"{LAYER}.scales": ("float16", factor.astype(np.float16)),
    }
    of = np.arange(K) // GROUP
    return parts, {"quant_method": "awq", "bits": 4, "version": "gemm"}, ((codes - zeros[of]) * factor[of]).T


def gptq(groups: Array, version: str = "gptq") -> Made:
    codes, zeros, factor = drawn(0, 16, K, N), drawn(1, 16, K // GROUP, N), scales(K // GROUP, N)
    parts = {
        f"{LAYER}.qweight": ("int32", np.ascontiguousarray(words(np.ascontiguousarray(codes.T)).T)),
        f"{LAYER}.qzeros": ("int32", words(zeros - (version == "gptq"))),
        f"{LAYER}.scales": ("float16", factor.astype(np.float16)),
        f"{LAYER}.g_idx": ("int32", groups.astype(np.int32)),
    }
    scheme = {"quant_method": "gptq", "bits": 4, "checkpoint_format": version}
    return parts, scheme, ((codes - zeros[groups]) * factor[groups]).T


def compressed(bits: int) -> Made:
    codes, packed = drawn(-(1 << (bits - 1)), 1 << (bits - 1), N, K), bits == 4
    factor = scales(N, K // GROUP if packed else 1)
    parts = {f"{LAYER}.weight_scale": ("bfloat16", bf16(factor))}
    if packed:
        parts[f"{LAYER}.weight_packed"] = "int32", words(codes + 8)
        parts[f"{LAYER}.weight_shape"] = "int64", np.array([N, K])
    else:
        parts[f"{LAYER}.weight"] = "int8", codes.astype(np.int8)
    form = "pack-quantized" if packed else "int-quantized"
    groups = {"a": {"weights": {"num_bits": bits, "type": "int", "symmetric": True}}}
    scheme = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return parts, scheme, codes * np.repeat(factor, GROUP if packed else K, axis=1)


def nf4() -> Made:
    codes, table, factor = drawn(0, 16, N * K), np.linspace(-1, 1, 16, dtype=np.float32), scales(N * K // 64)
    state = np.frombuffer(json.dumps({"shape": [N, K], "blocksize": 64}).encode(), np.uint8).copy()
    parts = {
        f"{LAYER}.weight": ("uint8", (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        f"{LAYER}.weight.absmax": ("float32", factor),
        f"{LAYER}.weight.quant_map": ("float32", table),
        f"{LAYER}.weight.quant_state.bitsandbytes__nf4": ("uint8", state),
    }
    scheme = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return parts, scheme, (table[codes] * np.repeat(factor, 64)).reshape(N, K)


IN_ORDER, SCATTERED = np.arange(K) // GROUP, np.random.default_rng(3).permutation(np.arange(K) // GROUP)
EIGHTS = np.full((K // GROUP, N), 8)
CASES: dict[str, tuple[Made, DType]] = {
    "awq": (awq(drawn(0, 16, K // GROUP, N)), F32),
    "awq without zeros": (awq(EIGHTS), Q4_0),
    "gptq": (gptq(IN_ORDER), F32),
    "gptq, groups scattered": (gptq(SCATTERED), F32),
    "gptq_v2": (gptq(IN_ORDER, "gptq_v2"), F32),
    "compressed-tensors, 4 bits": (compressed(4), Q4_0),
    "compressed-tensors, 8 bits": (compressed(8), Q8_0),
    "bitsandbytes": (nf4(), F32),
}


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_exact(tmp_path: Path, case: str) -> None:
    (parts, scheme, expected), dtype = CASES[case]
    with ModelWeights(open_weights(checkpoint(tmp_path, parts, {"quantization_config": scheme})), "llama") as weights:
        assert list(weights.names) == [NAME] and not weights.unused
        info = weights.info(NAME)
        assert (info.name, info.dtype, info.shape) == (f"{LAYER}.weight", dtype, (N, K))
        np.testing.assert_array_equal(dequantize(weights.raw(NAME), dtype, (N, K)), expected.astype(np.float32))
        weights.release(NAME)


@pytest.mark.parametrize("part", [".scales", ".qzeros"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    parts, scheme, _ = gptq(IN_ORDER)
    del parts[LAYER + part]
    folder = checkpoint(tmp_path, parts, {"quantization_config": scheme})
    with open_weights(folder) as loader, pytest.raises(WeightError, match=rf"parts of '{LAYER}'.*{part[1:]}"):
        ModelWeights(loader, "llama")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version gemv"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False}, "bitsandbytes with load_in_4bit False"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, scheme: dict[str, Any], message: str) -> None:
    folder = checkpoint(tmp_path, {"a": ("float32", scales(1))}, {"quantization_config": scheme})
    with pytest.raises(UnsupportedModelError, match=rf"the weights are quantized \(quantization_config: {message}\)"):
        open_weights(folder)
