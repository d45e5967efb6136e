"""A model without its weights: a `WeightLoader` with metadata, names, types and shapes, but no bytes.

Part of the weights stage, beside the readers of files: enough to build a graph and compile it, not to run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import WeightError
from rlx.weights.mapped import Bytes, Closing, TensorInfo


class Header(Closing):
    """The header that a model file would have.

    Args:
        path: shown in errors: what the header was made from.
        format: `gguf` or `safetensors`.
        metadata: GGUF key-values, or a parsed `config.json`.
        tensors: in the order of the file.
        values: the bytes of the few small tensors whose values are part of a program.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        metadata: Mapping[str, Any],
        tensors: Iterable[TensorInfo],
        values: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self.path, self.format, self.metadata = path, format, metadata
        self.tensors: Mapping[str, TensorInfo] = {info.name: info for info in tensors}
        self._values = dict(values or {})

    def raw(self, name: str) -> Bytes:
        if name not in self._values:
            hint = "it compiles, but only a model with weights runs: name a model file"
            raise WeightError("there are no weights", where=self.path, hint=hint)
        return np.ascontiguousarray(self._values[name]).reshape(-1).view(np.uint8)

    def release(self, name: str) -> None:
        """No effect: there is no memory to release."""

    def stamps(self) -> list[tuple[str, int, int]]:
        return []

    def close(self) -> None:
        """No effect: there is no file."""
