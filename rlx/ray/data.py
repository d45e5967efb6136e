"""Generation and vectors over a Ray dataset: `generate` and `embed`.

Ray stage. A pool of actors holds the model. Each takes a batch of rows at a time. For answers it hands all of them to
its engine, which computes them together; for vectors it packs the texts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

import rlx
from rlx.arguments import SAMPLING, check_arguments
from rlx.engine.opening.options import SLOTS, RunnerOptions
from rlx.errors import ArgumentError, RlxError, UnsupportedModelError
from rlx.ray.batch import at_least_one, cpus_of, path_on_nodes, range_of
from rlx.runners.encoder import as_encoder
from rlx.serve.prefixes import prompt_text

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset


BATCH = 4 * SLOTS  # rows: so many that the engine is seldom short of some, so few that a killed actor costs little
_CHAT = ("tools", "thinking", "variables", "sample", "stop", "min_tokens", "speculative")


def generate(
    dataset: Dataset,
    model: str | os.PathLike[str],
    *,
    column: str = "prompt",
    output: str = "answer",
    chat: bool | None = None,
    max_tokens: int | None = None,
    replicas: int | tuple[int, int] = 1,
    num_cpus: int | None = None,
    batch_size: int = BATCH,
    engine: Mapping[str, Any] | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """The rows of a dataset with the model's answers.

        rows = ray.data.read_parquet("questions")
        rlx.ray.generate(rows, "model.gguf", max_tokens=100, replicas=(1, 8), num_cpus=8).write_parquet("answers")

    A row gets the answer that it gets from `runner.chat` in a single process, whichever actor computes it and whatever
    else is in its batch. With a seed all rows have the same one. If an actor is killed, Ray starts another one, which
    computes its batch again. In a batch, rows with a common prefix are computed one after the other; to bring them
    together over the whole dataset, sort it by the column.

    Args:
        dataset: any Ray dataset. Nothing is computed before its rows are asked for.
        model: as for `rlx.auto_runner`. A path must be there on every node.
        column: the column of the prompts: texts, or conversations as lists of `{"role": ..., "content": ...}`.
        output: the new column of answers. Beside it `OUTPUT_thinking` has the reasoning, `OUTPUT_finish_reason` why the
            answer ended, `OUTPUT_tokens` and `OUTPUT_prompt_tokens` the numbers of tokens, and `OUTPUT_error` what is
            wrong with a row that has no answer, such as a prompt that is longer than the context.
        chat: whether a text is a user's message in the model's chat template, or is continued as it is. By default as a
            message if the model has a template.
        max_tokens: maximum length of an answer; by default what the context has room for.
        replicas: number of actors; with (least, most) Ray Data chooses.
        num_cpus: cores of an actor, and its threads; by default the threads that the model would have here.
        batch_size: rows that an actor gets at a time.
        engine: options of `rlx.auto_runner`, such as `slots` and `max_seq`.
        ray_remote_args: of the actors, such as `resources`.
        options: those of `runner.chat`, such as `temperature`, `seed`, `stop` and `tools`.

    Raises:
        ArgumentError: an option is unknown or out of its range.
    """
    check_arguments("generate", options, [*_CHAT, *sorted(SAMPLING)], frozenset())
    names = {"column": column, "output": output, "options": options, "chat": chat, "max_tokens": max_tokens}
    pool = {"replicas": replicas, "num_cpus": num_cpus, "batch_size": batch_size, "ray_remote_args": ray_remote_args}
    return over_actors(dataset, Rows, "pyarrow", model, engine, names, **pool)


def over_actors(
    dataset: Dataset,
    actor: type,
    batch_format: str,
    model: str | os.PathLike[str],
    engine: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    *,
    replicas: Any,
    num_cpus: Any,
    batch_size: Any,
    ray_remote_args: Any,
) -> Dataset:
    """The results of a pool of actors, each with the model, for the batches of a dataset.

    Args:
        actor: its class, which takes `model`, `engine` and `arguments`.
        batch_format: of the batches that it is called with.
        engine, replicas, num_cpus, batch_size, ray_remote_args: as for `generate`.

    Raises:
        ArgumentError: one of them is unknown or out of its range.
    """
    from ray.data import ActorPoolStrategy

    cpus = cpus_of(num_cpus)
    opening = {"threads": cpus, **(engine or {})}
    RunnerOptions(**opening)
    (least, most), size = range_of(replicas, 1), at_least_one("batch_size", batch_size)
    return dataset.map_batches(
        actor,
        batch_size=size,
        batch_format=batch_format,
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=cpus,
        fn_constructor_kwargs={"model": path_on_nodes(model), "engine": opening, **arguments},
        **(ray_remote_args or {}),
    )


class Rows:
    """An actor of the pool: it answers one batch of rows after the other."""

    def __init__(
        self,
        model: str,
        engine: dict[str, Any],
        options: dict[str, Any],
        column: str,
        output: str,
        chat: bool | None,
        max_tokens: int | None,
    ) -> None:
        self._runner = rlx.auto_runner(model, **engine)
        self._chat = bool(self._runner.tokenizer.chat_template) if chat is None else chat
        self._options, self._column, self._output, self._most = options, column, output, max_tokens
        self._callers = ThreadPoolExecutor(2 * RunnerOptions(**engine).slots)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with the columns of the answers."""
        import pyarrow as pa

        _check_columns(batch.column_names, self._column, [self._output + name for name in _COLUMNS])
        prompts = [_plain(value) for value in batch[self._column].to_pylist()]
        field = {value: name for name, value in (("prompt", str), ("messages", list))}
        texts = [prompt_text({field.get(type(prompt), "prompt"): prompt}) for prompt in prompts]
        answers: list[dict[str, Any]] = [{}] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: texts[i])
        for i, answer in zip(order, self._callers.map(self._answer, [prompts[i] for i in order]), strict=True):
            answers[i] = answer
        for name, kind in _COLUMNS.items():
            values = [answer.get(name) for answer in answers]
            batch = batch.append_column(self._output + name, pa.array(values, getattr(pa, kind)()))
        return batch

    def _answer(self, prompt: Any) -> dict[str, Any]:
        """The new columns of a row."""
        try:
            if not isinstance(prompt, str | list):
                raise ArgumentError(f"the prompt is {prompt!r}, expected a text or a list of messages")
            if self._chat or isinstance(prompt, list):
                found = self._runner.chat(prompt, self._most, **self._options)
            else:
                found = self._runner.complete(prompt, self._most, **self._options)
        except RlxError as error:
            return {"_error": str(error)}
        return {
            "": found.text,
            "_thinking": found.thinking,
            "_finish_reason": str(found.finish_reason),
            "_tokens": len(found.generation),
            "_prompt_tokens": found.prompt_tokens,
        }


