"""Reads a model from an open file: its configuration and its weights, with all tensors that its graph needs.

Runners stage, under the engine and the commands that inspect a model without running it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlx import models, text
from rlx.errors import UnsupportedModelError
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.capabilities import Layouts
from rlx.weights import ModelWeights, WeightLoader
from rlx.weights.prediction import WithPrediction, predicting_blocks


def open_model(loader: WeightLoader) -> tuple[models.ModelConfig, ModelWeights]:
    """The model's configuration, and its tensors under the names that `models.build` uses.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the file cannot be used.
    """
    config = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    if loader.format == "safetensors" and predicting_blocks(loader, config.arch):
        loader = WithPrediction(loader, config.layers)
    weights = ModelWeights(loader, config.arch)
    for view in models.views(config, weights.has):
        weights.define(*view)
    return config, weights


def tokenizer_of(loader: WeightLoader, chat_template: str | None = None) -> text.Tokenizer:
    """The model's own tokenizer; `TokenizerError` if the file has none, or it cannot be built.

    Args:
        chat_template: the source of a template in place of the model's own.
    """
    if loader.format == "gguf":
        found = text.tokenizer_from_gguf(loader.metadata)
    else:
        found = text.tokenizer_from_hf(loader.path.parent)
    return found if chat_template is None else replace(found, chat_templates={"default": chat_template})


def has_chat_template(loader: WeightLoader) -> bool:
    """Whether the model's files contain a chat template. Does not build the tokenizer."""
    if loader.format == "gguf":
        return isinstance(loader.metadata.get("tokenizer.chat_template"), str)
    return "default" in text.templates_from_hf(loader.path.parent)


def _matrices(graph: Graph) -> list[Node]:
    return [n for n in graph.leaves("weight").values() if len(n.shape) > 1]


def check_types(graph: Graph, weights: ModelWeights, layouts: Layouts) -> None:
    """Checks that a device has kernels for every matrix of a graph; `UnsupportedModelError` otherwise."""
    types = layouts.matrix_types
    for node in _matrices(graph):
        if node.dtype not in types:
            raise UnsupportedModelError(
                f"tensor {weights.info(node.name).name!r} has type {node.dtype}, which rlx has no kernel for",
                where=weights.loader.path,
                hint=f"Use a file in {', '.join(t.name.upper() for t in types)}.",
            )


class Source:
    """A model file as `rlx.compiler.tensors.Source`; small tensors have the values that the graph computes with."""

    def __init__(self, weights: ModelWeights, config: models.ModelConfig) -> None:
        self.raw, self.pieces, self.release = weights.raw, weights.pieces, weights.release
        self._weights, self._config = weights, config

    def array(self, name: str) -> np.ndarray:
        return self._config.value(name, self._weights.array(name))
