"""Texts as vectors, for OpenAI's and Ollama's embeddings. Server stage, below the APIs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rlx.serve.http import in_thread

if TYPE_CHECKING:
    from rlx.engine.request.context import Context
    from rlx.engine.request.output import Logits
    from rlx.serve.model import ServedModel


async def vectors_of(
    model: ServedModel,
    contexts: Sequence[Context],
    dimensions: int | None = None,
    pooling: str = "mean",
    normalize: bool = True,
) -> list[Logits]:
    """The vectors of prompts in order, each computed when the one before is there: whoever goes away stops them.

    Args:
        dimensions: how many of the first numbers of a vector it keeps; None for all.
        pooling: as for `embed`.
        normalize: scale what is kept to length 1.

    Returns:
        For each prompt float32[dimensions].
    """
    embed = partial(model.runner.embed, pooling=pooling, normalize=False)
    return [_shortened(await in_thread(partial(embed, each)), dimensions, normalize) for each in contexts]


def _shortened(vector: Logits, dimensions: int | None, normalize: bool) -> Logits:
    kept = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(kept)) if normalize else 1.0
    return (kept / (length or 1.0)).astype(np.float32)