_COLUMNS = {
    "": "string", "_thinking": "string", "_finish_reason": "string", "_tokens": "int64", "_prompt_tokens": "int64",
    "_error": "string",
}  # fmt: skip
"""Ends of the names of the new columns, and their types."""


def _check_columns(present: Collection[str], column: str, new: Iterable[str]) -> None:
    """Raises `ArgumentError` unless the dataset has the column, and none of the new ones."""
    if column not in present:
        hint = f"name one of {', '.join(present)}"
        raise ArgumentError(f"there is no column {column!r}", where="column", hint=hint)
    for name in new:
        if name in present:
            hint = "give another name as output="
            raise ArgumentError(f"the dataset has a column {name!r} already", where="output", hint=hint)


def _plain(value: Any) -> Any:
    """A prompt without the fields that Arrow added: all messages of a column have the same ones, some of them null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, list) else value


TEXTS = 2048  # rows: enough to pack texts of similar lengths
_OPTIONS = ("prompt_name", "prompt", "dimensions", "normalize", "pooling", "truncate")


def embed(
    dataset: Dataset,
    model: str | os.PathLike[str],
    *,
    column: str = "text",
    output: str = "embedding",
    replicas: int | tuple[int, int] = 1,
    num_cpus: int | None = None,
    batch_size: int = TEXTS,
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
        _check_columns(batch, self._column, [self._output])
        texts = [str(text) for text in batch[self._column]]
        return {**batch, self._output: self._encoder.embed(texts, **self._options)}
