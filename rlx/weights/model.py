"""A model's weights under canonical names.

Last step of the weights stage before packing: `ModelWeights` joins an open file (`loader.py`) with the names of a
family (`names.py`), so that builders and packers never see a file's own names, nor whether a tensor lies in the file as
one, as several, or inside another (`Composed`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import weights
from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.stored import FLOATS
from rlx.weights.composed import CanonicalTensors, Composed, stack
from rlx.weights.loader import WeightLoader
from rlx.weights.names import canonical_names, file_names, layer_of, rank, stack_name

CHECKPOINT = "safetensors"  # the format whose tensors may be stored in parts
_HEAD, _TABLE = "output.weight", "token_embd.weight"
_NO_WEIGHTS = (
    ".rotary_emb.inv_freq", ".attn_rot_embd.weight", ".masked_bias", ".input_scale", ".output_scale",
    ".activation_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale", ".input_zero_point",
    ".input_global_scale", ".output_zero_point",
)  # fmt: skip
_CHUNK = 1 << 24  # bytes compared at once


class ModelWeights(CanonicalTensors):
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
        self._found = self._tensors.get
        self._defined: dict[str, tuple[Any, ...]] = {}
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

    def unknown(self, layers: int | None = None) -> list[str]:
        """Names in the file of tensors of the first `layers` layers, or of all, that no layer of this family has.

        Not among them are numbers that a program computes itself, scales of activations and caches in 8 bits, and
        biases of zeros, which tools for GPTQ write for every linear layer.
        """
        found = {name: layer_of(name, self.family) for name in self.unused if not name.endswith(_NO_WEIGHTS)}
        named = [name for name, layer in found.items() if layer is not None and (layers is None or layer < layers)]
        return [name for name in named if not name.endswith(".bias") or self.loader.raw(name).any()]

    @property
    def sources(self) -> set[str]:
        """Canonical names of the tensors that others are parts of."""
        return {source for source, *_ in self._defined.values()}

    @property
    def has_own_head(self) -> bool:
        """Whether the head is another matrix than the embedding table, which some files store twice."""
        if not self.has(_HEAD) or not self.has(_TABLE):
            return self.has(_HEAD)
        head, table = self.info(_HEAD), self.info(_TABLE)
        if (head.shape, head.dtype) != (table.shape, table.dtype):
            return True
        pairs = [np.array_split(self.raw(name), head.nbytes // _CHUNK + 1) for name in (_HEAD, _TABLE)]
        return not all(map(np.array_equal, *pairs))

    def define(
        self,
        name: str,
        source: str,
        start: int,
        count: int,
        period: int | None = None,
        transposed: bool = False,
        matrices: int = 0,
        either: bool = False,
    ) -> None:
        """Defines the tensor `name` as a part of `source`: of every `period` rows the `count` rows from `start` on.

        Args:
            name: a canonical name that is not in the file. The same definition may be repeated.
            source: the canonical name of a vector [R] (its numbers are the rows), a matrix [R, k] or a stack
                [E, R, k], whose every matrix is cut in the same way.
            period: R where it is None; E * R for one matrix of a stack.
            transposed: transposes each matrix of the result with `matrices`; else of the source.
            matrices: makes a stack of so many matrices of the rows of a matrix.
            either: does not transpose a source that has `period` rows already: transformers writes some experts with
                their inputs first, and some not.

        Raises:
            WeightError: there is no such source, its rows do not divide, or `name` is another tensor already.
        """
        definition = (source, start, count, period, transposed, matrices, either)
        if name in self._tensors:
            if self._defined.get(name) != definition:
                raise WeightError(f"{name} is there already, as {self.names[name]!r}", where=self.loader.path)
            return
        parent = self._tensor(source)
        whole = transposed and not matrices and not (either and parent.info.shape[-2] == period)
        view = (parent.transposed() if whole else parent).rows(name, start, count, period, self.loader.path)
        if matrices:
            view = view.cut(matrices).transposed() if transposed else view.cut(matrices)
        self._tensors[name], self._defined[name], self.names[name] = view, definition, view.info.name

    def _tried(self, name: str) -> list[str]:
        own, *others = file_names(name, self.family)
        return [own, *others] if self.format == "gguf" else [*others, own]


def _compose(loader: WeightLoader, canonical: str, found: str | tuple[str, ...]) -> Composed:
    if isinstance(found, str):
        return _part(loader, canonical, found)
    return stack(stack_name(found), [_part(loader, canonical, name) for name in found], loader.path)


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
    return Composed.whole(loader, name, rank(canonical))
