"""Checkpoints in 4 or 8 bits by GPTQ, AWQ, compressed-tensors or bitsandbytes, as tensors that the model can use.

Weights stage, under `model.py`. A linear layer is several tensors there: codes, several in an integer, scales, zeros,
and which group an input belongs to. Here it is one tensor `weight`: in Q4_0 or Q8_0, where the numbers are exact in it
(no zeros, groups of whole blocks in order, scales that float16 holds), else in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.dtypes import F32, I8, Q4_0, Q8_0, DType
from rlx.ir.stored import FLOATS, to_float32
from rlx.weights.loader import LoaderOver, WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which output each four bits of an integer belong to
_BLOCK = Q4_0.block
_PARTS = {  # ending of the codes -> endings of what else belongs to them
    ".qweight": (".qzeros", ".scales", ".g_idx"),
    ".weight_packed": (".weight_scale", ".weight_shape", ".weight_g_idx"),
    ".weight": (".weight_scale", ".weight.absmax", ".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4"),
}


@dataclass(frozen=True)
class Layer:
    """The weights of a linear layer: code times the scale of its group.

    Attributes:
        codes: reads the integers [n, k], the zero subtracted.
        scales: [n, groups].
        groups: the group of each input, [k].
        bits: 4 or 8.
        centered: the codes are signed integers of `bits`.
    """

    codes: Callable[[], Array]
    scales: Floats
    groups: Array
    bits: int
    centered: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), len(self.groups)

    @property
    def dtype(self) -> DType:
        """The format that holds these numbers exactly."""
        if not self.centered or len(self.groups) % _BLOCK:
            return F32
        blocks = self.groups.reshape(-1, _BLOCK)
        exact = (blocks == blocks[:, :1]).all() and (self.scales == self.scales.astype(np.float16)).all()
        return (Q4_0 if self.bits == 4 else Q8_0) if exact else F32

    def stored(self) -> Bytes:
        """The bytes in that format; in blocks a float16 scale, then the codes of 32 numbers."""
        codes = self.codes()
        if codes.shape != self.shape:
            raise ValueError(f"codes of shape {list(codes.shape)}, expected {list(self.shape)}")
        if self.dtype is F32:
            values = codes.astype(np.float32) * self.scales[:, self.groups]
            return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        codes = codes.reshape(-1, _BLOCK)
        scales = self.scales[:, self.groups[::_BLOCK]].astype("<f2").reshape(-1, 1).view(np.uint8)
        raised = (codes + (8 if self.bits == 4 else 0)).astype(np.int8).view(np.uint8)
        # Of 4 bits the first half of a block lies in the low halves of its bytes.
        half = _BLOCK // 2
        packed = raised if self.bits == 8 else raised[:, :half] | raised[:, half:] << np.uint8(4)
        return np.concatenate([scales, packed], axis=1).reshape(-1)


def repacked(loader: WeightLoader) -> WeightLoader:
    """The checkpoint with one tensor for each linear layer; the loader itself, if it is not stored in parts."""
    scheme = loader.metadata.get("quantization_config") if loader.format == "safetensors" else None
    read = _READERS.get(str(scheme.get("quant_method"))) if isinstance(scheme, Mapping) else None
    return loader if read is None or not _codes(loader) else Repacked(loader, read)


class Repacked(LoaderOver):
    """A `WeightLoader` whose linear layers are one tensor each.

    Args:
        loader: the checkpoint; closed with this object.
        read: reads a layer, by the name without its ending.
    """

    def __init__(self, loader: WeightLoader, read: Callable[[WeightLoader, str], Layer | Floats]) -> None:
        super().__init__(loader, {})
        self._read = read
        codes = {name.removesuffix(end): end for name, end in _codes(loader)}
        parts = {layer + each for layer, end in codes.items() for each in (end, *_PARTS[end])}
        self.tensors = {
            **{name: info for name, info in loader.tensors.items() if name not in parts},
            **{f"{layer}.weight": self._info(layer) for layer in codes},
        }
        self._layers = {f"{layer}.weight": (layer, codes[layer]) for layer in codes}

    def raw(self, name: str) -> Bytes:
        if name not in self._layers:
            return self.loader.raw(name)
        layer = self._layers[name][0]
        found = self._layer(layer)
        with self._fitting(layer):
            return found.stored() if isinstance(found, Layer) else found.reshape(-1).view(np.uint8)

    def release(self, name: str) -> None:
        layer, end = self._layers.get(name, (name, ""))
        for each in (end, *_PARTS.get(end, ())):
            if layer + each in self.loader.tensors:
                self.loader.release(layer + each)

    def _layer(self, layer: str) -> Layer | Floats:
        with self._fitting(layer):
            return self._read(self.loader, layer)

    @contextmanager
    def _fitting(self, layer: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            what = f"the parts of {layer!r} do not fit one another ({error})"
            hint = "the checkpoint is incomplete or damaged: download it again"
            raise WeightError(what, where=self.loader.path, hint=hint) from error

    def _info(self, layer: str) -> TensorInfo:
        found = self._layer(layer)
        dtype = found.dtype if isinstance(found, Layer) else F32
        return TensorInfo(f"{layer}.weight", dtype, found.shape, dtype.size(found.shape))


def _codes(loader: WeightLoader) -> list[tuple[str, str]]:
    """(name, ending) of the codes of each layer."""
    names = loader.tensors
    found = [(name, end) for name in names for end in (".qweight", ".weight_packed") if name.endswith(end)]
    for name, info in names.items():
        if name.endswith(".weight") and (f"{name}.absmax" in names or (info.dtype is I8 and f"{name}_scale" in names)):
            found.append((name, ".weight"))
    return found


# -- the schemes ------------------------------------------------------------------------------------------------------


def _array(loader: WeightLoader, name: str) -> Array:
    info = loader.tensors[name]
    if info.dtype in FLOATS:
        return to_float32(loader.raw(name), info.dtype).reshape(info.shape)
    return loader.raw(name).view(str(info.dtype.numpy)).reshape(info.shape)


def _nibbles(words: Array) -> Array:
    """int32 [..., m] -> [..., m, 8]: four bits each, the lowest first."""
    return (words[..., None].view(np.uint32) >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.int16)


def _groups(loader: WeightLoader, name: str, k: int, count: int) -> Array:
    """The group of each of k inputs: what the tensor says, else `count` groups in order."""
    return _array(loader, name) if name in loader.tensors else np.arange(k) // (k // count)


def _awq(loader: WeightLoader, layer: str) -> Layer:
    order, scales = np.argsort(_AWQ_ORDER), _array(loader, f"{layer}.scales")

    def read(part: str) -> Array:
        found = _nibbles(_array(loader, f"{layer}.{part}"))
        return found[..., order].reshape(len(found), -1)

    zeros, k = read("qzeros"), loader.tensors[f"{layer}.qweight"].shape[0]
    groups = _groups(loader, "", k, len(scales))
    return Layer(lambda: (read("qweight") - zeros[groups]).T, scales.T, groups, 4, bool((zeros == 8).all()))


def _gptq(loader: WeightLoader, layer: str) -> Layer:
    scales = _array(loader, f"{layer}.scales")
    zeros = _nibbles(_array(loader, f"{layer}.qzeros")).reshape(len(scales), -1)
    if loader.metadata["quantization_config"].get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1  # stored less 1
    words, n = loader.tensors[f"{layer}.qweight"].shape
    groups = _groups(loader, f"{layer}.g_idx", 8 * words, len(scales))

    def codes() -> Array:
        found = _nibbles(_array(loader, f"{layer}.qweight")).swapaxes(1, 2).reshape(-1, n)
        return (found - zeros[groups]).T

    return Layer(codes, scales.T, groups, 4, bool((zeros == 8).all()))


def _compressed(loader: WeightLoader, layer: str) -> Layer:
    packed, name = f"{layer}.weight_packed" in loader.tensors, f"{layer}.weight"
    n, k = _array(loader, f"{name}_shape").tolist() if packed else loader.tensors[name].shape
    scales = _array(loader, f"{name}_scale").reshape(n, -1)
    groups = _groups(loader, f"{name}_g_idx", k, scales.shape[1])

    def codes() -> Array:
        if not packed:
            return _array(loader, name)
        return _nibbles(_array(loader, f"{name}_packed")).reshape(n, -1)[:, :k] - 8

    return Layer(codes, scales, groups, 4 if packed else 8)


def _nf4(loader: WeightLoader, layer: str) -> Floats:
    name = f"{layer}.weight"
    state = json.loads(loader.raw(f"{name}.quant_state.bitsandbytes__nf4").tobytes())
    if "nested_blocksize" in state:
        hint = "use the BF16 checkpoint or a GGUF file of the model"
        raise UnsupportedModelError("bitsandbytes with double quantization", where=loader.path, hint=hint)
    packed, table = loader.raw(name), _array(loader, f"{name}.quant_map")
    values = table[np.stack([packed >> 4, packed & 15], 1).reshape(-1)]
    shape = tuple(state["shape"])
    blocks = values[: prod(shape)].reshape(-1, state["blocksize"]) * _array(loader, f"{name}.absmax")[:, None]
    return np.ascontiguousarray(blocks.reshape(shape), np.float32)


_READERS: dict[str, Callable[[WeightLoader, str], Layer | Floats]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _nf4,
}
