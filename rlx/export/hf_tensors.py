"""Converts the tensors of a checkpoint to those of GGUF: names, stacks, order of elements, values.

Export stage, read by `hf.py`; `rlx.weights.names` translates the names. Reordering works on the stored bytes, so the
tensor keeps its type; a change of values gives float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError, WeightError
from rlx.export.hf_config import TextConfig, divisors
from rlx.export.model import Bytes, ExportTensor, Floats
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.stored import dequantize
from rlx.models.rope import by_neighbours
from rlx.weights import ModelWeights, TensorInfo

Array = npt.NDArray[Any]
Move = Callable[[Array], Array]

_STORED: dict[DType, str] = {F32: "<f4", F16: "<f2", BF16: "<u2"}  # types whose elements can be reordered


@dataclass(frozen=True)
class Change:
    """The conversion of a tensor.

    Attributes:
        shape: shape of the result, from that of the source (stacked).
        move: reorders the elements of an array of any type.
        compute: changes the values, in float32.
    """

    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape
    move: Move | None = None
    compute: Callable[[Floats], Floats] | None = None


def export_tensor(
    name: str, info: TensorInfo, raw: Callable[[], Bytes], change: Change, *, where: object
) -> ExportTensor:
    """The tensor `name` of the GGUF file; reads nothing yet.

    Args:
        info: type and shape of the source.
        raw: reads its bytes, 1-D uint8.
        where: the file and the tensor's name there, for messages.
    """
    shape = change.shape(info.shape)

    def moved(array: Array) -> Array:
        try:
            found = np.ascontiguousarray(array if change.move is None else change.move(array))
        except ValueError as error:
            what = f"the shape {list(array.shape)} does not fit the numbers and sizes of heads in the configuration"
            raise WeightError(what, where=where) from error
        if found.shape != shape:
            raise WeightError(f"{name} would get the shape {list(found.shape)}, expected {list(shape)}", where=where)
        return found

    def stored() -> Bytes:
        if change.move is None:
            return raw()
        return _bytes(moved(raw().view(_STORED[info.dtype]).reshape(info.shape)))

    def values() -> Floats:
        if info.dtype in _STORED:
            found = dequantize(stored(), info.dtype, shape)
        else:  # block formats: elements cannot be moved individually
            found = moved(dequantize(raw(), info.dtype, info.shape))
        return found if change.compute is None else change.compute(found)

    copied = change.compute is None and (info.dtype in _STORED or change.move is None)
    return ExportTensor(name, shape, info.dtype, values, stored if copied else None)


def rope_tensors(config: TextConfig) -> list[ExportTensor]:
    """`rope_freqs.weight`, or two tensors of LongRoPE, for ropes whose frequencies GGUF keys cannot express."""
    rope = config.model.rope
    if rope.long is not None:
        found = {"rope_factors_long.weight": rope.long[1], "rope_factors_short.weight": rope.divisors}
        return [_constant(name, np.array(values, np.float32)) for name, values in found.items()]
    values = divisors(config)
    return [] if values is None else [_constant("rope_freqs.weight", values)]


def _constant(name: str, values: Floats) -> ExportTensor:
    return ExportTensor(name, values.shape, F32, lambda: values, lambda: _bytes(values))


def _bytes(array: Array) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# -- the conversion of each tensor ------------------------------------------------------------------------------------


def changes(config: TextConfig, canonical: str) -> Iterator[tuple[str, Change]]:
    """(GGUF name, conversion) of every output of the tensor with this canonical name."""
    prefix, name = in_layer(canonical)
    kind = name.removeprefix("ffn_gate_up_").removesuffix(".weight")
    dense = config.arch == "granitehybrid" and not config.experts  # the block is the shared expert only by its name
    end = "" if dense else f"_{kind}"
    if kind in ("exps", "shexp") and config.arch != "gemma4":
        yield f"{prefix}ffn_gate{end}.weight", _half(0)
        yield f"{prefix}ffn_up{end}.weight", _half(1)
    elif config.row.hybrid == "delta rule" and name == "ssm_in.weight":
        yield f"{prefix}attn_qkv.weight", _ungrouped(config, 0, 3)
        yield f"{prefix}attn_gate.weight", _ungrouped(config, 3, 4)
    elif dense and name == "ffn_down_shexp.weight":
        yield f"{prefix}ffn_down.weight", Change()
    else:
        yield canonical, _change(config, name)


def in_layer(canonical: str) -> tuple[str, str]:
    """(`blk.3.`, the name in the layer); the prefix is empty for tensors of the whole decoder."""
    parts = canonical.split(".", 2)
    return (f"blk.{parts[1]}.", parts[2]) if parts[0] == "blk" else ("", canonical)


def layer_of(canonical: str) -> int:
    """The number of the layer; -1 for tensors of the whole decoder."""
    prefix, _ = in_layer(canonical)
    return int(prefix.split(".")[1]) if prefix else -1


def _change(config: TextConfig, name: str) -> Change:
    """The conversion of a tensor, by its name in the layer (or in the decoder)."""
    offset = np.float32(config.row.norm_offset)  # GGUF readers use the stored weight without an offset
    if offset and name.endswith("norm.weight") and name.removesuffix(".weight") not in config.row.plain_norms:
        return Change(compute=lambda values: values + offset)
    if config.row.gguf_rope != config.row.hf_rope and name.split(".")[0] in ("attn_q", "attn_k"):
        heads = config.heads if name.startswith("attn_q") else config.kv_heads
        return Change(move=lambda array: by_neighbours(array, heads))
    if config.row.hybrid == "delta rule":
        return _delta_rule(config, name)
    if config.row.hybrid == "mamba":
        return _mamba(config, name)
    if config.arch == "gemma3n" and name in ("token_embd.weight", "per_layer_token_embd.weight"):
        rows = config.integer("vocab_size", (1, 1 << 31))
        return Change(lambda shape: (max(rows, shape[0]), shape[1]), lambda array: _padded(array, rows))
    return Change()


def _half(which: int) -> Change:
    """Gate or up projection of experts that are stored as one matrix [experts, 2 * ffn, hidden], or of one expert."""
    return Change(
        lambda shape: (*shape[:-2], shape[-2] // 2, shape[-1]), lambda array: np.split(array, 2, axis=-2)[which]
    )  # fmt: skip


def _padded(array: Array, rows: int) -> Array:
    """Appends rows of zeros for tokens without an embedding (those of images and audio)."""
    missing = max(rows - len(array), 0)
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array


def retiled(array: Array, groups: int, heads: int) -> Array:
    """Reorders the rows of `heads` heads from group by group to: the first head of each group, then the second ones."""
    split = array.reshape(groups, heads // groups, -1, *array.shape[1:])
    return split.swapaxes(0, 1).reshape(array.shape)


def _ungrouped(config: TextConfig, first: int, end: int) -> Change:
    """Of q, k, v and the gate, which Qwen 3 Next has together for each K head, those from `first` on, one by one."""
    net = config.model.recurrence
    assert net is not None
    groups, wide = net.key_heads, net.values // net.key_heads
    sizes = [net.key_dim, net.key_dim, wide, wide]
    bounds = [sum(sizes[:i]) for i in range(5)]

    def apart(array: Array) -> Array:
        heads = array.reshape(groups, bounds[-1], -1)
        parts = (heads[:, bounds[i] : bounds[i + 1]].reshape(-1, array.shape[1]) for i in range(first, end))
        return np.concatenate([*parts])

    return Change(lambda shape: (groups * (bounds[end] - bounds[first]), shape[1]), apart)


def _delta_rule(config: TextConfig, name: str) -> Change:
    """Qwen 3.5's recurrent layers: V heads that share a K head are adjacent in checkpoints, but not in GGUF."""
    net = config.model.recurrence
    assert net is not None
    if config.row.gguf_heads == "grouped":
        return Change(compute=_decay) if name == "ssm_a" else Change()
    groups, heads, keys = net.key_heads, net.value_heads, 2 * net.keys  # rows of Q and K come before V

    def tiled(array: Array) -> Array:
        return retiled(array, groups, heads)

    def after_keys(array: Array) -> Array:
        return np.concatenate([array[:keys], tiled(array[keys:])])

    table: Mapping[str, Change] = {
        "attn_qkv.weight": Change(move=after_keys),
        "attn_gate.weight": Change(move=tiled),
        "ssm_alpha.weight": Change(move=tiled),
        "ssm_beta.weight": Change(move=tiled),
        "ssm_dt.bias": Change(move=tiled),
        "ssm_a": Change(move=tiled, compute=_decay),
        "ssm_conv1d.weight": Change(move=after_keys),
        "ssm_out.weight": Change(move=lambda array: tiled(array.T).T),
    }
    return table.get(name, Change())


