"""The tensors that a checkpoint must have.

Export stage, read by `hf.py`. GGUF readers fail at the first missing tensor; this check names it before the conversion.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from rlx.errors import INCOMPLETE, UnsupportedModelError, WeightError
from rlx.export.hf_config import TextConfig
from rlx.export.hf_tensors import in_layer
from rlx.models.names import DECODER_PREFIXES
from rlx.weights import ModelWeights
from rlx.weights.names import canonical_name, file_names

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
    for name in required(config):
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
