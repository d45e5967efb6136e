"""An open file as a model: its configuration, and its weights with everything that its builder asks for.

Runners stage, under the engine and the commands that look at a model without running it.
"""

from __future__ import annotations

import numpy as np

from rlx import models, text
from rlx.codegen.layouts import PACKED_DTYPES
from rlx.errors import UnsupportedModelError
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.weights import ModelWeights, WeightLoader
from rlx.weights.prediction import WithPrediction, predicting_blocks


def open_model(loader: WeightLoader) -> tuple[models.ModelConfig, ModelWeights]:
    """What the file says about the model, and its tensors under the names that `models.build` uses.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the file cannot be used, and why.
    """
    config = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    if loader.format == "safetensors" and predicting_blocks(loader, config.arch):
        loader = WithPrediction(loader, config.layers)
    weights = ModelWeights(loader, config.arch)
    for view in models.views(config, weights.has):
        weights.define(*view)
    return config, weights


def tokenizer_of(loader: WeightLoader) -> text.Tokenizer:
    """The model's own tokenizer; `TokenizerError` if the file has none that can be built."""
    if loader.format == "gguf":
        return text.tokenizer_from_gguf(loader.metadata)
    return text.tokenizer_from_hf(loader.path.parent)


def has_chat_template(loader: WeightLoader) -> bool:
    """Whether the model's files hold a chat template. The tokenizer is not built."""
    if loader.format == "gguf":
        return isinstance(loader.metadata.get("tokenizer.chat_template"), str)
    return "default" in text.templates_from_hf(loader.path.parent)


def _matrices(graph: Graph) -> list[Node]:
    return [n for n in graph.leaves("weight").values() if len(n.shape) > 1]


def check_types(graph: Graph, weights: ModelWeights) -> None:
    """Whether there are kernels for every matrix of a graph; `UnsupportedModelError` otherwise."""
    for node in _matrices(graph):
        if node.dtype not in PACKED_DTYPES:
            raise UnsupportedModelError(
                f"tensor {weights.info(node.name).name!r} has type {node.dtype}, which no kernel reads yet",
                where=weights.loader.path,
                hint=f"Use a file in {', '.join(t.name.upper() for t in PACKED_DTYPES)}.",
            )


class Source:
    """A model file as `rlx.runtime.tensors.Source`: of small tensors what the graph computes with."""

    def __init__(self, weights: ModelWeights, config: models.ModelConfig) -> None:
        self.raw, self.pieces, self.release = weights.raw, weights.pieces, weights.release
        self._weights, self._config = weights, config

    def array(self, name: str) -> np.ndarray:
        return self._config.value(name, self._weights.array(name))
