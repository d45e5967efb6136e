"""Importance matrices: of each linear layer the sums of squares of its inputs over a text, and files of them.

Beside the model files of the weights stage. The files are those of llama.cpp's `llama-imatrix`: GGUF with two tensors
for each weight, NAME.in_sum2 [matrices, columns] and NAME.counts [matrices, 1], both f32. A stack of experts has
several matrices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlx.errors import ModelFileError
from rlx.ir.dtypes import F32
from rlx.weights.gguf import GgufFile

Floats = npt.NDArray[np.float64]

SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass
class Sums:
    """The inputs of one matrix, or of each matrix of a stack.

    Attributes:
        squares: sums of squares, float64 [matrices, columns].
        counts: how many inputs each matrix has had, float64 [matrices].
    """

    squares: Floats
    counts: Floats

    @property
    def means(self) -> Floats:
        """Mean squares, float64 [matrices, columns]; 0 for a matrix without inputs."""
        return self.squares / np.maximum(self.counts, 1)[:, None]


Importance = dict[str, Sums]
"""By the GGUF names of the weights."""


def read_importance(path: str | os.PathLike[str]) -> Importance:
    """The importance matrix in a file.

    Raises:
        ModelFileError: it cannot be read, or is of another kind.
    """
    with GgufFile(Path(path)) as file:
        names = [name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)]
        if not names:
            hint = "make one with rlx imatrix, or llama-imatrix"
            raise ModelFileError("this is no importance matrix", where=path, hint=hint)
        return {name: _sums(file, name) for name in names}


def _sums(file: GgufFile, name: str) -> Sums:
    found = []
    for suffix in (SUMS, COUNTS):
        info = file.tensors.get(name + suffix)
        if info is None or info.dtype is not F32 or not 1 <= len(info.shape) <= 2:
            raise ModelFileError("it is no tensor of f32 with two axes", where=f"{file.path}, {name}{suffix}")
        values = file.raw(name + suffix).view(np.float32).astype(np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            what = "a number is negative or not finite"
            raise ModelFileError(what, where=f"{file.path}, {name}{suffix}", hint="the file is damaged: make it again")
        found.append(values.reshape(-1, info.shape[-1]))
    squares, counts = found[0], found[1].reshape(-1)
    if len(squares) != len(counts):
        raise ModelFileError(f"{len(squares)} matrices and {len(counts)} counts", where=f"{file.path}, {name}")
    return Sums(squares, counts)
