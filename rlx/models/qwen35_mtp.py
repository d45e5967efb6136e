"""The MTP head of Qwen 3.5, which predicts the token after the next: one more layer, with the model's embedding and
head.

A family file, beside `qwen35.py`, whose block it uses. Source: the multi-token prediction of DeepSeek-V3 (arXiv
2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import replace

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.models import qwen35
from rlx.models.blocks import embedding, linear, norm, rope_angles
from rlx.models.builder import DRAFT_HEAD, Weights, start
from rlx.models.config import ModelConfig


def build_predictor(config: ModelConfig, weights: Weights, kv_dtype: DType, rows: int) -> Graph:
    """The graph of the head; see `rlx.models.build_predictor`."""
    model = start(config.predictor, weights, kv_dtype)
    here = replace(model, layer=config.layers)
    hidden = model.graph.input("hidden", [SEQ, config.hidden])
    joined = ops.concat(norm(here, embedding(model), "nextn.enorm"), norm(here, hidden, "nextn.hnorm"))
    x = qwen35.block(here, linear(here, joined, "nextn.eh_proj", config.hidden), rope_angles(model))
    own_norm = here.has("nextn.shared_head_norm.weight")
    x = norm(here, x, "nextn.shared_head_norm") if own_norm else norm(model, x, "output_norm")
    model.graph.output("next_hidden", x)
    table = model.weight(f"{'token_embd' if config.tied else 'output'}.weight", config.vocab_size, config.hidden)
    first = model.graph.weight(DRAFT_HEAD, (rows, config.hidden), table.dtype)
    model.graph.output("token", ops.pick(ops.linear(x, first, bf16=config.bf16)))
    return model.graph
