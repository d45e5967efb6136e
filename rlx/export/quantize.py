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

from rlx.errors import ArgumentError, named_refusals
from rlx.export.hf import open_model
from rlx.export.mix import FileType, file_type, tensor_types
from rlx.export.model import ExportModel
from rlx.export.quantizers import Quantizer
from rlx.export.writer import Progress, check_output, write_gguf
from rlx.ir.dtypes import DType
from rlx.store.cache import CompileCache


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
    """

    path: Path
    target: FileType
    nbytes: int
    tensors: tuple[tuple[str, DType, DType], ...]
    left_out: tuple[str, ...]
    parameters: int

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
        progress: called with ("writing tensors", bytes done, bytes in all).
        cache: the cache for compiled encoders; by default the shared compile cache.

    Raises:
        ArgumentError: an unknown type, an `out` that must not be written, or a quantized source.
        OutputError, ResourceError: the file cannot be written, the disk is full, or memory runs out.
        WeightError: numbers that are not finite or beyond the type's range.
        ModelFileError: the source cannot be read.
    """
    chosen, path = file_type(target), Path(out)
    check_output(path, Path(source), force=force)
    with open_model(source) as model:
        types = tensor_types(
            model.tensors, model.arch, {key: entry[0] for key, entry in model.metadata.items()}, chosen
        )
        if not requantize:
            _check_source(model, types)
        with Quantizer(threads, cache) as quantizer:
            plan = [quantizer.planned(t, dtype) for t, dtype in zip(model.tensors, types, strict=True)]
            nbytes = write_gguf(path, model, plan, chosen.ggml, progress)
    tensors = tuple((t.name, t.dtype, dtype) for t, dtype in zip(model.tensors, types, strict=True))
    return Quantized(path, chosen, nbytes, tensors, model.left_out, sum(prod(t.shape) for t in model.tensors))


def _check_source(model: ExportModel, types: Iterable[DType]) -> None:
    for tensor, dtype in zip(model.tensors, types, strict=True):
        in_gguf = tensor.dtype.ggml is not None  # FP8 checkpoints may be requantized: some models exist only in FP8
        if tensor.dtype.is_quantized and in_gguf and tensor.dtype is not dtype:
            what = f"{tensor.name} is {tensor.dtype} already and would become {dtype}: the errors of both would add up"
            hint = "Take the F16 or BF16 file of the model, or requantize=True if there is none."
            raise ArgumentError(what, where=model.path, hint=hint)
