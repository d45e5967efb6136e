"""A model's weights under canonical names.

Last step of the weights stage before packing: `ModelWeights` joins an open file (`loader.py`) with the names of a
family (`names.py`), so that builders and packers never see a file's own names, nor whether a tensor lies in the file as
one, as several, or inside another (`Composed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import weights
from rlx.closing import Closing
from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.dtypes import F32
from rlx.ir.stored import FLOATS, dequantize, to_float32
from rlx.weights.loader import WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.names import canonical_names, file_names, rank, stack_name


@dataclass(frozen=True, slots=True)
class Composed:
    """One canonical tensor. Two are equal if they are made of the same tensors in the same way.

    Attributes:
        info: type, shape and size as the model sees them; the name is the file's.
        files: names in the file of the tensors that it is made of.
        pieces: makes the bytes, uint8: one piece for [n, k] or [n], one piece for each matrix of [E, n, k].
        how: what is done with those tensors; empty for one as it is in the file.
        mapped: returns all bytes as the file has them, where nothing is done.
    """

    info: TensorInfo
    files: tuple[str, ...]
    pieces: Callable[[], Iterator[Bytes]] = field(compare=False)
    how: tuple[Any, ...] = ()
    mapped: Callable[[], Bytes] | None = field(default=None, compare=False)

    def raw(self) -> Bytes:
        """All bytes, uint8 [nbytes]: a read-only view of the file for one piece, a copy for several."""
        if self.mapped is not None:
            return self.mapped()
        pieces = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def whole(loader: WeightLoader, name: str, rank: int | None) -> Composed:
    """The tensor `name`, with `rank` dimensions where that is given: 1, or a matter of dimensions of 1."""
    info = loader.tensors[name]
    if rank == 1:
        info = replace(info, shape=(prod(info.shape),))
    elif rank is not None and len(info.shape) != rank:
        kept = [info.shape[0], *(dim for dim in info.shape[1:] if dim != 1)]
        shape = (*[1] * (rank - len(kept)), *kept)
        info = replace(info, shape=shape) if len(shape) == rank else info
    raw = partial(loader.raw, name)

    def pieces() -> Iterator[Bytes]:
        yield from raw().reshape(info.shape[0], -1) if len(info.shape) == 3 else (raw(),)

    return Composed(info, (name,), pieces, mapped=raw)


def stack(parts: tuple[Composed, ...], where: object) -> Composed:
    """Parts one after the other as one tensor [number of parts, ...]; `WeightError` if they differ in shape or type."""
    first = parts[0].info
    for part in parts:
        if (part.info.shape, part.info.dtype) != (first.shape, first.dtype):
            found, expected = (f"{each.dtype}{list(each.shape)}" for each in (part.info, first))
            what = f"{part.info.name!r} is {found}, expected {expected} as {first.name!r}"
            raise WeightError(what, where=where, hint="all matrices of a stack have one shape and type")
    name, nbytes = stack_name(tuple(part.info.name for part in parts)), sum(part.info.nbytes for part in parts)
    return Composed(
        TensorInfo(name, first.dtype, (len(parts), *first.shape), nbytes),
        tuple(name for part in parts for name in part.files),
        lambda: (part.raw() for part in parts),
        ("stack", *(part.how for part in parts)),
    )


def cut(source: Composed, matrices: int) -> Composed:
    """A matrix [matrices * n, k] as a stack [matrices, n, k]."""
    rows, k = source.info.shape
    info = replace(source.info, shape=(matrices, rows // matrices, k))
    return Composed(info, source.files, lambda: iter(source.raw().reshape(matrices, -1)), (source.how, "cut"))


def turned(source: Composed) -> Composed:
    """The matrices of a stack, each transposed; numbers in blocks become float32."""
    info = source.info
    count, n, k = info.shape
    dtype = F32 if info.dtype.is_quantized else info.dtype

    def pieces() -> Iterator[Bytes]:
        for piece in source.pieces():
            if info.dtype.is_quantized:
                piece = dequantize(piece, info.dtype, (n, k)).view(np.uint8)
            yield np.ascontiguousarray(piece.reshape(n, k, -1).swapaxes(0, 1)).reshape(-1)

    seen = TensorInfo(info.name, dtype, (count, k, n), dtype.size((count, k, n)))
    return Composed(seen, source.files, pieces, (source.how, "turned"))


def rows(name: str, source: Composed, start: int, count: int, period: int | None, where: object) -> Composed:
    """Of every `period` rows of `source` those from `start` on: of a vector [R], a matrix [R, k], or every matrix of a
    stack [E, R, k]; or one matrix of a stack, if that is what the rows are and the period is all its rows, E * R. A
    bias [E, R] is a stack of vectors.

    Raises:
        WeightError: the rows do not divide into periods, or a period does not hold the range.
    """
    info = source.info
    member = _member(info.shape, start, count, period)
    if member is not None:
        seen = replace(info, shape=info.shape[1:], nbytes=info.nbytes // info.shape[0])
        matrix = lambda: islice(source.pieces(), member, member + 1)  # noqa: E731
        return Composed(seen, source.files, matrix, (source.how, "member", member))
    numbers = name.endswith(".bias") and len(info.shape) == 2
    axis = 1 if numbers else max(len(info.shape) - 2, 0)
    if len(info.shape) not in (1, 2, 3) or (len(info.shape) == 1 and info.dtype.is_quantized):
        what = f"{name} cannot be rows of {info.name!r}: {info.dtype}{list(info.shape)} has none"
        raise WeightError(what, where=where)
    total = info.shape[axis]
    size = total if period is None else period
    if not total or size < 1 or total % size or start < 0 or count < 1 or start + count > size:
        what = f"{name} cannot be rows {start} to {start + count} of every {size} of {info.name!r}, which has {total}"
        raise WeightError(what, where=where)
    shape = (*info.shape[:axis], total // size * count, *info.shape[axis + 1 :])
    row = info.dtype.row_bytes(shape[-1]) if len(shape) > 1 and not numbers else info.dtype.nbytes

    def pieces() -> Iterator[Bytes]:
        for piece in source.pieces():
            yield piece.reshape(-1, size, row)[:, start : start + count].reshape(-1)

    seen = TensorInfo(info.name, info.dtype, shape, info.nbytes // total * shape[axis])
    return Composed(seen, source.files, pieces, (source.how, "rows", start, count, size))


def _member(shape: tuple[int, ...], start: int, count: int, period: int | None) -> int | None:
    """The number of the matrix of a stack that these rows are; None if they are not exactly one."""
    if len(shape) != 3 or not count or (count, period) != (shape[1], prod(shape[:2])) or start % count:
        return None
    return start // count if 0 <= start < prod(shape[:2]) else None


CHECKPOINT = "safetensors"  # the format whose tensors may be stored in parts


class ModelWeights(Closing):
    """The tensors of one model.

    Args:
        loader: an open file; closed with this object.
        family: a key of `rlx.models.registry.ARCHITECTURES`.

    Attributes:
        names: canonical name -> name in the file; for a stack of tensors their common name, with `*` for the number.

    Raises:
        UnsupportedModelError: an unknown family, or a weight stored as integers or f64.
        WeightError: two tensors of the file mean the same; a tensor of a stack is missing or unlike the others; FP8
            codes without fitting scales.
    """

    def __init__(self, loader: WeightLoader, family: str) -> None:
        if loader.format == CHECKPOINT:
            loader = weights.packed.repacked(loader)
        self.loader, self.family = loader, family
        found = canonical_names(loader, family)
        self._tensors = {canonical: _compose(loader, canonical, names) for canonical, names in found.items()}
        self.names = {canonical: tensor.info.name for canonical, tensor in self._tensors.items()}

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`: the two differ in row order and norm offsets, see `names.py`."""
        return self.loader.format

    @property
    def unused(self) -> list[str]:
        """Names of tensors in the file that belong to no weight of this family."""
        used = {name for tensor in self._tensors.values() for name in tensor.files}
        return [name for name in self.loader.tensors if name not in used]

    def define(
        self,
        name: str,
        source: str,
        start: int,
        count: int,
        period: int | None = None,
        turn: bool = False,
        matrices: int = 0,
    ) -> None:
        """Defines the tensor `name` as a part of `source`: of every `period` rows the `count` rows from `start` on.

        Args:
            name: a canonical name that is not in the file. The same definition may be repeated.
            source: the canonical name of a vector [R] (its numbers are the rows), a matrix [R, k] or a stack
                [E, R, k], whose every matrix is cut in the same way.
            period: R where it is None; E * R for one matrix of a stack.
            turn: transposes each matrix of the result with `matrices`; else of the source, unless it has `period` rows
                already: transformers writes some experts with their inputs first, and some not.
            matrices: makes a stack of so many matrices of the rows of a matrix.

        Raises:
            WeightError: there is no such source, its rows do not divide, or `name` is another tensor already.
        """
        parent = self._tensor(source)
        turns = turn and not matrices and not parent.info.shape[-2] == period != parent.info.shape[-1]
        view = rows(name, turned(parent) if turns else parent, start, count, period, self.loader.path)
        if matrices:
            view = turned(cut(view, matrices)) if turn else cut(view, matrices)
        if self._tensors.setdefault(name, view) != view:
            raise WeightError(f"{name} is there already, as {self.names[name]!r}", where=self.loader.path)
        self.names[name] = view.info.name

    def has(self, canonical: str) -> bool:
        """Whether the model has a tensor of this canonical name."""
        return canonical in self._tensors

    def info(self, canonical: str) -> TensorInfo:
        """Type, shape and size of a tensor, with its name in the file; `WeightError` if there is no such tensor."""
        return self._tensor(canonical).info

    def place(self, canonical: str) -> str:
        """For messages: the file, and the name that the tensor has or would have there."""
        name = self.names.get(canonical)
        if name is None:
            tried = file_names(canonical, self.family)
            name = tried[0] if self.format == "gguf" else tried[min(1, len(tried) - 1)]
        return f"{self.loader.path}, {name}"

    def raw(self, canonical: str) -> Bytes:
        """The bytes of a tensor, uint8 [nbytes].

        They are a read-only view of the file if the tensor is contiguous there, else a copy; `pieces` then takes less
        memory.

        Raises:
            WeightError: there is no such tensor.
        """
        return self._tensor(canonical).raw()

    def pieces(self, canonical: str) -> Iterator[Bytes]:
        """The bytes of a tensor matrix by matrix, uint8: E pieces for [E, n, k] in order, one for any other shape."""
        return self._tensor(canonical).pieces()

    def array(self, canonical: str) -> npt.NDArray[np.float32]:
        """A copy of an f32, f16 or bf16 tensor as float32, in its shape: for norms, biases and other small tensors.

        Raises:
            WeightError: there is no such tensor, or it is quantized.
        """
        info = self.info(canonical)
        if info.dtype not in FLOATS:
            raise WeightError(f"{canonical} has type {info.dtype}, expected f32, f16 or bf16", where=self.loader.path)
        return to_float32(self.raw(canonical), info.dtype).reshape(info.shape)

    def release(self, canonical: str) -> None:
        """Releases the pages of the file that hold the tensor; for a part of a tensor, those of the whole."""
        for name in self._tensor(canonical).files:
            self.loader.release(name)

    def close(self) -> None:
        """Closes the file."""
        self.loader.close()

    def _tensor(self, canonical: str) -> Composed:
        if canonical not in self._tensors:
            tried = ", ".join(file_names(canonical, self.family))
            raise WeightError(f"there is no tensor for {canonical}; names tried: {tried}", where=self.loader.path)
        return self._tensors[canonical]


def _compose(loader: WeightLoader, canonical: str, found: str | tuple[str, ...]) -> Composed:
    if isinstance(found, str):
        return _part(loader, canonical, found)
    return stack(tuple(_part(loader, canonical, name) for name in found), loader.path)


def _part(loader: WeightLoader, canonical: str, name: str) -> Composed:
    info = loader.tensors[name]
    if loader.format == CHECKPOINT:  # codes and their scales may be two tensors there
        if info.dtype is weights.quantization.CODES:
            return weights.scaled_codes.fp8(loader, name)
        if name.endswith(weights.scaled_codes.CODES_END):
            return weights.scaled_codes.mxfp4(loader, name)
    if not info.dtype.is_quantized and info.dtype not in FLOATS:
        hint = "use a checkpoint in BF16, F16 or F32, or a GGUF file of the model"
        raise UnsupportedModelError(f"tensor {info.name!r} has type {info.dtype}", where=loader.path, hint=hint)
    return whole(loader, name, rank(canonical))
