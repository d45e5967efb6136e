"""Converts the tensors of a checkpoint to those of GGUF: names, stacks, order of elements, values; which there must be.

Export stage, read by `hf.py`; `rlx.weights.names` translates the names. Reordering works on the stored bytes, so the
tensor keeps its type; a change of values gives float32. GGUF readers fail at the first missing tensor; `check_tensors`
names it before the conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import INCOMPLETE, UnsupportedModelError, WeightError
from rlx.export.hf_config import TextConfig, divisors, long_rope
from rlx.export.model import Bytes, ExportTensor, Floats
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.stored import dequantize
from rlx.models.names import DECODER_PREFIXES
from rlx.models.rope import by_neighbours
from rlx.weights import ModelWeights, TensorInfo
from rlx.weights.names import canonical_name, file_names

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
    if config.rope.kind == "longrope":
        rope = long_rope(config.rope, config.head_dim)
        assert rope.long is not None
        found = {"rope_factors_long.weight": rope.long[1], "rope_factors_short.weight": rope.divisors}
        return [_constant(name, np.array(values, np.float32)) for name, values in found.items()]
    values = divisors(config.rope, config.full_head_dim if config.arch == "gemma4" else config.head_dim)
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
    elif dense and name == "ffn_down_shexp.weight":
        yield f"{prefix}ffn_down.weight", Change()
    else:
        yield canonical, _change(config, name)


def in_layer(canonical: str) -> tuple[str, str]:
    """(`blk.3.`, the name in the layer); the prefix is empty for tensors of the whole decoder."""
    parts = canonical.split(".", 2)
    return (f"blk.{parts[1]}.", parts[2]) if parts[0] == "blk" else ("", canonical)


def _change(config: TextConfig, name: str) -> Change:
    """The conversion of a tensor, by its name in the layer (or in the decoder)."""
    offset = np.float32(config.row.norm_offset)  # GGUF readers use the stored weight without an offset
    if offset and name.endswith("norm.weight") and name.removesuffix(".weight") not in config.row.plain_norms:
        return Change(compute=lambda values: values + offset)
    if config.row.gguf_rope != config.row.hf_rope and name.split(".")[0] in ("attn_q", "attn_k"):
        heads = config.heads if name.startswith("attn_q") else config.kv_heads
        return Change(move=lambda array: by_neighbours(array, heads))
    if config.arch in ("qwen35", "qwen35moe"):
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


def _delta_rule(config: TextConfig, name: str) -> Change:
    """Qwen 3.5's recurrent layers: V heads that share a K head are adjacent in checkpoints, but not in GGUF."""
    groups = config.integer("linear_num_key_heads", (1, 1 << 16))
    heads = config.integer("linear_num_value_heads", (1, 1 << 16))
    if heads % groups:
        config.wrong("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads, which is {groups}")
    keys = 2 * groups * config.integer("linear_key_head_dim", (1, 1 << 16))  # rows of Q and K, which come before V

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


