"""EAGLE-3 heads: folders of their own, whose heads draft for the model that they were trained with.

Runners stage, beside `heads.py`, which runs them. The programs of the model compute what a head reads of it
(`Features`), with weights of the head.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlx.compiler.compile import Progress
from rlx.compiler.tensors import Tensors
from rlx.engine.opening.setup import Setup, Source, check_types
from rlx.engine.speculation.heads import Head, Predictor
from rlx.errors import ArgumentError, UnsupportedModelError, WeightError
from rlx.ir.dtypes import I32, I64
from rlx.ir.graph import Graph
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


class Eagle3Head:
    """A head of an open folder, checked against the model that it drafts for.

    Args:
        loader: the folder.
        model: the weights of the model.
        config: its configuration.
        setup: of its engine.
        number: of this head among those of the model.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the folder cannot be used.
        ArgumentError: it is a head of another model.
    """

    def __init__(
        self, loader: WeightLoader, model: ModelWeights, config: ModelConfig, setup: Setup, number: int
    ) -> None:
        loader = renamed(loader, lambda name: name.replace("midlayer.", "layers.0.", 1))
        self.config = head = eagle3.read_config(loader.metadata, loader.path)
        _check_base(head, config, loader)
        self._tied = config.tied
        self.shares_table = TABLE not in loader.tensors
        if self.shares_table:
            table = replace(model.info("token_embd.weight"), name=TABLE)
            loader = LoaderOver(loader, {**loader.tensors, TABLE: table})
        if HEAD not in loader.tensors and head.config.tied:
            what = "the head has no output matrix of its own (tie_word_embeddings)"
            raise UnsupportedModelError(what, where=loader.path, hint=f"use a head with {HEAD}")
        self.weights, layers = ModelWeights(loader, "eagle3"), head.layers_of(config.layers)
        with placed(head.config, self.weights.place):
            fc = checked(self.weights, "fc.weight", (head.config.hidden, len(layers) * config.hidden))
            for place in range(len(layers) if head.norms == "each" else 0):
                checked(self.weights, f"fc_norm.{place}.weight", (config.hidden,))
            if head.norms == "whole":
                checked(self.weights, "input_norm.weight", (len(layers) * config.hidden,))
            self.graph = eagle3.build(head, self.weights, setup.kv_type, _draft_tokens(loader, head))
        check_types(self.graph, self.weights, setup.layouts)
        self.reads = Features(layers, head.config.hidden, fc.dtype, f"eagle3.{number}", head.norms, head.config.eps)

    def opened(
        self, graph: Graph, setup: Setup, model: Tensors, progress: Progress | None, parts: ExitStack
    ) -> Predictor:
        """The head, loaded.

        Args:
            graph, setup, model: graph, settings and weights of the model; the weights that its programs need for what
                the head reads are added.
            parts: closes what was opened.
        """
        own = Tensors(model.compiler, model.workers)
        parts.callback(own.close)
        source, prefix = Source(self.weights, self.config.config), f"{self.reads.name}."
        table = weight_table(with_features(graph, self.reads), setup.layouts)
        read = {name.removeprefix(prefix): row for name, row in table.items() if name.startswith(prefix)}
        own.load(read, source, progress)
        model.buffers.update({prefix + name: own.buffers[name] for name in read})
        shared = ("token_embd.weight",) if self.shares_table else ()
        return Predictor(
            Head(
                self.graph,
                source,
                {name: model.buffers[name] for name in shared},
                shared if self._tied else (),
                self.config.config.vocab_size,
                DRAFTS,
                self.reads,
            ),
            setup,
            own,
            progress,
        )


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
    what, hint = f"the draft head is of another model: {how}", "give the head that was trained with this model"
    raise ArgumentError(what, where=loader.path, hint=hint)


def _draft_tokens(loader: WeightLoader, head: Eagle3) -> npt.NDArray[np.int64] | None:
    """The id of each token that a head drafts, from how far it lies behind its number; None if all are the model's.

    Raises:
        WeightError: the tensor is missing, has another shape or type, or ids that the model does not have.
    """
    count, ids = head.drafted, head.config.vocab_size
    if LABELS not in loader.tensors:
        if count == ids:
            return None
        raise WeightError(f"the tensor is missing, expected shape [{count}]", where=LABELS)
    info = loader.tensors[LABELS]
    if tuple(info.shape) != (count,) or info.dtype not in (I32, I64):
        what = f"expected i64 of shape [{count}], found {info.dtype} of shape {list(info.shape)}"
        raise WeightError(what, where=LABELS)
    raw = np.frombuffer(loader.raw(LABELS).tobytes(), np.int64 if info.dtype is I64 else np.int32)
    tokens = np.arange(count) + raw.astype(np.int64)
    if not 0 <= tokens.min() <= tokens.max() < ids:
        what = f"it gives tokens from {tokens.min()} to {tokens.max()}, and there are {ids}"
        raise WeightError(what, where=LABELS)
    return tokens
