"""A model's weights as float32 arrays: a mapping that reads a tensor from the file at each access.

Runners stage, for callers that use single tensors, such as embeddings that they combine with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from rlx.errors import WeightError
from rlx.ir.stored import dequantize
from rlx.models.config import ModelConfig
from rlx.weights import ModelWeights

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
