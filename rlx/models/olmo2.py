"""OLMo 2 and 3, EXAONE 4: norms only behind attention and MLP, and on q and k.

A family file: the equations of one decoder, top to bottom, and what its files say. The norms on q and k are over all
heads together in OLMo, on each head in EXAONE 4. Three layers of four of OLMo 3, and of larger models of EXAONE 4, have
a window; only the others scale their rope in OLMo 3, and only they have none in EXAONE 4. Sources: OLMo 2 (arXiv
2501.00656), OLMo 3 in transformers, EXAONE 4 (arXiv 2507.11407).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import Architecture, by_period, every_nth_is_full
from rlx.models.blocks import attention, embedding, head, mlp, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import Keys
from rlx.models.names import HEAD_NORMS, LAYER, POST_NORMS, Table


def build(config: ModelConfig, weights: Weights, kv_dtype: DType, *, norms: str) -> Graph:
    """The graph of a model with norms behind its blocks only; see `rlx.models.build`.

    Args:
        norms: of q and k, as for `attention`.
    """
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = attention(layer, x, angles, norms=norms)
        x = x + norm(layer, y, "post_attention_norm")
        x = x + norm(layer, mlp(layer, x), "post_ffw_norm")
    return head(model, x)


def _slides(keys: Keys, layers: int) -> list[bool]:
    """The pattern is a period, or a letter for each layer of one, such as LLLG."""
    key = "sliding_window_pattern"
    if "sliding_window" not in keys:
        return [False] * layers
    pattern = keys.get(key, 4)
    return by_period(len(pattern) if isinstance(pattern, str) else keys.integer(key, (1, 1024), 4), layers)


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """Layers without a window have rope if the model has no window."""
    plain = not any(windows) and not any(key in keys for key in ("sliding_window", "attention.sliding_window"))
    return [window is not None or plain for window in windows]


ARCHITECTURES = {
    "olmo2": Architecture(
        partial(build, norms="whole"),
        Table((*LAYER, *HEAD_NORMS, *POST_NORMS)),
        ("olmo2",),
        hf_variants={
            "olmo3": {
                "hf_sliding": every_nth_is_full(4),
                "hf_base": 500_000.0,
                "hf_defaults": {"sliding_window": 4096},
            }
        },
        gguf_period=4,
        local_base=500_000.0,
    ),
    "exaone4": Architecture(
        partial(build, norms="heads"),
        Table((*LAYER, *HEAD_NORMS, *POST_NORMS)),
        ("exaone4",),
        gguf_period=4,
        hf_sliding=_slides,
        rope_layers=_rope_layers,
    ),
}
