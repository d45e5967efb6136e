"""`quantize`: converts a model file to a smaller GGUF file.

The export stage in full: every tensor of the source gets a type by its name, shape and layer, and is read, encoded and
written, one after the other. Memory: the largest tensor in float32, and a slice of its bytes. The rules for types are
those of llama.cpp for the same file types (facts from its 0.3.36 Python release, compared with it tensor by tensor), so
that a file type has the size and quality that users expect:

- Only matrices whose name ends in "weight" are quantized; norms, routers, convolutions and other small ones are not.
- The output matrix, or the token table if it is tied, gets six bits or more.
- In the K_M mixes value and down projections get six bits in the first and the last eighth of the layers and in every
  third one between.
- Models with 8 experts use more bits for attention, which has few weights; those with 80 layers for values.
- Rows that are not a multiple of a type's block get a type with smaller blocks, or else F16. The one difference: a
  matrix in BF16 stays BF16 then, which takes as much room and rounds nothing.
- In files of vision towers (mmproj) the rules are the same; there patches and positions keep their type, and K_M mixes
  give all down projections six bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, named_refusals
from rlx.export.hf import open_model
from rlx.export.model import ExportModel, ExportTensor, Progress, Written, check_output, write_model
from rlx.export.quantizers import ENCODERS, Quantizer
from rlx.ir.dtypes import BF16, F16, F32, F64, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType
from rlx.store.cache import CompileCache
from rlx.weights import TensorInfo
from rlx.weights.importance import Importance, read_importance


@dataclass(frozen=True)
class FileType:
    """A file type, by its common name.

    Attributes:
        name: as on the command line.
        ggml: its number, `general.file_type` (`gguf.LlamaFileType`).
        dtype: the type of most matrices.
        mixed: whether some layers get six bits.
    """

    name: str
    ggml: int
    dtype: DType
    mixed: bool = False


FILE_TYPES: dict[str, FileType] = {
    t.name: t
    for t in (
        FileType("F32", 0, F32),
        FileType("F16", 1, F16),
        FileType("BF16", 32, BF16),
        FileType("Q8_0", 7, Q8_0),
        FileType("Q6_K", 18, Q6_K),
        FileType("Q5_K_M", 17, Q5_K, mixed=True),
        FileType("Q4_K_M", 15, Q4_K, mixed=True),
        FileType("Q4_0", 2, Q4_0),
    )
}

# Parts of the names of matrices that keep their type: tiny ones, tables, or inputs of ops without block formats.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight"
    r"|\.position_embd|\.patch_embd|\.patch_merger|\.rel_pos|attn_rel_b\.weight|^position_embd\.weight$"
    r"|^token_types\.weight$|indexer\.[qk]_proj\.weight"
)
# Those of them that readers expect in float32, as they do all one-dimensional tensors.
_SMALL = re.compile(
    r"norm\.weight|ffn_gate_inp|ssm_(?:conv1d|a$|d$)|shortconv\.conv|altup_(?:correct|predict)_coef|position_embd"
    r"|token_types|\.bias$"
)
_VALUES = re.compile(r"attn_(?:v|qkv|kv_b)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
_NARROW = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}  # types with blocks of 32 instead of 256
_70B_LAYERS = 80

Tensor = ExportTensor | TensorInfo


def file_type(name: str) -> FileType:
    """The file type of this name, in upper or lower case.

    Raises:
        ArgumentError: there is none.
    """
    found = FILE_TYPES.get(name.upper())
    if found is None:
        raise ArgumentError(
            f"{name!r} is not a file type", where="TYPE", hint=f"Choose one of {', '.join(FILE_TYPES)}."
        )
    return found


def tensor_types(tensors: Sequence[Tensor], arch: str, metadata: Mapping[str, Any], target: FileType) -> list[DType]:
    """The type of each tensor in a file of type `target`, in the order of `tensors`.

    Args:
        tensors: all tensors of the model; their order does not matter.
        arch: the model's architecture.
        metadata: GGUF keys with their values; the rules use the numbers of layers, experts and heads.
    """
    mix = _Mix(tensors, arch, metadata, target)
    order = sorted(range(len(tensors)), key=lambda i: (_layer(tensors[i].name), tensors[i].name))
    types = {i: mix.type_of(tensors[i]) for i in order}
    return [types[i] for i in range(len(tensors))]


def is_kept(tensor: Tensor) -> bool:
    """Whether a tensor is not quantized in any file type."""
    dims = len(tensor.shape) - next((i for i, n in enumerate(tensor.shape) if n != 1), len(tensor.shape))
    number = tensor.dtype.is_float or tensor.dtype.is_quantized
    return not number or dims < 2 or not tensor.name.endswith("weight") or _KEPT.search(tensor.name) is not None


def kept_type(tensor: Tensor) -> DType:
    """The type of a tensor that is not quantized: its own if GGUF has it; float32 for small 16-bit ones."""
    converted = tensor.dtype.ggml is None  # FP8 of a checkpoint
    if tensor.dtype in (F16, BF16, F64) or converted:
        small = len(tensor.shape) < 2 or _SMALL.search(tensor.name) is not None
        return F32 if small else BF16 if converted else tensor.dtype
    return tensor.dtype


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


class _Mix:
    """The rules for one model, with counters of the tensor kinds whose type depends on the layer.

    Layers are counted by kind of tensor: the third value projection counts as the third, whatever its layer's number.
    """

    def __init__(self, tensors: Sequence[Tensor], arch: str, metadata: Mapping[str, Any], target: FileType) -> None:
        def number(key: str) -> int:
            value = metadata.get(f"{arch}.{key}", 0)
            return int(value) if isinstance(value, int) else 0

        self.target = target
        self.tied = all(tensor.name != "output.weight" for tensor in tensors)
        self.experts, self.layers = number("expert_count"), number("block_count")
        grouped = number("attention.head_count") != number("attention.head_count_kv")
        self.is_70b = self.layers == _70B_LAYERS and (arch == "qwen2" or (arch == "llama" and grouped))
        self.values = sum(_VALUES.search(tensor.name) is not None for tensor in tensors)
        self.values_seen = self.downs_seen = 0

    def type_of(self, tensor: Tensor) -> DType:
        """The type of the next tensor; tensors come in the order of layers."""
        if is_kept(tensor):
            return kept_type(tensor)
        if not self.target.dtype.is_quantized:
            return self.target.dtype
        return _fitting(self._preferred(tensor), tensor)

    def _preferred(self, tensor: Tensor) -> DType:
        name = tensor.name
        if name == "output.weight" or (self.tied and name in _TABLES):
            return self._head(tensor.shape[-1])
        if name in _TABLES:
            return self.target.dtype
        if _VALUES.search(name):
            return self._value()
        if "attn_k.weight" in name and self.experts == 8:
            return Q8_0
        if "attn_output.weight" in name and self.experts == 8 and self.target.name == "Q4_K_M":
            return Q5_K
        return self._down(name) if "ffn_down" in name else self.target.dtype

    def _head(self, columns: int) -> DType:
        return Q8_0 if self.target.dtype is Q8_0 or columns % self.target.dtype.block else Q6_K

    def _value(self) -> DType:
        at, self.values_seen = self.values_seen, self.values_seen + 1
        if self.experts == 8:
            return Q8_0
        if self.target.mixed and more_bits(at, self.values):
            return Q6_K
        return Q5_K if self.is_70b and self.target.dtype is Q4_K else self.target.dtype

    def _down(self, name: str) -> DType:
        at, self.downs_seen = self.downs_seen, self.downs_seen + 1
        at = _layer(name) if self.experts > 1 else at  # a layer has several; some files store one per expert
        return Q6_K if self.target.mixed and more_bits(at, self.layers) else self.target.dtype


def more_bits(layer: int, layers: int) -> bool:
    """Whether a K_M mix uses six bits in this layer."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fitting(dtype: DType, tensor: Tensor) -> DType:
    """The type itself, or one whose blocks divide the row length."""
    columns = tensor.shape[-1]
    if columns % dtype.block:
        dtype = _NARROW.get(dtype, dtype)
    if columns % dtype.block:
        return BF16 if tensor.dtype is BF16 else F16
    return dtype


LEAST = 1e-3  # of the mean weight: also what no input has reached yet is not rounded anyhow


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
) -> Written:
    """Writes a model as a GGUF file of another type.

    Args:
        source: a GGUF file, or a folder with safetensors, configuration and tokenizer.
        out: the file to write; it is created only when it is complete.
        target: a name in `rlx.export.quantize.FILE_TYPES`, in upper or lower case.
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
            done = write_model(path, model, plan, chosen.name, chosen.ggml, force=force, progress=progress)
    return replace(done, weighed=len(weights))


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
