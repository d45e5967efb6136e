"""What a `config.json` says about FP8 weights, and which other quantized checkpoints are refused.

Part of the weights stage: `safetensors.py` asks when a checkpoint is opened, `fp8.py` when it joins codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.ir.dtypes import DType

#: FP8 codes (e4m3) as a checkpoint has them, their scales in another tensor. Never leaves the weights stage.
CODES = DType("e4m3", 1, 1, "uint8")


#: quant_method -> keys with the only values that `packed.py` reads.
_FOUR_BITS: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "version": "gemm"},
    "gptq": {"bits": 4},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
}


def refusal(scheme: Mapping[str, Any]) -> str | None:
    """The name of a scheme (`quantization_config`) that rlx does not read; None for one that it reads.

    Those are FP8 weights in e4m3, which are quant_method "fp8" (DeepSeek, Qwen), "fbgemm_fp8", and "compressed-tensors"
    with 8-bit floats; MXFP4; and what `packed.py` reads.
    """
    method = str(scheme.get("quant_method", "another scheme"))
    if method == "fp8":
        return None if scheme.get("fmt", "e4m3") == "e4m3" else f"fp8 {scheme['fmt']}"
    if method in _FOUR_BITS:
        wrong = {key: scheme[key] for key, value in _FOUR_BITS[method].items() if scheme.get(key, value) != value}
        return f"{method} with {', '.join(f'{key} {value}' for key, value in wrong.items())}" if wrong else None
    if method == "compressed-tensors":
        groups = list(_groups(scheme))
        bits = {"pack-quantized": 4, "int-quantized": 8}.get(str(scheme.get("format")))
        if groups and all(each.get("num_bits") == bits and each.get("symmetric", True) for each in groups):
            return None
        read = scheme.get("format") == "float-quantized" and groups and all(map(_is_fp8, groups))
        return None if read else f"{method} {scheme.get('format')}"
    return None if method in ("fbgemm_fp8", "mxfp4") else method


def block_size(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of weights that share a scale, where the configuration says them."""
    scheme = metadata.get("quantization_config")
    if not isinstance(scheme, Mapping):
        return None
    found = [scheme.get("weight_block_size"), *(group.get("block_structure") for group in _groups(scheme))]
    sizes = next((each for each in found if isinstance(each, list)), [])
    if len(sizes) != 2 or not all(type(each) is int and each > 0 for each in sizes):
        return None
    return sizes[0], sizes[1]


def _groups(scheme: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a compressed-tensors configuration says about the weights of each group of layers."""
    groups = scheme.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        yield weights if isinstance(weights, Mapping) else {}


def _is_fp8(weights: Mapping[str, Any]) -> bool:
    return weights.get("num_bits") == 8 and weights.get("type") == "float"
