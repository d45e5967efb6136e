"""The graph under construction: declares a model's weights and checks them against the file.

Part of the models stage: family files pass a `Model` to the blocks of `rlx.models.blocks`. They determine which tensors
there are, and their shapes; for models without weights, the graph is built to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, WeightError
from rlx.ir.dtypes import BF16, F16, F32, KV_DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.config import Layer, ModelConfig
from rlx.models.views import View, views

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Expected:
    """A tensor that a file would have."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class ExpectedWeights:
    """Replaces a file while a graph is built: assumes that every requested tensor exists in the expected shape.

    Attributes:
        dtype: type of every tensor.
        rows: first dimensions that only the tensors themselves have, by name without the layer.
        shapes: canonical name -> shape of each tensor that was requested.
    """

    dtype: DType
    rows: Mapping[str, int]
    shapes: Shapes = field(default_factory=dict)

    def has(self, name: str, /) -> bool:
        """Whether the file has an optional tensor: only if its size is known."""
        return _in_layer(name) in self.rows

    def info(self, name: str, /) -> Expected:
        """An optional tensor with its known rows; other tensors as `expect` recorded them."""
        return Expected(self.shapes.get(name, (self.rows.get(_in_layer(name), 1),)), self.dtype)

    def expect(self, name: str, shape: tuple[int, ...]) -> Expected:
        """Records that the model has this tensor."""
        self.shapes[name] = shape
        return Expected(shape, self.dtype)

    def array(self, name: str, /) -> npt.NDArray[np.float32]:
        raise WeightError("its values are needed, and there are no weights", where=name)


