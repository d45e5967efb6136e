"""Vectors over a Ray dataset: `embed`.

Ray stage, beside `data.py`. A pool of actors holds the model; each gets a batch of rows at a time and packs the texts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import rlx
from rlx.arguments import check_arguments
from rlx.errors import ArgumentError, UnsupportedModelError
from rlx.ray.data import over_actors
from rlx.runners.encoder import as_encoder

if TYPE_CHECKING:
    from ray.data import Dataset

BATCH = 2048  # rows: enough to pack texts of similar lengths
_OPTIONS = ("prompt_name", "prompt", "dimensions", "normalize", "pooling", "truncate")


def embed(
    dataset: Dataset,
    model: str | os.PathLike[str],
    *,
    column: str = "text",
    output: str = "embedding",
    replicas: int | tuple[int, int] = 1,
    num_cpus: int | None = None,
    batch_size: int = BATCH,
    engine: Mapping[str, Any] | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """The rows of a dataset with the vectors of their texts.

        rows = ray.data.read_parquet("pages")
        rlx.ray.embed(rows, "bge-m3", replicas=(1, 8), num_cpus=8, truncate=True).write_parquet("vectors")

    Args:
        dataset: any Ray dataset. Nothing is computed before its rows are asked for.
        model: an embedding model, as for `rlx.auto_runner`. A path must be there on every node.
        column: the column of the texts.
        output: the new column, float32 [width] a row.
        replicas: number of actors; with (least, most) Ray Data chooses.
        num_cpus: cores of an actor, and its threads; by default the threads that the model would have here.
        batch_size: rows that an actor gets at a time.
        engine: options of `rlx.auto_runner`, such as `precision`.
        ray_remote_args: of the actors, such as `resources`.
        options: those of `EncoderRunner.embed`, such as `prompt_name` and `truncate`.

    Raises:
        ArgumentError: an option is unknown or out of its range.
    """
    check_arguments("embed", options, list(_OPTIONS), frozenset())
    names = {"column": column, "output": output, "options": options}
    pool = {"replicas": replicas, "num_cpus": num_cpus, "batch_size": batch_size, "ray_remote_args": ray_remote_args}
    return over_actors(dataset, Texts, "numpy", model, engine, names, **pool)


class Texts:
    """An actor of the pool: it makes the vectors of one batch of rows after the other."""

    def __init__(self, model: str, engine: dict[str, Any], options: dict[str, Any], column: str, output: str) -> None:
        found = as_encoder(rlx.auto_runner(model, **engine))
        if found is None:
            hint = "use a model of docs/embeddings.md"
            raise UnsupportedModelError("the model is no embedding model", where=model, hint=hint)
        self._encoder, self._options, self._column, self._output = found, options, column, output

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch with the column of vectors."""
        if self._column not in batch:
            hint = f"name one of {', '.join(batch)}"
            raise ArgumentError(f"there is no column {self._column!r}", where="column", hint=hint)
        if self._output in batch:
            hint = "give another name as output="
            raise ArgumentError(f"the dataset has a column {self._output!r} already", where="output", hint=hint)
        texts = [str(text) for text in batch[self._column]]
        return {**batch, self._output: self._encoder.embed(texts, **self._options)}
