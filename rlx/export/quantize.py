"""`quantize`: converts a model file to a smaller GGUF file.

The export stage in full: every tensor of the source gets a type by its name, shape and layer, and is read, encoded and
written, one after the other. Memory: the largest tensor in float32, and a slice of its bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, named_refusals
from rlx.export.hf import open_model
from rlx.export.mix import FileType, file_type, tensor_types
from rlx.export.model import ExportModel
from rlx.export.quantizers import ENCODERS, Quantizer
from rlx.export.writer import Progress, check_output, write_gguf
from rlx.ir.dtypes import DType
from rlx.store.cache import CompileCache
from rlx.weights.importance import Importance, read_importance

LEAST = 1e-3  # of the mean weight: also what no input has reached yet is not rounded anyhow


@dataclass(frozen=True)
class Quantized:
    """The result of `quantize`.

    Attributes:
        path: the file.
        target: its type.
        nbytes: its size.
        tensors: (name, type in the source, type in the file) of each tensor, in the order of the file.
        left_out: names in the source of tensors that are not part of the language model.
        parameters: total number of values.
        weighed: how many tensors were rounded by their importance.
    """

    path: Path
    target: FileType
    nbytes: int
    tensors: tuple[tuple[str, DType, DType], ...]
    left_out: tuple[str, ...]
    parameters: int
    weighed: int = 0

    @property
    def types(self) -> Counter[DType]:
        """How many tensors have each type."""
        return Counter(dtype for _, _, dtype in self.tensors)

    @property
    def bits(self) -> float:
        """Bits of the file per value."""
        return 8 * self.nbytes / self.parameters


@named_refusals()
def quantize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    target: str,
    *,
    threads: int | None = None,
    force: bool = False,
    requantize: bool = False,
    imatrix: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    cache: CompileCache | None = None,
) -> Quantized:
    """Writes a model as a GGUF file of another type.

    Args:
        source: a GGUF file, or a folder with safetensors, configuration and tokenizer.
        out: the file to write; it is created only when it is complete.
        target: a name in `rlx.export.mix.FILE_TYPES`, in upper or lower case.
        threads: number of workers; by default the physical cores that this process may use.
        force: replaces `out` if it exists.
        requantize: accepts tensors that are already quantized; the errors of both quantizations add up.
        imatrix: a file of `rlx imatrix` or llama.cpp's `llama-imatrix`: the errors of K types, Q4_0, Q5_0 and Q5_1 then
            count as much as the inputs that they are multiplied by.
        progress: called with ("writing tensors", bytes done, bytes in all).
        cache: the cache for compiled encoders; by default the shared compile cache.

    Raises:
        ArgumentError: an unknown type, an `out` that must not be written, a quantized source, or an importance matrix
            of another model.
        OutputError, ResourceError: the file cannot be written, the disk is full, or memory runs out.
        WeightError: numbers that are not finite or beyond the type's range.
        ModelFileError: the source cannot be read.
    """
    chosen, path = file_type(target), Path(out)
    check_output(path, Path(source), force=force)
    importance = {} if imatrix is None else read_importance(imatrix)
    with open_model(source) as model:
        types = tensor_types(
            model.tensors, model.arch, {key: entry[0] for key, entry in model.metadata.items()}, chosen
        )
        if not requantize:
            _check_source(model, types)
        weights = _weights(model, types, importance, imatrix)
        with Quantizer(threads, cache) as quantizer:
            pairs = zip(model.tensors, types, strict=True)
            plan = [quantizer.planned(t, dtype, weights.get(t.name)) for t, dtype in pairs]
            nbytes = write_gguf(path, model, plan, chosen.ggml, progress)
    tensors = tuple((t.name, t.dtype, dtype) for t, dtype in zip(model.tensors, types, strict=True))
    count = sum(prod(t.shape) for t in model.tensors)
    return Quantized(path, chosen, nbytes, tensors, model.left_out, count, len(weights))


def _weights(
    model: ExportModel, types: Iterable[DType], importance: Importance, where: object
) -> dict[str, npt.NDArray[np.float32]]:
    """How much the errors of each column of a tensor count, for tensors that are rounded by importance.

    Raises:
        ArgumentError: the importance matrix fits no tensor, or one of another shape.
    """
    found = {}
    for tensor, dtype in zip(model.tensors, types, strict=True):
        sums = importance.get(tensor.name)
        if sums is None or dtype not in ENCODERS or ENCODERS[dtype].by_importance is None:
            continue
        matrices = prod(tensor.shape[:-2])
        if sums.squares.shape != (matrices, tensor.shape[-1]):
            what = f"{tensor.name} has the shape {list(tensor.shape)}, and its sums {list(sums.squares.shape)}"
            raise ArgumentError(what, where=where, hint="Make an importance matrix of this model.")
        means = sums.means / np.maximum(sums.means.mean(1, keepdims=True), 1e-30)
        found[tensor.name] = (means + LEAST).astype(np.float32)
    if importance and not importance.keys() & {tensor.name for tensor in model.tensors}:
        what = "the importance matrix has none of the model's tensors"
        raise ArgumentError(what, where=where, hint="Make an importance matrix of this model.")
    return found


def _check_source(model: ExportModel, types: Iterable[DType]) -> None:
    for tensor, dtype in zip(model.tensors, types, strict=True):
        in_gguf = tensor.dtype.ggml is not None  # FP8 checkpoints may be requantized: some models exist only in FP8
        if tensor.dtype.is_quantized and in_gguf and tensor.dtype is not dtype:
            what = f"{tensor.name} is {tensor.dtype} already and would become {dtype}: the errors of both would add up"
            hint = "Take the F16 or BF16 file of the model, or requantize=True if there is none."
            raise ArgumentError(what, where=model.path, hint=hint)
