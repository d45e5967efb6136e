"""A model's weights under canonical names.

Last step of the weights stage before packing: `ModelWeights` joins an open file (`loader.py`) with the names of a
family (`names.py`), so that builders and packers never see a file's own names, nor whether a tensor lies in the file as
one, as several, or inside another (`composed.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rlx import weights
from rlx.closing import Closing
from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.stored import FLOATS, to_float32
from rlx.weights.composed import Composed, cut, rows, stack, turned, whole
from rlx.weights.loader import WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.names import FileNames, canonical_names, file_names, rank

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
        used = {name for tensor in self._tensors.values() for name in tensor.files()}
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
        whole = self._tensor(source)
        turns = turn and not matrices and not whole.info.shape[-2] == period != whole.info.shape[-1]
        view = rows(name, turned(whole) if turns else whole, start, count, period, self.loader.path)
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
        for name in self._tensor(canonical).files():
            self.loader.release(name)

    def close(self) -> None:
        """Closes the file."""
        self.loader.close()

    def _tensor(self, canonical: str) -> Composed:
        if canonical not in self._tensors:
            tried = ", ".join(file_names(canonical, self.family))
            raise WeightError(f"there is no tensor for {canonical}; names tried: {tried}", where=self.loader.path)
        return self._tensors[canonical]


def _compose(loader: WeightLoader, canonical: str, found: FileNames) -> Composed:
    parts = tuple(_part(loader, canonical, name) for name in found.names)
    return stack(parts, loader.path) if found.stacked else parts[0]


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
