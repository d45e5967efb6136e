"""Writes importance matrices as GGUF files, in the form of llama.cpp's `llama-imatrix`.

Export stage, beside `quantize.py`, which reads them (`rlx/weights/importance.py` has the form).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlx.export.hf_config import GgufType
from rlx.export.model import Bytes, ExportModel, Planned, write_gguf
from rlx.ir.dtypes import F32
from rlx.weights.importance import COUNTS, SUMS, Importance

KIND = "imatrix"


def write_importance(
    importance: Importance, out: str | os.PathLike[str], *, text: str, windows: int, window: int, force: bool
) -> int:
    """Writes a file in that form.

    Args:
        out: the file; see `check_output`. It is created only when it is complete.
        text: the name of the text.
        windows, window: how many windows of the text there were, and the tokens of each.
        force: replaces `out` if it exists.

    Returns:
        The file's size in bytes.

    Raises:
        ArgumentError: `out` exists, and `force` is not set.
        OutputError, ResourceError: the file cannot be written, or the disk is full.
    """
    metadata = {
        "general.type": (KIND, GgufType.STRING),
        f"{KIND}.datasets": ([text], (GgufType.ARRAY, GgufType.STRING)),
        f"{KIND}.chunk_count": (windows, GgufType.UINT32),
        f"{KIND}.chunk_size": (window, GgufType.UINT32),
    }
    model = ExportModel(Path(out), KIND, metadata, (), (), lambda: None)
    return write_gguf(Path(out), model, list(_tensors(importance)), F32.ggml or 0, force=force)


def _tensors(importance: Importance) -> Iterator[Planned]:
    for name, sums in importance.items():
        for suffix, values in ((SUMS, sums.squares), (COUNTS, sums.counts[:, None])):
            yield Planned(name + suffix, values.shape, F32, partial(_bytes, values))


def _bytes(values: npt.NDArray[np.float64]) -> list[Bytes]:
    return [np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)]
