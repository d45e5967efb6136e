"""Models: a family's equations as a symbolic graph. Between the open file and the passes; imports only `ir`.

A family file has everything of its family: the equations of its paper, over the blocks of `blocks.py`; the rows of its
architectures (`architectures.py`); the names of its tensors (`names.py`). `registry.py` says which file has which
architecture. `reader.py` reads a file's metadata by its row into the model's `config.py`, `views.py` lists tensors that
are parts of others, `builder.py` declares the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx import models
from rlx.errors import ArgumentError, ModelFileError, UnsupportedModelError
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.lazy import names_of
from rlx.models.builder import DRAFT_HEAD, Weights, cache_dtype
from rlx.models.config import ModelConfig
from rlx.models.registry import ARCHITECTURES, MODEL_TYPES, SUPPORTED
from rlx.models.views import View, place_in, views

if TYPE_CHECKING:
    from rlx.models import vision_config
    from rlx.models.gguf_config import from_gguf
    from rlx.models.hf_config import from_hf

__all__ = [
    "ARCHITECTURES",
    "DRAFT_HEAD",
    "MODEL_TYPES",
    "SUPPORTED",
    "ModelConfig",
    "View",
    "Weights",
    "build",
    "build_predictor",
    "cache_dtype",
    "config_from",
    "from_gguf",
    "from_hf",
    "placed",
    "predictor_head",
    "views",
    "vision_config",
]

#: The readers of the formats, and what a text model does not need, imported when they are first used.
_PARTS = {
    "from_gguf": "rlx.models.gguf_config",
    "from_hf": "rlx.models.hf_config",
    "vision_config": "rlx.models.vision_config",
}

__getattr__ = names_of("rlx.models", _PARTS)


def build(
    config: ModelConfig,
    weights: Weights,
    kv_dtype: DType,
    *,
    hidden: bool = False,
    place: Callable[[str], str] | None = None,
) -> Graph:
    """The graph of a model: the computation only, without implementation choices.

    Inputs "tokens" and "positions", i32 [SEQ]. States "k.{layer}" and "v.{layer}", [kv_heads, CTX, head_dim] of
    `kv_dtype`, with WINDOW_CTX instead of CTX for layers with a window, and the states of recurrent layers. Output
    "logits", f32 [SEQ, vocab_size], for every row. Matrices are weights of the file's dtype. Small tensors are f32
    weights; the loader passes their values through `config.value(name, stored)`. All have canonical names, or those of
    `views`.

    Args:
        kv_dtype: f32, f16, bf16, q8_0 or q4_0.
        hidden: adds the output "hidden" f32 [SEQ, hidden]: the hidden states before the head.
        place: canonical name -> its replacement in errors: the file, and the tensor's name there.

    Raises:
        ArgumentError: KV caches cannot have this dtype.
        WeightError: a tensor is missing, or has another shape or dtype than the configuration says.
    """
    with placed(config, place):
        graph = ARCHITECTURES[config.arch].build(config, weights, kv_dtype)
    return graph if hidden else graph.replace(outputs={"logits": graph.outputs["logits"]})


def build_predictor(
    config: ModelConfig,
    weights: Weights,
    kv_dtype: DType,
    rows: int,
    *,
    place: Callable[[str], str] | None = None,
) -> Graph:
    """The graph of the MTP head (multi-token prediction), for models that have one.

    Inputs "tokens" and "positions", i32 [SEQ], and "hidden" f32 [SEQ, hidden]: for each token the model's output
    "hidden" of the row before it or, after the first draft, this graph's "next_hidden". States "k.{layers}" and
    "v.{layers}". Outputs "next_hidden" f32 [SEQ, hidden], and "token" i32 [SEQ], the likeliest of the first `rows` ids
    after each token, -1 if a logit is NaN or infinite. The weight `DRAFT_HEAD` [rows, hidden] must be bound to the
    first rows of `predictor_head(config)`.

    Raises:
        UnsupportedModelError: the model has no MTP head.
        WeightError: as `build`.
    """
    check_predictor(config, weights, place)
    with placed(config, place):
        graph: Graph = import_module(f"{__name__}.qwen35").build_predictor(config, weights, kv_dtype, rows)
    return graph


def check_predictor(config: ModelConfig, weights: Weights, place: Callable[[str], str] | None = None) -> None:
    """`UnsupportedModelError` if a model has no MTP head."""
    if config.recurrence is None or not weights.has(f"blk.{config.layers}.nextn.eh_proj.weight"):
        where = place("output.weight").rpartition(", ")[0] if place else None
        hint = 'Use speculative="prompt-lookup", which needs none, or a file with the tensors "nextn" ("mtp").'
        raise UnsupportedModelError("the model has no MTP head", where=where, hint=hint)


def predictor_head(config: ModelConfig) -> str:
    """The name of the matrix whose first rows serve as `DRAFT_HEAD`."""
    return "token_embd.weight" if config.tied else "output.weight"


@contextmanager
def placed(config: ModelConfig, place: Callable[[str], str] | None) -> Iterator[None]:
    """Adds the file to errors, and replaces the tensor's canonical name by that in the file.

    Args:
        place: as in `build`; None changes nothing.
    """
    try:
        yield
    except ModelFileError as error:
        if place is None or error.where is None:
            raise
        name, part = place_in(config, error.where)
        raise type(error)(error.what, where=f"{place(name)}{part}", hint=error.hint) from error


def config_from(
    format: str, metadata: Mapping[str, Any], has_tensor: Callable[[str], bool], *, where: object
) -> ModelConfig:
    """The configuration of an open file.

    Args:
        format: "gguf" or "safetensors".
        metadata: GGUF key-values, or the parsed `config.json`.
        has_tensor: whether the file has a tensor of this name.
        where: shown in errors: the file.

    Raises:
        ArgumentError: an unknown format.
        ConfigError, UnsupportedModelError: as `from_gguf` and `from_hf`.
    """
    if format == "gguf":
        return models.from_gguf(metadata, has_tensor, where=where)
    if format == "safetensors":
        return models.from_hf(metadata, where=where)
    raise ArgumentError(f"format is {format!r}, expected 'gguf' or 'safetensors'")
