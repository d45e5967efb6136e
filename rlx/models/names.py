"""Names of tensors in both kinds of file, as tables of rows: those that architectures share; a family file has its own.

Part of the models stage; `rlx.weights.names` translates with them. Names only: that GGUF permutes the rows of llama's q
and k, stores 1 + w for some norms and -exp(A_log) for a decay, is for others to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """A tensor in both vocabularies, without layer prefix and suffix. Several rows may say the same canonical name.

    Attributes:
        canonical: GGUF name.
        hf: path inside the decoder (or the layer), or None where only GGUF has such a tensor. `{}` stands for the
            numbers 0, 1, ... of tensors that are matrices of one stack.
        suffixes: `weight`; `bias` where a linear layer may have one; `scale`, a factor of the product that GGUF files
            in NVFP4 carry; "" where both names are whole as they stand.
    """

    canonical: str
    hf: str | None
    suffixes: tuple[str, ...] = ("weight",)


LINEAR, SCALED, WHOLE, BIASED = ("weight", "bias", "scale"), ("weight", "scale"), ("",), ("weight", "bias")

# Layers over the pooled row of a text. Checkpoints keep them in files of their own, or under names of the family.
DENSE, CLASSIFIER = tuple(Row(f"dense_{i}", None, BIASED) for i in (2, 3)), Row("cls.output", None, BIASED)
DECODER = (
    *DENSE,
    CLASSIFIER,
    Row("token_embd", "embed_tokens"),
    Row("output_norm", "norm"),
    Row("rope_freqs", None),
    Row("rope_factors_long", None),
    Row("rope_factors_short", None),
)
HEAD = (Row("output", "lm_head", LINEAR),)
ATTENTION = (
    Row("attn_q", "self_attn.q_proj", LINEAR),
    Row("attn_k", "self_attn.k_proj", LINEAR),
    Row("attn_v", "self_attn.v_proj", LINEAR),
    Row("attn_output", "self_attn.o_proj", LINEAR),
)
FUSED_QKV = (Row("attn_qkv", None, LINEAR),)
MLP = (
    Row("ffn_gate", "mlp.gate_proj", LINEAR),
    Row("ffn_up", "mlp.up_proj", LINEAR),
    Row("ffn_down", "mlp.down_proj", LINEAR),
)
HEAD_NORMS = (Row("attn_q_norm", "self_attn.q_norm"), Row("attn_k_norm", "self_attn.k_norm"))
ATTN_NORM = (Row("attn_norm", "input_layernorm"),)
# The same name in a checkpoint means one of two tensors: a norm before the feed-forward block, or one behind attention.
PRE_NORMS = (*ATTN_NORM, Row("ffn_norm", "post_attention_layernorm"))
POST_NORM = (Row("post_attention_norm", "post_attention_layernorm"),)
POST_NORMS = (*POST_NORM, Row("post_ffw_norm", "post_feedforward_layernorm"))
SANDWICH_NORMS = (*ATTN_NORM, *POST_NORMS, Row("ffn_norm", "pre_feedforward_layernorm"))
# Experts one by one, as checkpoints have them on disk, and fused, as newer transformers holds them.
MOE = (
    Row("ffn_gate_inp", "mlp.gate"),
    Row("ffn_gate_exps", "mlp.experts.{}.gate_proj", SCALED),
    Row("ffn_up_exps", "mlp.experts.{}.up_proj", SCALED),
    Row("ffn_down_exps", "mlp.experts.{}.down_proj", SCALED),
    Row("ffn_gate_up_exps", None, SCALED),
    Row("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", WHOLE),
    Row("ffn_down_exps.weight", "mlp.experts.down_proj", WHOLE),
)
# Of the block for multi-token prediction behind the last layer; GLM keeps it there in checkpoints, too.
PREDICTION = (
    Row("nextn.eh_proj", "eh_proj"),
    Row("nextn.enorm", "enorm"),
    Row("nextn.hnorm", "hnorm"),
    Row("nextn.embed_tokens", "embed_tokens"),
    Row("nextn.shared_head_head", "shared_head.head"),
    Row("nextn.shared_head_norm", "shared_head.norm"),
)
LAYER = (*ATTENTION, *FUSED_QKV, *MLP)

# Where checkpoints keep the decoder: text models; the two places that image-and-text models have used; models without a
# head.
DECODER_PREFIXES: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.", "")


@dataclass(frozen=True)
class Table:
    """The tensors of one architecture: of each layer, of the whole decoder or encoder, of the head.

    Attributes:
        prefixes: where checkpoints keep the decoder.
        path: of its layers there.
    """

    layer: tuple[Row, ...]
    decoder: tuple[Row, ...] = DECODER
    head: tuple[Row, ...] = HEAD
    prefixes: tuple[str, ...] = DECODER_PREFIXES
    path: str = "layers"


def shared_expert_names(path: str | None = None) -> tuple[Row, ...]:
    """The tensors of the expert that every token uses; `path` is where checkpoints keep them, if they do one by one."""
    parts = ("gate", "up", "down")
    return tuple(Row(f"ffn_{part}_shexp", path and f"{path}.{part}_proj", LINEAR) for part in parts)


#: Experts that sigmoids and a bias choose, beside one that every token uses (DeepSeek-V3).
BIASED_MOE = (
    *MOE,
    Row("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", WHOLE),
    *shared_expert_names("mlp.shared_experts"),
)
#: The expert that every token uses, with what weighs it (Qwen 2).
GATED_SHARED = (Row("ffn_gate_inp_shexp", "mlp.shared_expert_gate"), *shared_expert_names("mlp.shared_expert"))


def mamba_names(path: str) -> tuple[Row, ...]:
    """The tensors of a recurrent layer of Mamba-2, which checkpoints keep under `path`."""
    return (
        Row("ssm_in", f"{path}.in_proj", LINEAR),
        Row("ssm_conv1d", f"{path}.conv1d", BIASED),
        Row("ssm_dt.bias", f"{path}.dt_bias", WHOLE),
        Row("ssm_a", f"{path}.A_log", WHOLE),
        Row("ssm_d", f"{path}.D", WHOLE),
        Row("ssm_norm", f"{path}.norm"),
        Row("ssm_out", f"{path}.out_proj", LINEAR),
    )


def per_layer(*rows: Row) -> Table:
    """Gemma 3n and 4: sandwiched blocks with per-layer embeddings; `rows` are further ones of a layer."""
    embeddings = (
        Row("per_layer_token_embd", "embed_tokens_per_layer"),
        Row("per_layer_model_proj", "per_layer_model_projection", SCALED),
        Row("per_layer_proj_norm", "per_layer_projection_norm"),
    )
    inputs = (
        Row("inp_gate", "per_layer_input_gate", SCALED),
        Row("proj", "per_layer_projection", SCALED),
        Row("post_norm", "post_per_layer_input_norm"),
    )
    return Table((*LAYER, *HEAD_NORMS, *SANDWICH_NORMS, *inputs, *rows), (*DECODER, *embeddings))
