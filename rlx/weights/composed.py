"""Canonical tensors composed of tensors of a file: one as it is, several as a stack, or some rows of another.

Weights stage, under `model.py`. A tensor is read in pieces of one matrix with contiguous rows: a view of the file if
the rows are contiguous there, else a copy. So at most one matrix of a stack of experts is copied at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

import numpy as np

from rlx.errors import WeightError
from rlx.ir.dtypes import F32
from rlx.ir.stored import dequantize
from rlx.weights.loader import WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.names import stack_name


@dataclass(frozen=True, slots=True)
class Composed(ABC):
    """One canonical tensor.

    Attributes:
        info: type, shape and size as the model sees them; the name is the file's.
    """

    info: TensorInfo

    @abstractmethod
    def pieces(self) -> Iterator[Bytes]:
        """The bytes, uint8: one piece for [n, k] or [n], one piece for each matrix of [E, n, k]."""

    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """Names in the file of the tensors that it is made of."""

    def raw(self) -> Bytes:
        """All bytes, uint8 [nbytes]: a read-only view of the file for one piece, a copy for several."""
        pieces = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class Whole(Composed):
    """A tensor of the file; dimensions of size 1 may be added or removed."""

    loader: WeightLoader

    def raw(self) -> Bytes:
        return self.loader.raw(self.info.name)

    def pieces(self) -> Iterator[Bytes]:
        raw = self.raw()
        yield from raw.reshape(self.info.shape[0], -1) if len(self.info.shape) == 3 else (raw,)

    def files(self) -> tuple[str, ...]:
        return (self.info.name,)


@dataclass(frozen=True, slots=True)
class Stack(Composed):
    """Tensors of one shape and type, one after the other."""

    parts: tuple[Composed, ...]

    def pieces(self) -> Iterator[Bytes]:
        for part in self.parts:
            yield part.raw()

    def files(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.files())


@dataclass(frozen=True, slots=True)
class Rows(Composed):
    """Of every `period` rows of `source` those from `start` on; with `numbers` of the numbers in its rows."""

    source: Composed
    start: int
    count: int
    period: int
    numbers: bool = False

    def pieces(self) -> Iterator[Bytes]:
        shape, dtype = self.source.info.shape, self.info.dtype
        row = dtype.row_bytes(shape[-1]) if len(shape) > 1 and not self.numbers else dtype.nbytes
        for piece in self.source.pieces():
            rows = piece.reshape(-1, self.period, row)[:, self.start : self.start + self.count]
            yield rows.reshape(-1)

    def files(self) -> tuple[str, ...]:
        return self.source.files()


@dataclass(frozen=True, slots=True)
class Member(Composed):
    """One matrix of the stack `source`."""

    source: Composed
    index: int

    def pieces(self) -> Iterator[Bytes]:
        yield next(islice(self.source.pieces(), self.index, None))

    def files(self) -> tuple[str, ...]:
        return self.source.files()


@dataclass(frozen=True, slots=True)
class Turned(Composed):
    """The matrices of the stack `source`, each transposed; numbers in blocks become float32."""

    source: Composed

    def pieces(self) -> Iterator[Bytes]:
        info = self.source.info
        for piece in self.source.pieces():
            if info.dtype.is_quantized:
                piece = dequantize(piece, info.dtype, info.shape[1:]).view(np.uint8)
            yield np.ascontiguousarray(piece.reshape(*info.shape[1:], -1).swapaxes(0, 1)).reshape(-1)

    def files(self) -> tuple[str, ...]:
        return self.source.files()


@dataclass(frozen=True, slots=True)
class Cut(Composed):
    """A matrix as a stack of matrices, of so many of its rows each."""

    source: Composed

    def pieces(self) -> Iterator[Bytes]:
        yield from self.source.raw().reshape(self.info.shape[0], -1)

    def files(self) -> tuple[str, ...]:
        return self.source.files()


def cut(source: Composed, matrices: int) -> Cut:
    """A matrix [matrices * n, k] as a stack [matrices, n, k]."""
    rows, k = source.info.shape
    return Cut(replace(source.info, shape=(matrices, rows // matrices, k)), source)


def turned(source: Composed) -> Turned:
    """The matrices of a stack, each transposed."""
    info = source.info
    count, n, k = info.shape
    dtype = F32 if info.dtype.is_quantized else info.dtype
    return Turned(TensorInfo(info.name, dtype, (count, k, n), dtype.size((count, k, n))), source)


def whole(loader: WeightLoader, name: str, rank: int | None) -> Whole:
    """The tensor `name`, with `rank` dimensions where that is given: 1, or a matter of dimensions of 1."""
    info = loader.tensors[name]
    if rank is None or len(info.shape) == rank:
        return Whole(info, loader)
    if rank == 1:
        return Whole(replace(info, shape=(prod(info.shape),)), loader)
    kept = [info.shape[0], *(dim for dim in info.shape[1:] if dim != 1)]
    shape = (*[1] * (rank - len(kept)), *kept)
    return Whole(replace(info, shape=shape) if len(shape) == rank else info, loader)


def stack(parts: tuple[Composed, ...], where: object) -> Stack:
    """The parts as one tensor [number of parts, ...]; `WeightError` if they differ in shape or type."""
    first = parts[0].info
    for part in parts:
        if (part.info.shape, part.info.dtype) != (first.shape, first.dtype):
            found, expected = (f"{each.dtype}{list(each.shape)}" for each in (part.info, first))
            what = f"{part.info.name!r} is {found}, expected {expected} as {first.name!r}"
            raise WeightError(what, where=where, hint="all matrices of a stack have one shape and type")
    name = stack_name(tuple(part.info.name for part in parts))
    nbytes = sum(part.info.nbytes for part in parts)
    return Stack(TensorInfo(name, first.dtype, (len(parts), *first.shape), nbytes), parts)


def rows(name: str, source: Composed, start: int, count: int, period: int | None, where: object) -> Composed:
    """Some rows of `source`: of a vector [R], a matrix [R, k], or every matrix of a stack [E, R, k]; or one matrix of a
    stack, if that is what the rows are and the period is all its rows, E * R. A bias [E, R] is a stack of vectors.

    Raises:
        WeightError: the rows do not divide into periods, or a period does not hold the range.
    """
    info = source.info
    member = _member(info.shape, start, count, period)
    if member is not None:
        return Member(replace(info, shape=info.shape[1:], nbytes=info.nbytes // info.shape[0]), source, member)
    numbers = name.endswith(".bias") and len(info.shape) == 2
    axis = 1 if numbers else max(len(info.shape) - 2, 0)
    if len(info.shape) not in (1, 2, 3) or (len(info.shape) == 1 and info.dtype.is_quantized):
        what = f"{name} cannot be rows of {info.name!r}: {info.dtype}{list(info.shape)} has none"
        raise WeightError(what, where=where)
    total = info.shape[axis]
    period = total if period is None else period
    if not total or period < 1 or total % period or start < 0 or count < 1 or start + count > period:
        what = f"{name} cannot be rows {start} to {start + count} of every {period} of {info.name!r}, which has {total}"
        raise WeightError(what, where=where)
    shape = (*info.shape[:axis], total // period * count, *info.shape[axis + 1 :])
    nbytes = info.nbytes // total * shape[axis]
    return Rows(TensorInfo(info.name, info.dtype, shape, nbytes), source, start, count, period, numbers)


def _member(shape: tuple[int, ...], start: int, count: int, period: int | None) -> int | None:
    """The number of the matrix of a stack that these rows are; None if they are not exactly one."""
    if len(shape) != 3 or not count or (count, period) != (shape[1], prod(shape[:2])) or start % count:
        return None
    return start // count if 0 <= start < prod(shape[:2]) else None
