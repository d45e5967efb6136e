"""Checkpoints by GPTQ, AWQ, compressed-tensors or bitsandbytes, as tensors that the model can use.

Weights stage, under `model.py`; `schemes.py` reads the layers. A linear layer is several tensors there: codes, several
in an integer, scales, zero points, and which group an input belongs to. Here it is one tensor `weight`: in the smallest
of Q4_0, Q5_0 and Q8_0 in which the numbers are exact, else in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rlx.errors import RlxError, UnsupportedModelError, WeightError
from rlx.ir.dtypes import F32, I8, Q4_0, Q5_0, Q8_0, DType
from rlx.weights.loader import LoaderOver, WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.quantization import scheme_of
from rlx.weights.schemes import PARTS, READERS, FloatLayer, Layer, Read

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
    return Repacked(loader, read, codes)


class Repacked(LoaderOver):
    """A `WeightLoader` whose linear layers are one tensor each.

    Args:
        loader: the checkpoint; closed with this object.
        read: reads a layer, by the name without its ending.
        codes: layer -> ending of its codes.
    """

    def __init__(self, loader: WeightLoader, read: Read, codes: dict[str, str]) -> None:
        super().__init__(loader, {})
        self._read = read
        parts = {layer + each for layer, end in codes.items() for each in (end, *PARTS[end])}
        self._layers = {f"{layer}.weight": (layer, end) for layer, end in codes.items()}
        others = {name: info for name, info in loader.tensors.items() if name not in parts}
        if twice := next((name for name in self._layers if name in others), None):
            codes_of = "".join(self._layers[twice])
            what = f"the checkpoint is half quantized: it has {twice!r} and also codes for it, {codes_of!r}"
            raise WeightError(what, where=loader.path, hint=_HALF_QUANTIZED)
        self.tensors = {**others, **{info.name: info for info in self._infos(codes)}}

    def raw(self, name: str) -> Bytes:
        if name not in self._layers:
            return self.loader.raw(name)
        with self._fitting(self._layers[name][0]) as layer:
            return stored(self._read(self.loader, layer), self.tensors[name].dtype)

    def release(self, name: str) -> None:
        layer, end = self._layers.get(name, (name, ""))
        for each in (end, *PARTS.get(end, ())):
            if layer + each in self.loader.tensors:
                self.loader.release(layer + each)

    def _infos(self, codes: dict[str, str]) -> Iterator[TensorInfo]:
        """The layers as tensors; those that become one stack get the type of the largest."""
        found: dict[str, tuple[DType, tuple[int, ...]]] = {}
        largest: dict[str, DType] = {}
        for name in codes:
            with self._fitting(name) as layer:
                each = self._read(self.loader, layer)
                dtype, shape = found[name] = type_of(each), each.shape
            stack = _EXPERT.sub("*", name)
            largest[stack] = max(dtype, largest.get(stack, dtype), key=_SIZES.index)
        for name, (_, shape) in found.items():
            dtype = largest[_EXPERT.sub("*", name)]
            yield TensorInfo(f"{name}.weight", dtype, shape, dtype.size(shape))

    @contextmanager
    def _fitting(self, layer: str) -> Iterator[str]:
        try:
            yield layer
        except RlxError:
            raise
        except KeyError as error:
            what = f"the checkpoint is half quantized: {layer!r} has no {error.args[0]!r}"
            raise WeightError(what, where=self.loader.path, hint=_HALF_QUANTIZED) from error
        except (ValueError, IndexError, ZeroDivisionError) as error:
            what = f"the parts of {layer!r} do not fit one another ({error})"
            hint = "the checkpoint is incomplete or damaged: download it again"
            raise WeightError(what, where=self.loader.path, hint=hint) from error


def _codes(loader: WeightLoader) -> Iterator[tuple[str, str]]:
    """(layer, ending) of the codes of each layer."""
    names = loader.tensors
    for name, info in names.items():
        for end in (".qweight", ".weight_packed"):
            if name.endswith(end):
                yield name.removesuffix(end), end
        if name.endswith(".weight") and (f"{name}.absmax" in names or (info.dtype is I8 and f"{name}_scale" in names)):
            yield name.removesuffix(".weight"), ".weight"
