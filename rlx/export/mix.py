"""Chooses the type of each tensor in a quantized file.

Part of the export stage. The rules are those of llama.cpp for the same file types (facts from its 0.3.36 Python
release, compared with it tensor by tensor), so that a file type has the size and quality that users expect:

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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlx.errors import ArgumentError
from rlx.ir.dtypes import BF16, F16, F32, F64, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType


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
    r"norm\.weight|ffn_gate_inp|ssm_conv1d|shortconv\.conv|altup_(?:correct|predict)_coef|position_embd|token_types"
)
_VALUES = re.compile(r"attn_(?:v|qkv|kv_b)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
_NARROW = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}  # types with blocks of 32 instead of 256
_70B_LAYERS = 80


class Tensor(Protocol):
    """The properties of a tensor that the rules use: `rlx.export.model.ExportTensor` and the like."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...


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
        return _fitting(self._wanted(tensor), tensor)

    def _wanted(self, tensor: Tensor) -> DType:
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