_OF_A_LAYER = re.compile(f"(?:{'|'.join(map(re.escape, DECODER_PREFIXES))})layers\\.[0-9]+\\.")
_BUFFERS = (".rotary_emb.inv_freq",)  # computed, not learned
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_SHARED = ("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
_CONVOLUTION = ("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj")
_DELTA = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_norm", "ssm_out")
_SANDWICH = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_PER_LAYER = ("inp_gate", "proj", "post_norm")
_ALTUP = (
    "altup_correct_coef", "altup_correct_scale", "altup_predict_coef", "altup_router", "altup_router_norm",
    "laurel_l", "laurel_r", "laurel_post_norm",
)  # fmt: skip
_GEMMA4_EXPERTS = ("ffn_gate_inp", "ffn_gate_up_exps", "ffn_down_exps", "pre_ffw_norm_2", "post_ffw_norm_1",
    "post_ffw_norm_2")  # fmt: skip


def check_tensors(config: TextConfig, found: Collection[str], weights: ModelWeights) -> None:
    """Compares GGUF names with those that the configuration requires.

    Raises:
        WeightError: a tensor is missing.
        UnsupportedModelError: a tensor of a layer that the configuration does not have.
    """
    there = set(found)
    for name in () if differs_by_layer(config) else required(config):
        if name not in there:
            _fail_missing(name, config, weights)
    for name in weights.unused:
        if _OF_A_LAYER.match(name) and not name.endswith(_BUFFERS):
            hint = "Leaving it out would change the model."
            raise UnsupportedModelError(
                f"{name!r} is no tensor of a {config.arch} layer", where=weights.loader.path, hint=hint
            )
    for name in found:
        prefix, _ = in_layer(name)
        if prefix and int(prefix.split(".")[1]) >= config.layers + config.predicting:
            what = f"{name} belongs to a layer beyond the {config.layers} of 'num_hidden_layers'"
            raise UnsupportedModelError(what, where=weights.loader.path)


def differs_by_layer(config: TextConfig) -> bool:
    """Whether the model's own equations say which tensors there must be: layers differ, or tensors are cut."""
    turned = config.row.in_turns or config.arch == "qwen3vlmoe"
    return config.row.latent or turned or config.row.hybrid == "mamba"


def _fail_missing(name: str, config: TextConfig, weights: ModelWeights) -> None:
    names = file_names(name, config.arch)[1:]
    tried = f"; names tried: {', '.join(names)}" if names else ""
    raise WeightError(f"there is no tensor for {name}{tried}", where=weights.loader.path, hint=INCOMPLETE)


def required(config: TextConfig) -> Iterator[str]:
    """The GGUF names of all required tensors."""
    yield "token_embd.weight"
    names = ("output_norm.weight", "token_embd_norm.weight")
    yield next(name for name in names if canonical_name(name, config.arch))
    if not config.tied:
        yield "output.weight"
    yield from _of_decoder(config)
    for layer in range(config.layers + config.predicting):
        for name in _of_layer(config, layer):
            if canonical_name(f"blk.{layer}.{name}", config.arch):
                yield f"blk.{layer}.{name}"


def _of_decoder(config: TextConfig) -> Iterator[str]:
    if config.arch == "gemma3n":
        yield from ("altup_proj.weight", "altup_unembd_proj.weight")
    if _has_per_layer_input(config):
        yield from ("per_layer_token_embd.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight")


def _has_per_layer_input(config: TextConfig) -> bool:
    return config.arch in ("gemma3n", "gemma4") and bool(config.get("hidden_size_per_layer_input", 0))


def _of_layer(config: TextConfig, layer: int) -> Iterator[str]:
    yield from (f"{name}.weight" for name in _matrices_and_norms(config, layer))
    if config.arch == "qwen2":
        yield from ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    if _is_recurrent(config, layer) and config.row.hybrid == "delta rule":
        yield from ("ssm_a", "ssm_dt.bias")
    if config.row.router == "sigmoid" and layer >= config.dense_layers:
        yield "exp_probs_b.bias"
    if config.arch == "gemma4":
        yield "layer_output_scale.weight"
        if config.experts:
            yield from ("ffn_gate_inp.scale", "ffn_down_exps.scale")


def _matrices_and_norms(config: TextConfig, layer: int) -> Iterator[str]:
    arch = config.arch
    recurrent = _CONVOLUTION if config.row.hybrid == "convolution" else _DELTA
    yield from recurrent if _is_recurrent(config, layer) else _attention(config, layer)
    yield from _norms(arch)
    if arch == "gemma4":
        yield from (*_MLP, *(_GEMMA4_EXPERTS if config.experts else ()))
    else:
        dense = _MLP[1:] if config.row.fused_ffn else _MLP
        yield from _EXPERTS if config.experts and layer >= config.dense_layers else dense
    if arch == "qwen35moe":
        yield from _SHARED
    if _has_per_layer_input(config):
        yield from _PER_LAYER
    if arch == "gemma3n":
        yield from _ALTUP


def _is_recurrent(config: TextConfig, layer: int) -> bool:
    return layer < config.layers and config.recurrent[layer]


def _norms(arch: str) -> tuple[str, ...]:
    if arch in ("gemma2", "gemma3", "gemma3n", "gemma4"):
        return _SANDWICH
    return ("attn_norm", "post_attention_norm" if arch.startswith("qwen35") else "ffn_norm")


def _attention(config: TextConfig, layer: int) -> Iterator[str]:
    normed = config.arch in ("qwen3", "qwen3vl", "qwen3moe", "qwen35", "qwen35moe", "gemma3", "gemma3n", "gemma4")
    joined = config.arch == "phi3"
    names = ["attn_qkv", "attn_output"] if joined else [*_ATTENTION, *(_HEAD_NORMS if normed else ())]
    if (
        config.layers - config.shared_kv_layers <= layer < config.layers
    ):  # this layer reads the keys and values of an earlier one
        names = [name for name in names if name not in ("attn_k", "attn_v", "attn_k_norm")]
    if config.arch == "gemma4" and not config.sliding[layer] and config.flag("attention_k_eq_v", False):
        names = [name for name in names if name != "attn_v"]
    yield from names