def _mamba(config: TextConfig, name: str) -> Change:
    """Mamba-2: numbers stand in a column, and each group has a row of the norm."""
    column = Change(lambda shape: (*shape, 1), lambda array: array.reshape(-1, 1))
    if name == "ssm_a":
        return replace(column, compute=_decay)
    if name == "ssm_norm.weight" and (net := config.model.recurrence) is not None:
        groups = net.key_heads
        return Change(lambda shape: (groups, shape[0] // groups), lambda array: array.reshape(groups, -1))
    return column if name == "ssm_d" else Change()


def _decay(values: Floats) -> Floats:
    """The rate of decay, of which checkpoints have the logarithm."""
    return -np.exp(values, dtype=np.float64).astype(np.float32)


def check_tensors(config: TextConfig, found: Collection[str], weights: ModelWeights) -> None:
    """Looks for tensors that would be left out; the model's equations say which there must be.

    Raises:
        UnsupportedModelError: a tensor of a layer, or a layer, that the configuration does not have.
    """
    for name in weights.unknown():
        hint = "Leaving it out would change the model."
        what = f"{name!r} is no tensor of a {config.arch} layer"
        raise UnsupportedModelError(what, where=weights.loader.path, hint=hint)
    for name in found:
        if layer_of(name) >= config.layers + config.predicting:
            what = f"{name} belongs to a layer beyond the {config.layers} of 'num_hidden_layers'"
            raise UnsupportedModelError(what, where=weights.loader.path)


def differs_by_layer(config: TextConfig) -> bool:
    """Whether GGUF has other tensors than the checkpoint where layers differ, or tensors are cut."""
    interleaved = config.row.in_turns or config.arch == "qwen3vlmoe"
    return config.row.latent or interleaved or config.row.hybrid == "mamba"
