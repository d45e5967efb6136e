"""Opens what makes drafts, by its name in `speculative`: the model's own head, another model, or a head in a folder.

Runners stage, between the engine and the kinds of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rlx import models
from rlx.closing import on_error
from rlx.compiler.compile import Progress
from rlx.compiler.tensors import Tensors
from rlx.engine import speculation
from rlx.engine.opening.setup import Setup, Source, check_types
from rlx.engine.speculation.drafts import Drafting
from rlx.engine.speculation.heads import DraftHead, Head, HeadDrafting, OpenModel, Predictor
from rlx.errors import UnsupportedModelError
from rlx.models.variants import EmbeddedRows
from rlx.weights import ModelWeights, WeightLoader, open_weights

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.ir.graph import Graph

PATH = "model:"  # before the path of a draft model or head
_GEMMA = ("gemma4_assistant", "gemma4_unified_assistant")  # values of `model_type`
_GGUF = ("eagle3", "gemma4-assistant")


# Only the first ids are drafted. BPE merges create frequent tokens early, so low ids are frequent; with a large
# vocabulary most of a draft's time goes into the output matrix.
MTP_ROWS = 1 << 15
MTP_DRAFTS = 3  # maximum in a row


def open_drafting(
    name: str, engine: Engine, graph: Graph, setup: Setup, tensors: Tensors, progress: Progress | None, number: int
) -> Drafting:
    """What drafts for an engine.

    Args:
        name: "mtp", or "model:PATH" with the path of a whole model or of a head.
        graph, setup, tensors, progress: of the engine; the graph has the output "hidden".
        number: of what drafts for it.

    Raises:
        ModelFileError, TokenizerError: the file cannot be used.
        ArgumentError: it is of another model, or has another vocabulary.
    """
    if name == "mtp":
        models.check_predictor(engine.config, engine.weights, engine.weights.place)
        of_engine = engine.config, engine.weights, setup, tensors, progress
        return HeadDrafting(engine, lambda parts: mtp_head(*of_engine))
    loader = open_weights(name.removeprefix(PATH))
    opening: Callable[[ExitStack], DraftHead]
    with on_error(loader.close):
        kind = head_kind(loader)
        if kind is None:
            return speculation.draft_model.DraftModel.of(loader, engine, setup, progress)
        of_model = loader, engine.weights, engine.config, OpenModel(graph, setup, tensors, progress)
        if kind == "gemma4":
            opening = speculation.gemma4.opening(*of_model, engine.model_runner)
        else:
            opening = speculation.eagle3.opening(*of_model, number)
    return HeadDrafting(engine, opening, loader)


def mtp_head(
    config: models.ModelConfig, weights: ModelWeights, setup: Setup, tensors: Tensors, progress: Progress | None
) -> Predictor:
    """The MTP head of an open model. `tensors` holds the model's weights; the head's are added.

    Raises:
        UnsupportedModelError: the model has no MTP head.
        WeightError: a tensor is missing or has the wrong shape.
    """
    rows, output = min(config.vocab_size, MTP_ROWS), models.predictor_head(config)
    graph = models.build_predictor(config, weights, setup.kv_type, rows, place=weights.place)
    check_types(graph, weights, setup.layouts)
    borrowed = {models.DRAFT_HEAD: tensors.buffers[output]}
    source, embeds = Source(weights, config), EmbeddedRows.of(config)
    head = Head(graph, source, borrowed, (output,), rows, MTP_DRAFTS, embeds=embeds)
    return Predictor(head, setup, tensors, progress)


def head_kind(loader: WeightLoader) -> str | None:
    """The kind of a draft head in an open file or folder, "eagle3" or "gemma4"; None for a whole model.

    Raises:
        UnsupportedModelError: it is another kind of head.
    """
    kind = _kind(loader)
    if kind not in (None, "eagle3", "gemma4"):
        hint = "use an EAGLE-3 head or Gemma's drafter in safetensors, or a smaller model of the same family"
        raise UnsupportedModelError(f"it is a draft head of the kind {kind!r}", where=loader.path, hint=hint)
    return kind


def _kind(loader: WeightLoader) -> str | None:
    data, names = loader.metadata, loader.tensors
    if loader.format == "gguf":
        found = data.get("general.architecture")
        return f"{found} in GGUF" if found in _GGUF else None
    if data.get("model_type") in _GEMMA:
        return "gemma4"
    if "speculators_model_type" in data:
        return str(data["speculators_model_type"])
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    return "eagle" if "fc.weight" in names else None
