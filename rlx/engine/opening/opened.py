"""A model of an open file: its configuration, its weights with all tensors that its graph needs, its identity.

Runners stage, under the engine and the commands that inspect a model without running it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlx import models, text, weights
from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.stored import dequantize
from rlx.models.config import ModelConfig
from rlx.passes.capabilities import Layouts
from rlx.weights import ModelWeights, WeightLoader


def open_model(loader: WeightLoader) -> tuple[models.ModelConfig, ModelWeights]:
    """The model's configuration, and its tensors under the names that `models.build` uses.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the file cannot be used.
    """
    config = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    if loader.format == "safetensors" and weights.prediction.predicting_blocks(loader, config.arch):
        loader = weights.prediction.WithPrediction(loader, config.layers)
    tensors = ModelWeights(loader, config.arch)
    for view in models.views(config, tensors.has):
        tensors.define(*view)
    return config, tensors


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


SAMPLES, SAMPLE_BYTES = 256, 64  # number of tensors that are sampled, evenly spread, and bytes of each


def identity(graph: Graph, loader: WeightLoader) -> str:
    """SHA-256 of a model's graph with its state types, its constants, and samples of its weights.

    It detects mistakes, not manipulation: files that differ only outside the samples have the same identity.
    """
    digest = hashlib.sha256(graph.canonical().encode())
    for name in sorted(graph.constants):
        digest.update(graph.constants[name].tobytes())
    names = sorted(loader.tensors)
    for name in names[:: max(1, -(-len(names) // SAMPLES))]:
        digest.update(name.encode())
        digest.update(loader.raw(name)[:SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


EMBEDDINGS = "token_embd.weight"


class WeightsCache(Mapping[str, npt.NDArray[np.float32]]):
    """Canonical name (that of GGUF, such as `blk.0.attn_q.weight`) -> values, f32 of the tensor's shape.

    Nothing is cached: every access reads the file and returns a new array.

    Args:
        weights, config: of an open model.
        mtp: whether the tensors of the MTP head are included.
    """

    def __init__(self, weights: ModelWeights, config: ModelConfig, *, mtp: bool = False) -> None:
        self._weights, self._config = weights, config
        self._names = [name for name in weights.names if mtp or not self._predicts(name)]

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        """The values that the model computes with; files store some norms and decay rates in another form.

        Raises:
            KeyError: there is no such tensor.
            UnsupportedModelError: its type cannot be converted to numbers.
        """
        if name not in self:
            raise KeyError(name)
        info = self._weights.info(name)
        values = dequantize(self._weights.raw(name), info.dtype, tuple(info.shape))
        self._weights.release(name)
        return self._config.value(name, values)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def embed(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """The input of the first layer for tokens, f32 [len(ids), hidden]. Reads only their rows.

        Raises:
            WeightError: the file has no table of embeddings.
        """
        info = self._weights.info(EMBEDDINGS)
        rows, width = info.shape
        if max(ids, default=0) >= rows:
            raise WeightError(f"token id {max(ids)} is out of range: there are {rows} embeddings", where=EMBEDDINGS)
        raw = self._weights.raw(EMBEDDINGS).reshape(rows, -1)[ids]
        values = dequantize(raw.reshape(-1), info.dtype, (len(ids), width))
        return values * np.float32(self._config.embedding_scale)

    def _predicts(self, name: str) -> bool:
        """Whether a tensor belongs to the MTP head: a block after the layers, or the tensors that connect it."""
        block = name.split(".")[1] if name.startswith("blk.") else ""
        return ".nextn." in name or (block.isdigit() and int(block) >= self._config.layers)
