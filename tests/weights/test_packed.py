"""Checkpoints by GPTQ, AWQ, compressed-tensors and bitsandbytes: packed here number by number, and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import bf16, checkpoint

from rlx.errors import ModelFileError, UnsupportedModelError
from rlx.ir.dtypes import F32, Q4_0, Q5_0, Q8_0, DType
from rlx.ir.stored import dequantize
from rlx.weights import ModelWeights, open_weights

N, K, GROUP = 16, 64, 32
LAYER, NAME = "model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight"
Array = np.ndarray[Any, Any]
Made = tuple[dict[str, tuple[str, Array]], dict[str, Any], Array]


def drawn(low: int, high: int, *shape: int) -> Array:
    return np.random.default_rng([low + 999, high, *shape]).integers(low, high, shape)


def words(codes: Array, order: tuple[int, ...] = (), bits: int = 4) -> Array:
    """Codes [m, c x] -> int32 [m, x]: of c codes, as many as an integer holds, code `order[i]` from bit `bits` i on."""
    count = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
    found = np.zeros((len(codes), padded.shape[1] // count), np.uint32)
    for place, which in enumerate(order or range(count)):
        found |= padded[:, which::count].astype(np.uint32) << np.uint32(bits * place)
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


def gptq(groups: Array, version: str = "gptq", bits: int = 4, zero: int | None = None) -> Made:
    """By default with zero points."""
    most, factor = 1 << bits, scales(K // GROUP, N)
    codes, zeros = drawn(0, most, K, N), drawn(1, most, K // GROUP, N)
    zeros = zeros if zero is None else np.full_like(zeros, zero)
    parts = {
        f"{LAYER}.qweight": ("int32", np.ascontiguousarray(words(np.ascontiguousarray(codes.T), bits=bits).T)),
        f"{LAYER}.qzeros": ("int32", words(zeros - (version == "gptq"), bits=bits)),
        f"{LAYER}.scales": ("float16", factor.astype(np.float16)),
        f"{LAYER}.g_idx": ("int32", groups.astype(np.int32)),
    }
    scheme = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version, "group_size": GROUP}
    return parts, scheme, ((codes - zeros[groups]) * factor[groups]).T


def compressed(bits: int, size: int = GROUP, *, packed: bool = True, zeros: bool = False) -> Made:
    """A scale for `size` inputs, or one for all weights if that is 0."""
    middle = 1 << (bits - 1)
    codes, factor = drawn(-middle, middle, N, K), scales(*(N, K // size) if size else (1,))
    offset = drawn(-middle, middle, *factor.shape) if zeros else np.zeros_like(factor, int)
    parts = {f"{LAYER}.weight_scale": ("bfloat16", bf16(factor))}
    if packed:
        parts[f"{LAYER}.weight_packed"] = "int32", words(codes + middle, bits=bits)
        parts[f"{LAYER}.weight_shape"] = "int64", np.array([N, K])
        along_rows = np.ascontiguousarray(words(np.ascontiguousarray((offset + middle).T), bits=bits).T)
        parts |= {f"{LAYER}.weight_zero_point": ("int32", along_rows)} if zeros else {}
    else:
        parts[f"{LAYER}.weight"] = "int8", codes.astype(np.int8)
        parts |= {f"{LAYER}.weight_zero_point": ("int8", offset.astype(np.int8))} if zeros else {}
    form = "pack-quantized" if packed else "int-quantized"
    groups = {"a": {"weights": {"num_bits": bits, "type": "int", "symmetric": not zeros, "group_size": size or None}}}
    scheme = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    every = [np.repeat(each, size, axis=1) if size else each for each in (factor, offset)]
    return parts, scheme, (codes - every[1]) * every[0]


def four_bit_floats(kind: str = "nf4", *, double: bool = False) -> Made:
    codes, table, factor = drawn(0, 16, N * K), np.linspace(-1, 1, 16, dtype=np.float32), scales(N * K // 64)
    state: dict[str, Any] = {"shape": [N, K], "blocksize": 64}
    parts = {
        f"{LAYER}.weight": ("uint8", (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        f"{LAYER}.weight.absmax": ("float32", factor),
        f"{LAYER}.weight.quant_map": ("float32", table),
    }
    if double:
        state |= {"nested_blocksize": 6, "nested_offset": 0.03125}
        inner, outer = np.linspace(-1, 1, 256, dtype=np.float32), scales(-(-len(factor) // 6))
        numbers = drawn(0, 256, len(factor)).astype(np.uint8)
        parts[f"{LAYER}.weight.absmax"] = "uint8", numbers
        parts[f"{LAYER}.weight.nested_absmax"] = "float32", outer
        parts[f"{LAYER}.weight.nested_quant_map"] = "float32", inner
        factor = inner[numbers] * outer[np.arange(len(numbers)) // 6] + np.float32(0.03125)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    parts[f"{LAYER}.weight.quant_state.bitsandbytes__{kind}"] = "uint8", text
    scheme = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return parts, {**scheme, "bnb_4bit_use_double_quant": double}, (table[codes] * np.repeat(factor, 64)).reshape(N, K)


IN_ORDER, SCATTERED = np.arange(K) // GROUP, np.random.default_rng(3).permutation(np.arange(K) // GROUP)
EIGHTS = np.full((K // GROUP, N), 8)
CASES: dict[str, tuple[Made, DType]] = {
    "awq": (awq(drawn(0, 16, K // GROUP, N)), Q5_0),
    "awq without zero points": (awq(EIGHTS), Q4_0),
    "gptq": (gptq(IN_ORDER), Q5_0),
    "gptq without zero points": (gptq(IN_ORDER, zero=8), Q4_0),
    "gptq with the highest zero point": (gptq(IN_ORDER, zero=16), Q5_0),
    "gptq, groups scattered": (gptq(SCATTERED), F32),
    "gptq_v2": (gptq(IN_ORDER, "gptq_v2"), Q5_0),
    "gptq, 2 bits": (gptq(IN_ORDER, bits=2), Q4_0),
    "gptq, 8 bits": (gptq(IN_ORDER, bits=8, zero=128), Q8_0),
    "gptq, 8 bits with zero points": (gptq(IN_ORDER, bits=8), F32),
    "compressed-tensors, 4 bits": (compressed(4), Q4_0),
    "compressed-tensors, 4 bits with zero points": (compressed(4, zeros=True), Q5_0),
    "compressed-tensors, 3 bits": (compressed(3), Q4_0),
    "compressed-tensors, 8 bits packed": (compressed(8), Q8_0),
    "compressed-tensors, 8 bits": (compressed(8, K, packed=False), Q8_0),
    "compressed-tensors, 8 bits with zero points": (compressed(8, K, packed=False, zeros=True), F32),
    "compressed-tensors, a scale a tensor": (compressed(8, 0, packed=False), Q8_0),
    "bitsandbytes": (four_bit_floats(), F32),
    "bitsandbytes, double quantization": (four_bit_floats(double=True), F32),
    "bitsandbytes, fp4": (four_bit_floats("fp4"), F32),
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


def test_experts_of_one_stack_have_one_type(tmp_path: Path) -> None:
    """Codes of the first need 4 bits, those of the second 5."""
    every = [gptq(IN_ORDER, zero=8), gptq(IN_ORDER)]
    parts: dict[str, tuple[str, Array]] = {}
    for i, made in enumerate(every):
        expert = f"model.layers.0.mlp.experts.{i}.up_proj"
        parts |= {name.replace(LAYER, expert): part for name, part in made[0].items()}
    folder = checkpoint(tmp_path, parts, {"quantization_config": every[0][1]})
    with ModelWeights(open_weights(folder), "qwen3moe") as found:
        info = found.info("blk.0.ffn_up_exps.weight")
        assert (info.dtype, info.shape) == (Q5_0, (2, N, K))
        for piece, (_, _, expected) in zip(found.pieces("blk.0.ffn_up_exps.weight"), every, strict=True):
            np.testing.assert_array_equal(dequantize(piece, Q5_0, (N, K)), expected.astype(np.float32))


@pytest.mark.parametrize("part", [".scales", ".qzeros"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    parts, scheme, _ = gptq(IN_ORDER)
    del parts[LAYER + part]
    refused(tmp_path, parts, scheme, rf"half quantized: '{LAYER}' has no '{LAYER}{part}'")


def refused(tmp_path: Path, parts: Mapping[str, tuple[str, Array]], scheme: dict[str, Any], message: str) -> None:
    folder = checkpoint(tmp_path, parts, {"quantization_config": scheme} if scheme else {})
    with open_weights(folder) as loader, pytest.raises(ModelFileError, match=message):
        ModelWeights(loader, "llama")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq with checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "awq with group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "gptq with group_size all"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False}, "bitsandbytes with load_in_4bit False"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, scheme: dict[str, Any], message: str) -> None:
    folder = checkpoint(tmp_path, {"a": ("float32", scales(1))}, {"quantization_config": scheme})
    with pytest.raises(UnsupportedModelError, match=rf"the weights are quantized \(quantization_config: {message}\)"):
        open_weights(folder)
