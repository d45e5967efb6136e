"""What a `config.json` says about quantized weights (`quantization_config`), and which schemes are refused.

Part of the weights stage: `safetensors.py` asks when a checkpoint is opened, `scaled_codes.py` and `packed.py` when
they join codes and scales, `rlx inspect` for a description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.ir.dtypes import DType

Scheme = Mapping[str, Any]

#: FP8 codes (e4m3) as a checkpoint has them, their scales in another tensor. Never leaves the weights stage.
CODES = DType("e4m3", 1, 1, "uint8")

#: quant_method -> keys with the values that are read; the first is the one of a file without the key.
_READ: dict[str, dict[str, tuple[Any, ...]]] = {
    "awq": {"bits": (4,), "version": ("gemm",)},
    "gptq": {"bits": (4, 2, 8), "checkpoint_format": ("gptq", "gptq_v2")},
    "bitsandbytes": {"load_in_4bit": (True,), "bnb_4bit_quant_type": ("nf4", "fp4")},
    "fp8": {"fmt": ("e4m3",)},
    "fbgemm_fp8": {},
    "mxfp4": {},
}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def scheme_of(metadata: Mapping[str, Any]) -> Scheme:
    """What a configuration says about quantized weights; {} for nothing."""
    found = metadata.get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def refusal(scheme: Scheme) -> str | None:
    """The name of a scheme that rlx does not read; None for one that it reads."""
    method = str(scheme.get("quant_method", "another scheme"))
    if method == "compressed-tensors":
        groups = list(_groups(scheme))
        read = groups and scheme.get("format") in _FORMATS and all(map(_is_read, groups))
        return None if read else f"{method} {scheme.get('format')}"
    if method not in _READ:
        return method
    said = {key: value.lower() if isinstance(value, str) else value for key, value in scheme.items()}
    wrong = {key: said[key] for key, values in _READ[method].items() if said.get(key, values[0]) not in values}
    size = said.get("group_size", -1)  # -1: a scale a row
    if size is not None and (type(size) is not int or not (size > 0 or size == -1)):
        wrong["group_size"] = size
    return f"{method} with {', '.join(f'{key} {value}' for key, value in wrong.items())}" if wrong else None


def described(scheme: Scheme) -> str:
    """The scheme in words."""
    method = str(scheme.get("quant_method"))
    if method == "compressed-tensors":
        each = (
            f"{group.get('type')} of {group.get('num_bits')} bits, {_spread(group)}"
            + ("" if group.get("symmetric", True) else ", zero points")
            for group in _groups(scheme)
        )
        return f"compressed-tensors: {'; '.join(dict.fromkeys(each))}"
    if method == "bitsandbytes":
        double = ", double quantization" if scheme.get("bnb_4bit_use_double_quant") else ""
        return f"bitsandbytes: {scheme.get('bnb_4bit_quant_type', 'nf4')}{double}"
    if method in ("fp8", "fbgemm_fp8"):
        size = scheme.get("weight_block_size")
        return f"{method}: e4m3" + (f", blocks of {' x '.join(map(str, size))}" if isinstance(size, list) else "")
    if "bits" not in scheme:
        return method
    order = ", act-order" if scheme.get("desc_act") else ""
    zeros = ", zero points" if scheme.get("zero_point") or scheme.get("sym") is False else ""
    return f"{method}: {scheme['bits']} bits, {_spread(scheme)}{zeros}{order}"


def _spread(weights: Scheme) -> str:
    """Which weights share a scale."""
    if isinstance(weights.get("block_structure"), list):
        return f"blocks of {' x '.join(map(str, weights['block_structure']))}"
    size = weights.get("group_size")
    if type(size) is int and size > 0:
        return f"groups of {size}"
    return {"tensor": "a scale a tensor"}.get(str(weights.get("strategy")), "a scale a row")


def group_sizes(scheme: Scheme) -> set[int]:
    """How many inputs may share a scale, as far as the configuration says for every layer; empty if it does not."""
    if scheme.get("dynamic"):  # rules for single layers
        return set()
    found = [scheme.get("group_size"), *(each.get("group_size") for each in _groups(scheme))]
    return {size for size in found if type(size) is int and size > 0}


def block_size(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of weights that share a scale, where the configuration says them."""
    scheme = scheme_of(metadata)
    found = [scheme.get("weight_block_size"), *(group.get("block_structure") for group in _groups(scheme))]
    sizes = next((each for each in found if isinstance(each, list)), [])
    if len(sizes) != 2 or not all(type(each) is int and each > 0 for each in sizes):
        return None
    return sizes[0], sizes[1]


def _groups(scheme: Scheme) -> Iterator[Scheme]:
    """What a compressed-tensors configuration says about the weights of each group of layers."""
    groups = scheme.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        yield weights if isinstance(weights, Mapping) else {}


def _is_read(weights: Scheme) -> bool:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    return bits == 8 if kind == "float" else kind == "int" and type(bits) is int and 2 <= bits <= 8
