"""EAGLE-3 heads: folders of their own, whose heads draft for the model that they were trained with.

Runners stage, beside `heads.py`, which runs them. The programs of the model compute what a head reads of it
(`Features`), with weights of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlx.engine.opening.setup import Source, check_types
from rlx.engine.speculation.heads import Head, OpenModel, Predictor, integers, of_another_model
from rlx.errors import UnsupportedModelError, WeightError
from rlx.models import eagle3, placed
from rlx.models.builder import checked
from rlx.models.config import ModelConfig
from rlx.models.eagle3 import Eagle3
from rlx.models.variants import Features, with_features
from rlx.passes.layout import weight_table
from rlx.weights import ModelWeights, WeightLoader
from rlx.weights.loader import LoaderOver, renamed

TABLE, HEAD, LABELS = "embed_tokens.weight", "lm_head.weight", "d2t"  # names in the folder
DRAFTS = 5  # maximum in a row


def opening(
    loader: WeightLoader, weights: ModelWeights, config: ModelConfig, model: OpenModel, number: int
) -> Callable[[ExitStack], Predictor]:
    """Opens the head of a folder, once the weights of the model are loaded. The folder is checked at once.

    The weights that the model's programs need for what the head reads are then added to the model's.

    Args:
        loader: the folder.
        weights, config, model: of the model that it drafts for.
        number: of this head among those of the model.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the folder cannot be used.
        ArgumentError: it is a head of another model.
    """
    loader = renamed(loader, lambda name: name.replace("midlayer.", "layers.0.", 1))
    head = eagle3.read_config(loader.metadata, loader.path)
    _check_base(head, config, loader)
    shared = () if TABLE in loader.tensors else ("token_embd.weight",)
    if shared:
        table = replace(weights.info(*shared), name=TABLE)
        loader = LoaderOver(loader, {**loader.tensors, TABLE: table})
    if HEAD not in loader.tensors and head.config.tied:
        what = "the head has no output matrix of its own (tie_word_embeddings)"
        raise UnsupportedModelError(what, where=loader.path, hint=f"use a head with {HEAD}")
    own, layers = ModelWeights(loader, "eagle3"), head.layers_of(config.layers)
    with placed(head.config, own.place):
        fc = checked(own, "fc.weight", (head.config.hidden, len(layers) * config.hidden))
        for place in range(len(layers) if head.norms == "each" else 0):
            checked(own, f"fc_norm.{place}.weight", (config.hidden,))
        if head.norms == "whole":
            checked(own, "input_norm.weight", (len(layers) * config.hidden,))
        graph = eagle3.build(head, own, model.setup.kv_type, _draft_tokens(loader, head))
    check_types(graph, own, model.setup.layouts)
    reads = Features(layers, head.config.hidden, fc.dtype, f"eagle3.{number}", head.norms, head.config.eps)

    def opened(parts: ExitStack) -> Predictor:
        tensors, source, prefix = model.beside(parts), Source(own, head.config), f"{reads.name}."
        table = weight_table(with_features(model.graph, reads), model.setup.layouts)
        read = {name.removeprefix(prefix): row for name, row in table.items() if name.startswith(prefix)}
        tensors.load(read, source, model.progress)
        buffers = model.tensors.buffers
        buffers.update({prefix + name: tensors.buffers[name] for name in read})
        borrowed, packed = {name: buffers[name] for name in shared}, shared if config.tied else ()
        made = Head(graph, source, borrowed, packed, head.config.vocab_size, DRAFTS, reads)
        return Predictor(made, model.setup, tensors, model.progress)

    return opened


def _check_base(head: Eagle3, model: ModelConfig, loader: WeightLoader) -> None:
    """`ArgumentError` if a head was trained with another model."""
    own, layers = head.config, head.layers_of(model.layers)
    own_table = TABLE in loader.tensors
    if head.model_width != model.hidden or not (own_table or own.hidden == model.hidden):
        how = f"it reads hidden states of {head.model_width}, and the model's have {model.hidden} elements"
    elif own.vocab_size != model.vocab_size:
        how = f"it knows {own.vocab_size} tokens, and the model {model.vocab_size}"
    elif not all(0 <= layer <= model.layers for layer in layers) or [*layers] != sorted({*layers}):
        how = f"it reads layers {', '.join(map(str, layers))}, and the model has {model.layers}"
    else:
        return
    raise of_another_model(loader, how)


def _draft_tokens(loader: WeightLoader, head: Eagle3) -> npt.NDArray[np.int64] | None:
    """The id of each token that a head drafts, from how far it lies behind its number; None if all are the model's.

    Raises:
        WeightError: the tensor is missing, has another shape or type, or ids that the model does not have.
    """
    count, ids = head.drafted, head.config.vocab_size
    if LABELS not in loader.tensors and count == ids:
        return None
    tokens = np.arange(count) + integers(loader, LABELS, count)
    if not 0 <= tokens.min() <= tokens.max() < ids:
        what = f"it gives tokens from {tokens.min()} to {tokens.max()}, and there are {ids}"
        raise WeightError(what, where=LABELS)
    return tokens
