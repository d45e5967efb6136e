"""OLMo 2 and 3: norms only behind attention and MLP, and on q and k over all heads together.

A family file: the equations of one decoder, top to bottom, and what its files say. Three layers of four of OLMo 3 have
a window; only the others scale their rope. Sources: OLMo 2 (arXiv 2501.00656), OLMo 3 in transformers.
"""

from __future__ import annotations

from functools import partial

from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import attention, embedding, head, mlp, norm, rope_angles
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import HEAD_NORMS, LAYER, POST_NORMS, Table


def build(config: ModelConfig, weights: Weights, kv_dtype: DType, *, head_norms: bool) -> Graph:
    """The graph of a model with norms behind its blocks only; see `rlx.models.build`.

    Args:
        head_norms: q and k are normalized per head, not over all heads together.
    """
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        y = attention(layer, x, angles, head_norms=head_norms, whole_norms=not head_norms)
        x = x + norm(layer, y, "post_attention_norm")
        x = x + norm(layer, mlp(layer, x), "post_ffw_norm")
    return head(model, x)


ARCHITECTURES = {
    "olmo2": Architecture(
        partial(build, head_norms=False),
        Table((*LAYER, *HEAD_NORMS, *POST_NORMS)),
        ("olmo2",),
        hf_variants={"olmo3": {"hf_sliding": every_nth_is_full(4), "hf_defaults": {"sliding_window": 4096}}},
        gguf_period=4,
        local_base=500_000.0,
        hf_base=500_000.0,
    )
}
