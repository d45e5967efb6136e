"""Opens an encoder: its configuration, its weights, and the graphs that its files ask for.

Runners stage, under `rlx.engine.encoder`. A decoder whose files say that it makes vectors or scores is opened as an
encoder, too: its graph without caches, and the row that its files pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlx import engine, models
from rlx.engine.opening.setup import Source, check_types
from rlx.errors import ModelFileError, UnsupportedModelError
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.models.encoder import (
    EncoderConfig,
    classifier,
    dense_layers,
    encoder_config,
    encoder_views,
    encoding,
    of_decoder,
)
from rlx.models.registry import ENCODERS, TWO_WAY
from rlx.passes.capabilities import Layouts
from rlx.weights import ModelWeights, WeightLoader
from rlx.weights.sentence_modules import SentenceModules, WithDense, sentence_modules

if TYPE_CHECKING:
    from rlx.engine.adapters import Adapters

_TWO_WAY_KEY = "use_bidirectional_attention"
_LABELS = "classifier.output_labels"


@dataclass(frozen=True)
class EncoderPlan:
    """An encoder that can be run.

    Attributes:
        body: tokens -> hidden states.
        head: pooled rows -> vectors or logits; None if the pooled row is the vector.
        scores: whether the head is a classifier.
        labels: names of its classes.
        modules: what the files say about pooling and prompts.
        template: how a query and a document become the text of a reranker that was a decoder, with {query} and
            {document}; None for a pair of texts.
        adapters: those of the body that calls may choose; None if there are none.
    """

    config: EncoderConfig
    weights: ModelWeights
    source: Source
    body: Graph
    head: Graph | None
    scores: bool
    labels: tuple[str, ...]
    modules: SentenceModules
    template: str | None = None
    adapters: Adapters | None = None

    @staticmethod
    def of(loader: WeightLoader, layouts: Layouts, adapters: Mapping[str, Any] | None = None) -> EncoderPlan:
        """Reads the files of a model and builds the graphs; reads no weights but those of adapters.

        Args:
            adapters: name -> file or folder.

        Raises:
            ModelFileError: they cannot be used.
        """
        config = encoder_config(loader.format, loader.metadata, loader.path)
        modules = sentence_modules(loader)
        if modules.folders:
            loader = WithDense(loader, modules)
        plan = _of_decoder(loader, modules) if config is None else _of_encoder(loader, config, modules)
        for graph in (plan.body, plan.head):
            if graph is not None:
                check_types(graph, plan.weights, layouts)
        if not adapters:
            return plan
        sizes = plan.source.config or plan.config
        return replace(plan, adapters=engine.adapters.Adapters.of(adapters, sizes, plan.weights, plan.body))


def _of_encoder(loader: WeightLoader, config: EncoderConfig, modules: SentenceModules) -> EncoderPlan:
    weights = ModelWeights(loader, config.arch)
    for view in encoder_views(config):
        if weights.has(view.source):
            weights.define(*view)
    try:
        body = ENCODERS[config.arch].build(config, weights)
        head = classifier(config, weights)
        scores = head is not None
        head = head or dense_layers(config, weights, modules.dense)
    except ModelFileError as error:
        place = None if error.where is None else weights.place(error.where)
        raise type(error)(error.what, where=place, hint=error.hint) from error
    return EncoderPlan(config, weights, Source(weights, None), body, head, scores, (), modules)


def _of_decoder(loader: WeightLoader, modules: SentenceModules) -> EncoderPlan:
    metadata = _as_decoder(loader)
    found = models.config_from(loader.format, metadata, loader.tensors.__contains__, where=loader.path)
    if any(layer.recurrent for layer in found.each):
        raise UnsupportedModelError("recurrent layers in encoders are not supported", where=loader.path)
    found = replace(found, tied=True)  # the graph's logits are not computed, and files may lack what makes them
    weights = ModelWeights(loader, found.arch)
    for view in models.views(found, weights.has):
        weights.define(*view)
    graph = models.build(found, weights, F32, hidden=True, place=weights.place)
    body = encoding(graph, two_way=_is_two_way(loader))
    config, scores = of_decoder(found), weights.has("cls.output.weight")
    head = dense_layers(config, weights, [("cls.output", None)] if scores else modules.dense)
    labels = tuple(loader.metadata.get(f"{found.arch}.{_LABELS}", ())) if scores else ()
    template = loader.metadata.get("tokenizer.chat_template.rerank") if scores else None
    source = Source(weights, found)
    return EncoderPlan(config, weights, source, body, head, scores, labels, modules, template)


def _is_two_way(loader: WeightLoader) -> bool:
    """Whether the tokens of a decoder's file see the whole text."""
    if loader.format == "gguf":
        return loader.metadata.get("general.architecture") in TWO_WAY
    return loader.metadata.get(_TWO_WAY_KEY) is True


def _as_decoder(loader: WeightLoader) -> Mapping[str, Any]:
    """The metadata of a file without what makes an encoder of a decoder."""
    if loader.format != "gguf":
        return {key: value for key, value in loader.metadata.items() if key != _TWO_WAY_KEY}
    arch = str(loader.metadata["general.architecture"])
    return _Renamed(loader.metadata, arch, TWO_WAY.get(arch, arch))


class _Renamed(Mapping[str, Any]):
    """GGUF metadata of one architecture as that of another, without the keys of encoders."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, shown: str) -> None:
        self._metadata, self._arch, self._shown = metadata, f"{arch}.", f"{shown}."
        self._hidden = {f"{arch}.{key}" for key in ("pooling_type", "attention.causal")}

    def _stored(self, key: str) -> str:
        return self._arch + key.removeprefix(self._shown) if key.startswith(self._shown) else key

    def __getitem__(self, key: str) -> Any:
        if key == "general.architecture":
            return self._shown[:-1]
        stored = self._stored(key)
        if stored in self._hidden:
            raise KeyError(key)
        return self._metadata[stored]

    def __contains__(self, key: object) -> bool:
        stored = self._stored(str(key))
        return stored in self._metadata and stored not in self._hidden

    def __iter__(self) -> Iterator[str]:
        own = self._arch
        shown = (self._shown + key.removeprefix(own) if key.startswith(own) else key for key in self._metadata)
        return (key for key in shown if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def count(self, key: str) -> int:
        """Elements of an array, without decoding it."""
        return int(self._metadata.count(self._stored(key)))  # type: ignore[attr-defined]
