"""Checkpoints by GPTQ, AWQ, compressed-tensors or bitsandbytes, as tensors that the model can use.

Weights stage, under `model.py`. A linear layer is several tensors there: codes, several in an integer, scales, zero
points, and which group an input belongs to. Here it is one tensor `weight`: in the smallest of Q4_0, Q5_0 and Q8_0 in
which the numbers are exact, else in float32. Sources: the layouts of AutoAWQ (`gemm`), GPTQModel, compressed-tensors
and bitsandbytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import RlxError, UnsupportedModelError, WeightError
from rlx.ir.dtypes import F32, I8, Q4_0, Q5_0, Q8_0, DType
from rlx.ir.stored import FLOATS, to_float32
from rlx.weights.composed import Composed
from rlx.weights.loader import LoaderOver, WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.quantization import group_sizes, scheme_of

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which output each four bits of an integer belong to
_WORD = 32  # bits
_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
PARTS = {  # ending of the codes -> endings of what else belongs to them
    ".qweight": (".qzeros", ".scales", ".g_idx"),
    ".weight_packed": (".weight_scale", ".weight_shape", ".weight_g_idx", ".weight_zero_point"),
    ".weight": (
        *(".weight_scale", ".weight_zero_point", ".weight_g_idx"),
        *(".weight.absmax", ".weight.quant_map", *_NESTED, *_STATES),
    ),
}


@dataclass(frozen=True)
class Layer:
    """The weights of a linear layer: code times the scale of its group.

    Attributes:
        codes: reads the integers [n, k], the zero point subtracted.
        scales: [n, groups].
        groups: the group of each input, [k].
        lowest, highest: bounds of the codes.
    """

    codes: Callable[[], Array]
    scales: Floats
    groups: Array
    lowest: int
    highest: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), len(self.groups)


@dataclass(frozen=True)
class FloatLayer:
    """The weights of a linear layer that no type of integers holds.

    Attributes:
        shape: [n, k].
        values: reads them, float32.
    """

    shape: tuple[int, ...]
    values: Callable[[], Floats]


Read = Callable[[WeightLoader, str], Layer | FloatLayer]


def _array(loader: WeightLoader, name: str) -> Array:
    """The numbers of a tensor; `KeyError` if it is missing."""
    info = loader.tensors[name]
    if info.dtype in FLOATS:
        return to_float32(loader.raw(name), info.dtype).reshape(info.shape)
    return loader.raw(name).view(str(info.dtype.numpy)).reshape(info.shape)


def _split(words: Array, bits: int = 4) -> Array:
    """int32 [..., m] -> [..., m, 32 // bits]: numbers of so many bits each, the lowest first."""
    shifts = np.arange(0, _WORD - bits + 1, bits, dtype=np.uint32)
    return (words[..., None].view(np.uint32) >> shifts & np.uint32((1 << bits) - 1)).astype(np.int16)


def _groups(loader: WeightLoader, name: str, k: int, count: int) -> Array:
    """The group of each of k inputs: what the tensor says, else `count` groups in order."""
    if name in loader.tensors:
        found = _array(loader, name)
        if found.shape != (k,) or found.min() < 0 or found.max() >= count:
            raise ValueError(f"{name!r} is no list of {k} numbers below {count}, the number of groups")
        return found
    sizes = group_sizes(scheme_of(loader.metadata))
    if k % count or (count > 1 and sizes and k // count not in sizes):
        said = f", and group_size is {' or '.join(map(str, sorted(sizes)))}" if sizes else ""
        raise ValueError(f"{count} scales a row for {k} inputs{said}")
    return np.arange(k) // (k // count)


def _awq(loader: WeightLoader, layer: str) -> Layer:
    order, scales = np.argsort(_AWQ_ORDER), _array(loader, f"{layer}.scales")

    def read(part: str) -> Array:
        found = _split(_array(loader, f"{layer}.{part}"))
        return found[..., order].reshape(len(found), -1)

    zeros, k = read("qzeros"), loader.tensors[f"{layer}.qweight"].shape[0]
    groups = _groups(loader, "", k, len(scales))
    return Layer(lambda: (read("qweight") - zeros[groups]).T, scales.T, groups, *_bounds(zeros, 4))


def _gptq(loader: WeightLoader, layer: str) -> Layer:
    scheme, scales = scheme_of(loader.metadata), _array(loader, f"{layer}.scales")
    bits = int(scheme.get("bits", 4))
    zeros = _split(_array(loader, f"{layer}.qzeros"), bits).reshape(len(scales), -1)
    if scheme.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1  # stored less 1
    if scheme.get("desc_act") is True:
        _ = loader.tensors[f"{layer}.g_idx"]  # without it the groups would be others
    words, n = loader.tensors[f"{layer}.qweight"].shape
    groups = _groups(loader, f"{layer}.g_idx", _WORD // bits * words, len(scales))

    def codes() -> Array:
        found = _split(_array(loader, f"{layer}.qweight"), bits).swapaxes(1, 2).reshape(-1, n)
        return (found - zeros[groups]).T

    return Layer(codes, scales.T, groups, *_bounds(zeros, bits))


def _bounds(zeros: Array, bits: int) -> tuple[int, int]:
    """The bounds of codes from 0 on after their zero points are subtracted."""
    return -int(zeros.max()), (1 << bits) - 1 - int(zeros.min())


def _compressed(loader: WeightLoader, layer: str) -> Layer:
    name = f"{layer}.weight"
    packed = f"{name}_packed" in loader.tensors
    n, k = _array(loader, f"{name}_shape").tolist() if packed else loader.tensors[name].shape
    bits = _packed_bits(loader.tensors[f"{name}_packed"].shape[1], k) if packed else 8
    middle, scales = 1 << (bits - 1), _array(loader, f"{name}_scale")
    scales = np.broadcast_to(scales, (n, 1)) if scales.size == 1 else scales.reshape(n, -1)
    groups = _groups(loader, f"{name}_g_idx", k, scales.shape[1])
    zeros = _zero_points(loader, f"{name}_zero_point", scales.shape, bits if packed else 0)

    def codes() -> Array:
        if packed:
            found = _split(_array(loader, f"{name}_packed"), bits).reshape(n, -1)[:, :k] - np.int16(middle)
        else:
            found = _array(loader, name)
        return found if zeros is None else found - zeros[:, groups]

    lowest, highest = (0, 2 * middle - 1) if zeros is None else _bounds(zeros, bits)
    return Layer(codes, scales, groups, lowest - middle, highest - middle)


def _packed_bits(words: int, k: int) -> int:
    """Bits of a code where so many integers hold a row of k codes."""
    found = next((bits for bits in range(8, 1, -1) if -(-k // (_WORD // bits)) == words), None)
    if found is None:
        raise ValueError(f"{words} integers for a row of {k} codes")
    return found


def _zero_points(loader: WeightLoader, name: str, shape: tuple[int, ...], bits: int) -> Array | None:
    """The zero points of compressed-tensors, int16 [n, groups]; several rows in an integer if they have `bits`."""
    if name not in loader.tensors:
        return None
    found = _array(loader, name)
    if bits:
        found = _split(found, bits).swapaxes(1, 2).reshape(-1, found.shape[1])[: shape[0]] - (1 << (bits - 1))
    return np.broadcast_to(found.astype(np.int16), shape)


def _four_bit_floats(loader: WeightLoader, layer: str) -> FloatLayer:
    name, states = f"{layer}.weight", [layer + each for each in _STATES]
    key = next((each for each in states if each in loader.tensors), None)
    if key is None:
        raise KeyError(states[0])
    state = json.loads(loader.raw(key).tobytes())
    shape, size = tuple(state["shape"]), int(state["blocksize"])
    table, scales = _array(loader, f"{name}.quant_map"), _array(loader, f"{name}.absmax")
    if "nested_blocksize" in state:  # the scales are quantized, too
        outer = _array(loader, f"{name}.nested_absmax").repeat(state["nested_blocksize"])[: len(scales)]
        scales = _array(loader, f"{name}.nested_quant_map")[scales] * outer + np.float32(state["nested_offset"])

    def values() -> Floats:
        packed = loader.raw(name)
        found = table[np.stack([packed >> 4, packed & 15], 1).reshape(-1)][: prod(shape)]
        return np.ascontiguousarray((found.reshape(-1, size) * scales[:, None]).reshape(shape), np.float32)

    return FloatLayer(shape, values)


#: quant_method -> how its layers are read.
READERS: Mapping[str, Read] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _four_bit_floats,
}


_BLOCK = Q4_0.block
_SMALLEST_CODE = {Q4_0: -8, Q5_0: -16, Q8_0: -128}  # of codes of 4, 5 and 8 bits; the smallest type first
_SIZES = [*_SMALLEST_CODE, F32]
_HALF_QUANTIZED = "use the BF16 checkpoint or a GGUF file of the model, or quantize it again"
_EXPERT = re.compile(r"(?<=\.)[0-9]+(?=\.\w+$)")


def type_of(layer: Layer | FloatLayer) -> DType:
    """The smallest type in which the numbers of a layer are exact."""
    if isinstance(layer, FloatLayer) or len(layer.groups) % _BLOCK:
        return F32
    blocks = layer.groups.reshape(-1, _BLOCK)
    whole = (blocks == blocks[:, :1]).all() and (layer.scales == layer.scales.astype(np.float16)).all()
    fitting = (dtype for dtype, low in _SMALLEST_CODE.items() if whole and low <= layer.lowest and layer.highest < -low)
    return next(fitting, F32)


def stored(layer: Layer | FloatLayer, dtype: DType) -> Bytes:
    """The bytes of a layer in a type in which it is exact.

    A block is a float16 scale, of Q5_0 the highest bits of 32 codes, and the codes; of four bits the codes 0 to 15 are
    in the low halves of bytes.
    """
    if isinstance(layer, FloatLayer):
        return layer.values().reshape(-1).view(np.uint8)
    codes = layer.codes()
    if codes.shape != layer.shape:
        raise ValueError(f"codes of shape {list(codes.shape)}, expected {list(layer.shape)}")
    if dtype is F32:
        values = codes.astype(np.float32) * layer.scales[:, layer.groups]
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    codes = codes.reshape(-1, _BLOCK)
    scales = layer.scales[:, layer.groups[::_BLOCK]].astype("<f2").reshape(-1, 1).view(np.uint8)
    if dtype is Q8_0:
        return np.concatenate([scales, codes.astype(np.int8).view(np.uint8)], axis=1).reshape(-1)
    raised, half = (codes - _SMALLEST_CODE[dtype]).astype(np.uint8), _BLOCK // 2
    fifth = np.packbits(raised >> 4, axis=1, bitorder="little")[:, : 4 if dtype is Q5_0 else 0]
    pairs = raised[:, :half] & 15 | raised[:, half:] << np.uint8(4)
    return np.concatenate([scales, fifth, pairs], axis=1).reshape(-1)


def repacked(loader: WeightLoader) -> WeightLoader:
    """The checkpoint with one tensor for each linear layer; the loader itself, if it is not stored in parts.

    Raises:
        UnsupportedModelError: `config.json` does not say how the weights are quantized.
        WeightError: the parts of a layer do not fit one another, or a layer is there twice.
    """
    read, codes = READERS.get(str(scheme_of(loader.metadata).get("quant_method"))), dict(_codes(loader))
    if not codes:
        return loader
    if read is None:
        layer, end = next(iter(codes.items()))
        what = f"the weights are quantized ({layer}{end}), and config.json has no quantization_config that says how"
        raise UnsupportedModelError(what, where=loader.path, hint="use the config.json of the same checkpoint")
    return _repacked(loader, read, codes)


def _repacked(loader: WeightLoader, read: Read, codes: dict[str, str]) -> LoaderOver:
    """A `WeightLoader` whose linear layers are one tensor each.

    Args:
        loader: the checkpoint; closed with the result.
        read: reads a layer, by the name without its ending.
        codes: layer -> ending of its codes.
    """
    parts = {layer: [layer + each for each in (end, *PARTS[end])] for layer, end in codes.items()}
    of_layers = {name for names in parts.values() for name in names}
    others = {name: info for name, info in loader.tensors.items() if name not in of_layers}
    if twice := next((layer for layer in codes if f"{layer}.weight" in others), None):
        name, codes_of = f"{twice}.weight", twice + codes[twice]
        what = f"the checkpoint is half quantized: it has {name!r} and also codes for it, {codes_of!r}"
        raise WeightError(what, where=loader.path, hint=_HALF_QUANTIZED)
    infos = dict(zip(codes, _infos(loader, read, codes), strict=True))

    def raw(layer: str) -> Bytes:
        with _fitting(layer, loader):
            return stored(read(loader, layer), infos[layer].dtype)

    made = (
        Composed.of(infos[layer], tuple(name for name in names if name in loader.tensors), partial(raw, layer))
        for layer, names in parts.items()
    )
    return LoaderOver(loader, others, made)


def _infos(loader: WeightLoader, read: Read, codes: dict[str, str]) -> Iterator[TensorInfo]:
    """The layers as tensors; those that become one stack get the type of the largest."""
    found: dict[str, tuple[DType, tuple[int, ...]]] = {}
    largest: dict[str, DType] = {}
    for layer in codes:
        with _fitting(layer, loader):
            each = read(loader, layer)
            dtype, shape = found[layer] = type_of(each), each.shape
        stack = _EXPERT.sub("*", layer)
        largest[stack] = max(dtype, largest.get(stack, dtype), key=_SIZES.index)
    for layer, (_, shape) in found.items():
        dtype = largest[_EXPERT.sub("*", layer)]
        yield TensorInfo(f"{layer}.weight", dtype, shape, dtype.size(shape))


@contextmanager
def _fitting(layer: str, loader: WeightLoader) -> Iterator[None]:
    """Names the layer in the error of parts that are missing or do not fit one another."""
    try:
        yield
    except RlxError:
        raise
    except KeyError as error:
        what = f"the checkpoint is half quantized: {layer!r} has no {error.args[0]!r}"
        raise WeightError(what, where=loader.path, hint=_HALF_QUANTIZED) from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        what = f"the parts of {layer!r} do not fit one another ({error})"
        hint = "the checkpoint is incomplete or damaged: download it again"
        raise WeightError(what, where=loader.path, hint=hint) from error


def _codes(loader: WeightLoader) -> Iterator[tuple[str, str]]:
    """(layer, ending) of the codes of each layer."""
    names = loader.tensors
    for name, info in names.items():
        for end in (".qweight", ".weight_packed"):
            if name.endswith(end):
                yield name.removesuffix(end), end
        if name.endswith(".weight") and (f"{name}.absmax" in names or (info.dtype is I8 and f"{name}_scale" in names)):
            yield name.removesuffix(".weight"), ".weight"