def expected_shapes(config: ModelConfig, rows: Mapping[str, int], has_name: Callable[[str], bool]) -> Shapes:
    """Canonical name -> shape, row-major, of every tensor of a checkpoint of this model.

    Args:
        rows: first dimensions that only a checkpoint's tensors have, by name in the layer or decoder.
        has_name: whether checkpoints have a tensor of this name; if not, it is a part of another one, see `views`.

    Raises:
        UnsupportedModelError, ConfigError: as `rlx.models.build`.
    """
    from rlx.models.registry import ARCHITECTURES

    weights = ExpectedWeights(BF16, rows)
    ARCHITECTURES[config.arch].build(config, weights, F32)
    parts: dict[str, View] = {}
    for view in views(config, has_name):
        parts.setdefault(view.name, view)
    found: Shapes = {}
    for name, shape in weights.shapes.items():
        if has_name(name) or name not in parts:
            found[name] = shape
        else:
            view = parts[name]
            if view.matrices:
                found[view.source] = (view.matrices * view.period, shape[1 if view.transposed else 2])
                continue
            axis = len(shape) - 1 if name.endswith(".bias") else max(len(shape) - 2, 0)
            found[view.source] = (*shape[:axis], shape[axis] * view.period // view.rows, *shape[axis + 1 :])
    return found


def _in_layer(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name


FLOATS = (F32, F16, BF16)

_INCOMPLETE = "the file is incomplete, or its metadata is of another model: download or convert it again"
_MISMATCH = "the tensors and the metadata are not of one model: download or convert the model again"


class Tensor(Protocol):
    """Type and shape of one tensor in a file; the shape is row-major."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


DRAFT_HEAD = "draft_head.weight"  # the first rows of the model's head, in the graph of its MTP head


class Weights(Protocol):
    """The tensors of one file under canonical names, which are those of GGUF (`blk.0.attn_q.weight`)."""

    def has(self, name: str, /) -> bool: ...
    def info(self, name: str, /) -> Tensor: ...
    def array(self, name: str, /) -> npt.NDArray[np.float32]:
        """The values of a float tensor."""
        ...


C = TypeVar("C")


@dataclass(frozen=True)
class GraphOfLayers(Generic[C]):
    """A graph under construction, seen from one layer or from outside the layers.

    Attributes:
        config: the configuration, which says how many `layers` there are.
        layer: number of the layer, -1 outside.
    """

    graph: Graph
    config: C
    weights: Weights
    layer: int = field(default=-1, kw_only=True)

    def layers(self) -> Iterator[Self]:
        """The model seen from each of its layers."""
        config: Any = self.config
        return (replace(self, layer=layer) for layer in range(config.layers))

    def has(self, name: str) -> bool:
        """Whether the file has this tensor of the layer."""
        return self.weights.has(self._full(name))

    def weight(self, name: str, *shape: int) -> Node:
        """A tensor of the layer as a weight of the graph: matrices in the file's dtype, a vector in float32.

        Raises:
            WeightError: it is missing, or its shape or dtype is not what the configuration says.
        """
        full = self._full(name)
        found = checked(self.weights, full, shape)
        return self.graph.weight(full, shape, found.dtype if len(shape) > 1 else F32)

    def _full(self, name: str) -> str:
        return name if self.layer < 0 else f"blk.{self.layer}.{name}"


@dataclass(frozen=True)
class Model(GraphOfLayers[ModelConfig]):
    """The graph of a decoder under construction.

    Attributes:
        kv_dtype: type of the KV caches.
        caches: layer -> its caches after writing the new keys and values, for layers that share them.
    """

    kv_dtype: DType
    caches: dict[int, tuple[Node, Node]] = field(default_factory=dict)

    @property
    def here(self) -> Layer:
        """The sizes and switches of the layer."""
        return self.config.each[self.layer]

    def rows(self, name: str) -> int:
        """The first dimension of a tensor of the layer, if the configuration does not have it; 1 if it is missing."""
        full = self._full(name)
        return self.weights.info(full).shape[0] if self.weights.has(full) else 1

    def numbers(self, name: str, *shape: int) -> Node:
        """A small float tensor of the layer as a weight in float32, whatever its shape; `WeightError` as `weight`."""
        full = self._full(name)
        checked(self.weights, full, shape, floats=True)
        return self.graph.weight(full, shape, F32)

    def repeated(self, name: str, size: int, times: int) -> Node:
        """A vector of the layer, each of whose numbers counts several times; `ModelConfig.value` repeats them."""
        full = self._full(name)
        checked(self.weights, full, (size,))
        return self.graph.weight(full, (size * times,), F32)

    def values(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        """The values of a small float tensor of the layer; `WeightError` as `weight`."""
        full = self._full(name)
        checked(self.weights, full, shape, floats=True)
        return self.weights.array(full)

    def named(self, name: str, node: Node) -> Node:
        """Names a value of the layer in IR text, such as `%blk.3.attn`, and returns it."""
        return self.graph.named(self._full(name), node)


def checked(weights: Weights, full: str, shape: tuple[int, ...], *, floats: bool = False) -> Tensor:
    """The tensor of the canonical name `full`.

    Args:
        floats: whether its values must be floats; otherwise a matrix may have a block format.

    Raises:
        WeightError: it is missing, or its shape or dtype is not as expected.
    """
    if isinstance(weights, ExpectedWeights):
        return weights.expect(full, shape)
    if not weights.has(full):
        raise WeightError(f"the tensor is missing, expected shape {list(shape)}", where=full, hint=_INCOMPLETE)
    found = weights.info(full)
    if tuple(found.shape) != shape:
        raise WeightError(f"expected shape {list(shape)}, found {list(found.shape)}", where=full, hint=_MISMATCH)
    blocks = len(shape) > 1 and not floats
    if found.dtype not in FLOATS and not (blocks and found.dtype.block > 1):
        expected = "f32, f16, bf16" + " or a block format" * blocks
        raise WeightError(f"expected {expected}, found {found.dtype}", where=full)
    return found


def cache_dtype(config: ModelConfig, weights: Weights) -> str:
    """Default type of the KV caches: f16, but f32 for models that amplify its rounding errors.

    These are models that predict one residual stream from another (measured: cosines of 0.993 with f16), and routers
    with unrounded weights, which choose another expert when two are nearly tied (0.992).
    """
    routed = next((i for i, layer in enumerate(config.each) if layer.sparse), None)
    name = f"blk.{routed}.ffn_down_exps.weight"
    unrounded = routed is not None and weights.has(name) and not weights.info(name).dtype.is_quantized
    return "f32" if config.streams > 1 or unrounded else "f16"


def start(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Model:
    """An empty graph for the model.

    Raises:
        ArgumentError: KV caches do not support this dtype.
    """
    if kv_dtype not in KV_DTYPES:
        known = ", ".join(d.name for d in KV_DTYPES)
        raise ArgumentError(f"KV caches of {kv_dtype} are not supported", hint=f"Supported are {known}.")
    for size in {layer.head_dim for layer in config.each if not layer.recurrent}:
        if size % kv_dtype.block:
            what = f"KV caches of {kv_dtype} need heads of whole blocks of {kv_dtype.block}, not of {size}"
            raise ArgumentError(what, where="kv_dtype", hint='Choose "f16".')
    return Model(Graph(config.arch), config, weights, kv_dtype)
