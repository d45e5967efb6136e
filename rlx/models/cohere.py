"""Cohere's Command R, Command R7B and Aya: attention and the MLP stand side by side behind one norm.

A family file: the equations of one decoder, top to bottom, and what its files say. In Command R7B three layers of four
have a window, and only they have rope. Sources: PaLM (arXiv 2204.02311) for the parallel blocks, Aya Expanse (arXiv
2412.04261), and the published implementation in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import attention, embedding, feed_forward, head, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import FACTOR, Keys
from rlx.models.names import ATTN_NORM, HEAD_NORMS, LAYER, Table
from rlx.models.settings import Key


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Command R model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = norm(layer, x, "attn_norm")
        x = x + attention(layer, y, angles) + feed_forward(layer, y)
    return head(model, x, scale=config.own["logit_scale"])


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """Layers with a window have rope; in a model without windows no layer has."""
    return [window is not None for window in windows]


_COMMAND_R = Architecture(
    build,
    Table((*LAYER, *ATTN_NORM, *HEAD_NORMS)),
    ("cohere",),
    gguf_rope="interleaved",
    hf_rope="interleaved",
    norm="layer",
    bf16=True,
    keys={"logit_scale": Key("logit_scale", "logit_scale", FACTOR, 0.0625)},
    hf_keys={"eps": "layer_norm_eps"},
    hf_only={"use_qk_norm": (False, "norms on the heads of q and k are not supported for this architecture")},
    hf_defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
)
ARCHITECTURES = {
    "command-r": _COMMAND_R,
    "cohere2": replace(
        _COMMAND_R,
        model_types=("cohere2",),
        gguf_period=4,
        hf_sliding=every_nth_is_full(4),
        rope_layers=_rope_layers,
        hf_only={},
        hf_defaults={**_COMMAND_R.hf_defaults, "sliding_window": 4096},
    ),
}
