"""Qwen 2, Qwen 2.5 and Qwen 3, dense and with experts, the text models of Qwen 3 VL, and dots.llm1.

A family file: the equations of one decoder, top to bottom. Qwen 2 adds biases to q, k and v; Qwen 3 has none and
normalizes each head of q and k instead. Sources: Qwen 2 (arXiv 2407.10671), Qwen 3 (arXiv 2505.09388).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rlx.models import llama
from rlx.models.architectures import QKV, Architecture, all_slide
from rlx.models.blocks import attention
from rlx.models.keys import Keys
from rlx.models.names import BIASED_MOE, GATED_SHARED, HEAD_NORMS, LAYER, MOE, PRE_NORMS, WHOLE, Row, Table
from rlx.models.settings import Key


def _upper_layers_slide(keys: Keys, layers: int) -> list[bool]:
    """The layers from `max_window_layers` on have a window if `use_sliding_window` is true."""
    first = keys.integer("max_window_layers", (0, 1 << 31), layers)
    return [slides and layer >= first for layer, slides in enumerate(all_slide(keys, layers))]


def _lower_layers_alternate(keys: Keys, layers: int) -> list[bool]:
    """Every second layer before `max_window_layers` has a window, from the first on."""
    first = keys.integer("max_window_layers", (0, 1 << 31), layers)
    return [slides and layer < first and layer % 2 == 0 for layer, slides in enumerate(all_slide(keys, layers))]


def _inner_layers(keys: Keys) -> dict[str, int]:
    """How many layers of the tower give features to the first layers."""
    tower, key = keys.nested("vision_config", optional=True), "deepstack_visual_indexes"
    layers = keys.integer("num_hidden_layers", (1, 1024))
    taken = tower.elements(key, lambda each: each.integer(key, (0, 1023))) if key in tower else []
    if len(taken) >= layers:
        tower.wrong(key, taken, f"fewer elements than the text model has layers, which is {layers}")
    return {"deepstack": len(taken)}


_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DEEPSTACK = {"deepstack": Key("n_deepstack_layers", "deepstack", (0, 1023), 0)}
# Fused experts of Qwen 3 VL have their inputs first, in place of the last two rows of MOE.
_TURNED = (
    Row("ffn_gate_up_exps_t.weight", "mlp.experts.gate_up_proj", WHOLE),
    Row("ffn_down_exps_t.weight", "mlp.experts.down_proj", WHOLE),
)
_QWEN3 = Architecture(
    partial(llama.build, attend=partial(attention, norms="heads")),
    Table((*LAYER, *HEAD_NORMS, *PRE_NORMS)),
    ("qwen3",),
    runner="qwen3",
    bf16=True,
    hf_sliding=_upper_layers_slide,
    hf_defaults={**_DEFAULTS, "head_dim": 128},
)
ARCHITECTURES = {
    "qwen2": replace(
        _QWEN3,
        build=llama.build,
        names=Table((*LAYER, *PRE_NORMS)),
        model_types=("qwen2",),
        biases=QKV,
        hf_defaults=_DEFAULTS,
    ),
    "qwen2moe": replace(
        _QWEN3,
        build=llama.build,
        names=Table((*LAYER, *PRE_NORMS, *MOE, *GATED_SHARED)),
        model_types=("qwen2_moe",),
        bf16=False,
        hf_sliding=_lower_layers_alternate,
        hf_biases={"qkv_bias": QKV},
        experts="must",
        shared_expert="gated",
        hf_defaults={**_DEFAULTS, "qkv_bias": True, "norm_topk_prob": False},
        gguf_defaults={"expert_weights_norm": False},
    ),
    "qwen3": _QWEN3,
    "qwen3vl": replace(
        _QWEN3,
        model_types=("qwen3_vl_text", "qwen3_vl"),
        rope_sections=(24, 20, 20),
        hf_base=500_000.0,
        hf_spelling=_inner_layers,
        keys=_DEEPSTACK,
    ),
    "qwen3vlmoe": replace(
        _QWEN3,
        names=Table((*LAYER, *HEAD_NORMS, *PRE_NORMS, *MOE[:-2], *_TURNED)),
        model_types=("qwen3_vl_moe_text", "qwen3_vl_moe"),
        rope_sections=(24, 20, 20),
        hf_base=500_000.0,
        hf_spelling=_inner_layers,
        keys=_DEEPSTACK,
        experts="must",
        hf_defaults={**_DEFAULTS, "norm_topk_prob": True},
    ),
    "qwen3moe": replace(
        _QWEN3,
        names=Table((*LAYER, *HEAD_NORMS, *PRE_NORMS, *MOE)),
        model_types=("qwen3_moe",),
        hf_sliding=all_slide,
        hf_layer_types=False,
        experts="must",
        hf_defaults={**_DEFAULTS, "norm_topk_prob": False},
    ),
    "dots1": Architecture(
        _QWEN3.build,
        Table((*LAYER, *HEAD_NORMS, *PRE_NORMS, *BIASED_MOE)),
        ("dots1",),
        bf16=True,
        hf_sliding=_upper_layers_slide,
        experts="must",
        router="sigmoid",
        biases=("exp_probs_b",),
        shared_expert="may",
        hf_defaults={"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
    ),
}
