"""The tensors that a configuration requires, found by building its graph: for models without weights.

Part of the models stage, beside `builder.py`: the family files determine which tensors there are, and their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlx.errors import WeightError
from rlx.ir.dtypes import BF16, F32, DType
from rlx.models.config import ModelConfig
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
    for view in views(config, lambda _: True):
        parts.setdefault(view.name, view)
    found: Shapes = {}
    for name, shape in weights.shapes.items():
        if has_name(name) or name not in parts:
            found[name] = shape
        else:
            view = parts[name]
            if view.matrices:
                found[view.source] = (view.matrices * view.period, shape[1 if view.turned else 2])
                continue
            axis = len(shape) - 1 if name.endswith(".bias") else max(len(shape) - 2, 0)
            found[view.source] = (*shape[:axis], shape[axis] * view.period // view.rows, *shape[axis + 1 :])
    return found


def _in_layer(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name
