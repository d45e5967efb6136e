"""Tensors as a tower's graphs take them, made of tensors as files store them: reshaped, reordered, or joined.

Vision stage, under `weights.py`. Nothing is read before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.ir.dtypes import F32
from rlx.weights.loader import TensorInfo, WeightLoader
from rlx.weights.mapped import Bytes
from rlx.weights.values import dequantize

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """One tensor.

    Attributes:
        info: type, shape and size as the graphs see them; the name is the file's.
        files: the tensors of the file that it is made of.
        read: returns its bytes, uint8 [nbytes]: a view of the file if nothing is reordered, else a copy.
    """

    info: TensorInfo
    files: tuple[str, ...]
    read: Callable[[], Bytes]

    @staticmethod
    def of(loader: WeightLoader, name: str) -> Stored:
        """The tensor `name` of a file, unchanged; a scalar has one element."""
        info = loader.tensors[name]
        return Stored(replace(info, shape=info.shape or (1,)), (name,), lambda: loader.raw(name))

    def reshaped(self, *shape: int) -> Stored:
        """The same elements in another shape; the tensor itself if their number differs, for the graph to refuse."""
        return replace(self, info=replace(self.info, shape=shape)) if prod(shape) == prod(self.info.shape) else self

    def rows(self, order: Values) -> Stored:
        """The rows of a matrix, or the elements of a vector, with these numbers; also of block formats."""
        info = self.info
        shape = (len(order), *info.shape[1:])
        size = info.dtype.size((1, *info.shape[1:])) if len(info.shape) > 1 else info.dtype.nbytes
        changed = replace(info, shape=shape, nbytes=size * len(order))
        return replace(self, info=changed, read=lambda: self.read().reshape(-1, size)[order].reshape(-1))

    def moved(self, shape: tuple[int, ...], move: Callable[[Values], Values]) -> Stored:
        """The elements in another order.

        A block format becomes float32, because its blocks cannot be taken apart.

        Args:
            move: maps an array of the stored shape to one of `shape`.
        """
        dtype = F32 if self.info.dtype.is_quantized else self.info.dtype
        info = replace(self.info, dtype=dtype, shape=shape, nbytes=dtype.size(shape))
        return replace(self, info=info, read=lambda: _bytes(move(self._elements())))

    def joined(self, other: Stored, shape: tuple[int, ...], axis: int) -> Stored:
        """Two tensors of equal shape and type, side by side along a new axis, as a tensor of `shape`."""
        both = (self, other)
        info = replace(self.info, shape=shape, nbytes=self.info.nbytes + other.info.nbytes)
        read = lambda: _bytes(np.stack([each._elements() for each in both], axis))  # noqa: E731
        return Stored(info, (*self.files, *other.files), read)

    def _elements(self) -> Values:
        """The elements in the stored shape: numbers, or for bf16 their bits."""
        info = self.info
        if info.dtype.is_quantized:
            return dequantize(self.read(), info.dtype, info.shape)
        return self.read().view(info.dtype.numpy or "uint8").reshape(info.shape)


def _bytes(values: Values) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
