"""The MTP head: the block of the model's own file for multi-token prediction, as a head that drafts.

Runners stage, beside `heads.py`, which runs it.
"""

from __future__ import annotations

from rlx import models
from rlx.compiler.compile import Progress
from rlx.compiler.tensors import Tensors
from rlx.engine.opening.setup import Setup, Source, check_types
from rlx.engine.speculation.heads import Head, Predictor
from rlx.models.variants import EmbeddedRows
from rlx.weights import ModelWeights

# Only the first ids are drafted. BPE merges create frequent tokens early, so low ids are frequent; with a large
# vocabulary most of a draft's time goes into the output matrix.
ROWS = 1 << 15
DRAFTS = 3  # maximum in a row


def mtp_head(
    config: models.ModelConfig, weights: ModelWeights, setup: Setup, tensors: Tensors, progress: Progress | None
) -> Predictor:
    """The MTP head of an open model. `tensors` holds the model's weights; the head's are added.

    Raises:
        UnsupportedModelError: the model has no MTP head.
        WeightError: a tensor is missing or has the wrong shape.
    """
    rows, output = min(config.vocab_size, ROWS), models.predictor_head(config)
    graph = models.build_predictor(config, weights, setup.kv_type, rows, place=weights.place)
    check_types(graph, weights, setup.layouts)
    borrowed = {models.DRAFT_HEAD: tensors.buffers[output]}
    source, embeds = Source(weights, config), EmbeddedRows.of(config)
    return Predictor(Head(graph, source, borrowed, (output,), rows, DRAFTS, embeds=embeds), setup, tensors, progress)
