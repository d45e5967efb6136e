"""A tensor made of those of a file (whole, stacked, cut, transposed, in another order), and tensors by canonical names.

Weights stage, between the readers and `ModelWeights`, `rlx.vision.weights.TowerWeights` and `scaled_codes.py`. Nothing
is read before somebody asks for bytes, and what only cuts a file's bytes copies none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.closing import Closing
from rlx.errors import WeightError
from rlx.ir.dtypes import F32, DType
from rlx.ir.stored import FLOATS, dequantize, to_float32
from rlx.weights.mapped import Bytes, TensorInfo

if TYPE_CHECKING:
    from rlx.weights.loader import WeightLoader

Values = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True)
class Composed:
    """One tensor.

    Attributes:
        info: type, shape and size as the model sees them; the name is the file's.
        files: names in the file of the tensors that it is made of.
        pieces: makes the bytes, uint8: one piece for each matrix of [E, n, k], one for any other shape.
        read: returns all bytes, uint8 [nbytes], where that takes no copy of the pieces.
    """

    info: TensorInfo
    files: tuple[str, ...]
    pieces: Callable[[], Iterator[Bytes]]
    read: Callable[[], Bytes] | None = None

    @staticmethod
    def of(info: TensorInfo, files: tuple[str, ...], read: Callable[[], Bytes]) -> Composed:
        """The tensor whose bytes `read` returns."""

        def pieces() -> Iterator[Bytes]:
            yield from read().reshape(info.shape[0], -1) if len(info.shape) == 3 else (read(),)

        return Composed(info, files, pieces, read)

    @staticmethod
    def whole(loader: WeightLoader, name: str, rank: int | None = None) -> Composed:
        """The tensor `name` of a file, with `rank` dimensions where that is given: 1, or a matter of dimensions of 1.
        A scalar has one element.
        """
        info = loader.tensors[name]
        shape = info.shape or (1,)
        if rank == 1:
            shape = (prod(shape),)
        elif rank is not None and len(shape) != rank:
            kept = [shape[0], *(dim for dim in shape[1:] if dim != 1)]
            shape = (*[1] * (rank - len(kept)), *kept) if len(kept) <= rank else shape
        return Composed.of(replace(info, shape=shape), (name,), partial(loader.raw, name))

    def raw(self) -> Bytes:
        """All bytes, uint8 [nbytes]: a read-only view of the file for one piece, a copy for several."""
        if self.read is not None:
            return self.read()
        pieces = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def reshaped(self, *shape: int) -> Composed:
        """The same elements in another shape; the tensor itself if their number differs, for the graph to refuse."""
        if prod(shape) != prod(self.info.shape):
            return self
        return Composed.of(replace(self.info, shape=shape), self.files, self.raw)

    def ordered(self, order: Values) -> Composed:
        """The rows of a matrix, or the elements of a vector, with these numbers; also of block formats."""
        info = self.info
        shape = (len(order), *info.shape[1:])
        size = info.dtype.size((1, *info.shape[1:])) if len(info.shape) > 1 else info.dtype.nbytes
        changed = replace(info, shape=shape, nbytes=size * len(order))
        return Composed.of(changed, self.files, lambda: self.raw().reshape(-1, size)[order].reshape(-1))

    def moved(self, shape: tuple[int, ...], move: Callable[[Values], Values]) -> Composed:
        """The elements in another order.

        A block format becomes float32, because its blocks cannot be taken apart.

        Args:
            move: maps an array of the tensor's shape to one of `shape`.
        """
        info = self._movable(shape)
        return Composed.of(info, self.files, lambda: _moved(self.raw(), self.info.dtype, self.info.shape, move))

    def _movable(self, shape: tuple[int, ...]) -> TensorInfo:
        """The description with another shape, of a type whose elements can be moved."""
        dtype = F32 if self.info.dtype.is_quantized else self.info.dtype
        return replace(self.info, dtype=dtype, shape=shape, nbytes=dtype.size(shape))

    def cut(self, matrices: int) -> Composed:
        """A matrix [matrices * n, k] as a stack [matrices, n, k]."""
        rows, k = self.info.shape
        return self.reshaped(matrices, rows // matrices, k)

    def transposed(self) -> Composed:
        """The matrices of a stack, each transposed; numbers in blocks become float32."""
        count, n, k = self.info.shape

        def pieces() -> Iterator[Bytes]:
            return (_moved(piece, self.info.dtype, (n, k), np.transpose) for piece in self.pieces())

        return Composed(self._movable((count, k, n)), self.files, pieces)

    def rows(self, name: str, start: int, count: int, period: int | None, where: object) -> Composed:
        """Of every `period` rows those from `start` on: of a vector [R], a matrix [R, k], or every matrix of a stack
        [E, R, k]; or one matrix of a stack, if that is what the rows are and the period is all its rows, E * R. A bias
        [E, R] is a stack of vectors.

        Args:
            name: of the result, for messages.
            where: the file, for messages.

        Raises:
            WeightError: the rows do not divide into periods, or a period does not hold the range.
        """
        info = self.info
        member = _member(info.shape, start, count, period)
        if member is not None:
            seen = replace(info, shape=info.shape[1:], nbytes=info.nbytes // info.shape[0])
            return Composed(seen, self.files, lambda: islice(self.pieces(), member, member + 1))
        numbers = name.endswith(".bias") and len(info.shape) == 2
        axis = 1 if numbers else max(len(info.shape) - 2, 0)
        if len(info.shape) not in (1, 2, 3) or (len(info.shape) == 1 and info.dtype.is_quantized):
            what = f"{name} cannot be rows of {info.name!r}: {info.dtype}{list(info.shape)} has none"
            raise WeightError(what, where=where)
        total = info.shape[axis]
        size = total if period is None else period
        if not total or size < 1 or total % size or start < 0 or count < 1 or start + count > size:
            what = (
                f"{name} cannot be rows {start} to {start + count} of every {size} of {info.name!r}, which has {total}"
            )
            raise WeightError(what, where=where)
        shape = (*info.shape[:axis], total // size * count, *info.shape[axis + 1 :])
        row = info.dtype.row_bytes(shape[-1]) if len(shape) > 1 and not numbers else info.dtype.nbytes

        def pieces() -> Iterator[Bytes]:
            for piece in self.pieces():
                yield piece.reshape(-1, size, row)[:, start : start + count].reshape(-1)

        return Composed(
            TensorInfo(info.name, info.dtype, shape, info.nbytes // total * shape[axis]), self.files, pieces
        )


def _moved(raw: Bytes, dtype: DType, shape: tuple[int, ...], move: Callable[[Values], Values]) -> Bytes:
    values: Values = (
        raw.view(dtype.numpy or "uint8").reshape(shape) if not dtype.is_quantized else dequantize(raw, dtype, shape)
    )
    return np.ascontiguousarray(move(values)).reshape(-1).view(np.uint8)


def _member(shape: tuple[int, ...], start: int, count: int, period: int | None) -> int | None:
    """The number of the matrix of a stack that these rows are; None if they are not exactly one."""
    if len(shape) != 3 or not count or (count, period) != (shape[1], prod(shape[:2])) or start % count:
        return None
    return start // count if 0 <= start < prod(shape[:2]) else None


def stack(name: str, parts: Sequence[Composed], where: object) -> Composed:
    """Parts one after the other as one tensor [number of parts, ...]; `WeightError` if they differ in shape or type.

    Args:
        name: what the file's names of the parts are in one text.
        where: the file, for messages.
    """
    first = parts[0].info
    for part in parts:
        if (part.info.shape, part.info.dtype) != (first.shape, first.dtype):
            found, expected = (f"{each.dtype}{list(each.shape)}" for each in (part.info, first))
            what = f"{part.info.name!r} is {found}, expected {expected} as {first.name!r}"
            raise WeightError(what, where=where, hint="all matrices of a stack have one shape and type")
    info = TensorInfo(name, first.dtype, (len(parts), *first.shape), sum(part.info.nbytes for part in parts))
    return Composed(info, tuple(name for part in parts for name in part.files), lambda: (part.raw() for part in parts))


class CanonicalTensors(Closing, ABC):
    """The tensors of an open file under canonical names.

    Attributes:
        loader: the file.
    """

    loader: WeightLoader
    _found: Callable[[str], Composed | None]  # the tensor of a canonical name

    @abstractmethod
    def _tried(self, name: str) -> Sequence[str]:
        """The names that a tensor may have in the file, the usual one first."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this canonical name."""
        return self._found(name) is not None

    def info(self, name: str) -> TensorInfo:
        """Type, shape and size of a tensor, with its name in the file; `WeightError` if there is no such tensor."""
        return self._tensor(name).info

    def place(self, name: str) -> str:
        """For messages: the file, and the name that the tensor has or would have there."""
        found = self._found(name)
        return f"{self.loader.path}, {found.info.name if found else self._tried(name)[0]}"

    def raw(self, name: str) -> Bytes:
        """The bytes of a tensor, uint8 [nbytes].

        They are a read-only view of the file if the tensor is contiguous there, else a copy; `pieces` then takes less
        memory.

        Raises:
            WeightError: there is no such tensor.
        """
        return self._tensor(name).raw()

    def pieces(self, name: str) -> Iterator[Bytes]:
        """The bytes of a tensor matrix by matrix, uint8: E pieces for [E, n, k] in order, one for any other shape."""
        return self._tensor(name).pieces()

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A copy of an f32, f16 or bf16 tensor as float32, in its shape: for norms, biases and other small tensors.

        Raises:
            WeightError: there is no such tensor, or it is quantized.
        """
        info = self.info(name)
        if info.dtype not in FLOATS:
            raise WeightError(f"{name} has type {info.dtype}, expected f32, f16 or bf16", where=self.place(name))
        return to_float32(self.raw(name), info.dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Releases the pages of the file that hold the tensor; for a part of a tensor, those of the whole."""
        for file in self._tensor(name).files:
            self.loader.release(file)

    def close(self) -> None:
        """Closes the file."""
        self.loader.close()

    def _tensor(self, name: str) -> Composed:
        found = self._found(name)
        if found is None:
            tried = ", ".join(self._tried(name))
            raise WeightError(f"there is no tensor for {name}; names tried: {tried}", where=self.loader.path)
        return found
