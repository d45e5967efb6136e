"""The session of a model: one sequence that stays between calls. And what is measured of prompts: logits, vectors.

Runners stage, under `model.py`. Each call is a task of the engine loop: it runs in the loop's thread, in pieces,
between the steps of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Ids
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rlx.closing import on_error
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import Sequence
from rlx.engine.loop.handle import Step, candidate, likeliest
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.loop.room import KeptSequence
from rlx.engine.model_runner import Segment, packed
from rlx.engine.request import Context, Logits, check_finite
from rlx.errors import ArgumentError, PromptError
from rlx.passes.options import MAX_SEGMENTS
from rlx.sampling.choice import log_probs
from rlx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.engine.kv.snapshot import Snapshot

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
POOLINGS = ("mean", "last")
ALL_LOGITS = 1 << 24  # maximum number of logits of one piece


class Session:
    """A sequence that stays between calls. `begin` and `extend` are for tasks of the loop; the other calls make one.

    Args:
        engine: the model.
        loop: the engine's.
        kept: holds the sequence; others may take it, too.
        shared: whether it shares what the cache knows of prompts.

    Attributes:
        kept: as given.
        reused: tokens of prompts that the cache knew.
    """

    def __init__(self, engine: Engine, loop: EngineLoop, kept: KeptSequence, *, shared: bool = True) -> None:
        self._engine, self._loop, self.kept, self._shared = engine, loop, kept, shared
        self.reused = 0

    def begin(
        self, ids: list[int], embeddings: PromptEmbeddings | None = None, where: str = "prefill"
    ) -> Generator[None, None, Logits]:
        """Begins anew with a prompt: the logits after it. After an error there is no session.

        Args:
            where: the last position in errors.
        """
        if (old := self.kept.take()) is not None:
            old.close()
        prompt = ids if self._shared else ()
        yield from _read(self._engine, prompt, embeddings)
        sequence = self._engine.open_sequence(prompt, embeddings, shared=self._shared)
        with on_error(sequence.discard):
            self.reused += len(sequence)
            last = yield from last_logits(self._engine, sequence, ids, self._loop)
            logits = check_finite(last, where)
        self._put(sequence, len(ids))
        return logits

    def extend(self, ids: list[int]) -> Generator[None, None, Logits]:
        """Continues by some ids: the logits after them. After an error the session is as before."""
        sequence, past, room = self.kept.sequence, self.kept.length, self._loop.room
        room.use(sequence)
        try:
            last = yield from last_logits(self._engine, sequence, ids, self._loop, past)
            logits = check_finite(last, f"position {past + len(ids) - 1}")
        except BaseException:
            sequence.rewind(min(past, len(sequence)))
            raise
        finally:
            room.keep(sequence)
        self.kept.put(sequence, past + len(ids))
        return logits

    def prefill(self, context: Context) -> Logits:
        """Begins anew with a prompt: the logits after it."""

        def work() -> Generator[None, None, Logits]:
            return (yield from self.begin(context.ids, (yield from embedded(context))))

        return self._loop.call(work)

    def decode(self, token: int) -> Logits:
        """Continues by one token: the logits after it."""

        def work() -> Generator[None, None, Logits]:
            past = self.kept.length
            if not past:
                raise PromptError("there is no session", where="decode_logits", hint="call prefill_logits first")
            if past >= self._engine.max_seq:
                raise PromptError(
                    f"the context is full: it holds {past} tokens", where="decode_logits",
                    hint="start a new session with prefill_logits, or open the model with a larger max_seq",
                )  # fmt: skip
            return (yield from self.extend([token]))

        return self._loop.call(work)

    def reset(self) -> None:
        """Ends it."""
        old = self.kept.take()
        if old is not None:
            self._loop.call(old.close)

    def snapshot(self) -> Snapshot:
        """A copy of it, empty if there is none."""

        def work() -> Snapshot:
            if (sequence := self.kept.sequence) is None:
                return self._engine.snapshot_of(self._engine.open_sequence(shared=False))
            self._loop.room.use(sequence)
            try:
                return self._engine.snapshot_of(sequence)
            finally:
                self._loop.room.keep(sequence)

        return self._loop.call(work)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces it by a snapshot."""

        def work() -> None:
            sequence = self._engine.restored(snapshot)
            self._put(sequence, len(sequence))

        self._loop.call(work)

    def _put(self, sequence: Sequence, length: int) -> None:
        """Makes a sequence the session, in the loop's thread."""
        old = self.kept.take()
        self.kept.put(sequence, length)
        self._loop.room.keep(sequence)
        if old is not None:
            old.close()


# -- what is measured of a prompt; stateless ---------------------------------------------------------------------------


def predicted(engine: Engine, loop: EngineLoop, context: Context, all_positions: bool) -> Logits:
    """The logits after a prompt, or after each of its positions: see `LmRunner.predict_logits`."""
    if all_positions:
        return np.concatenate(_pieces(engine, loop, context, context.ids, "all", "predict_logits", _itself))

    def work() -> Generator[None, None, Logits]:
        embeddings = yield from embedded(context)
        yield from _read(engine, context.ids, embeddings, context.salt)
        with closing(_opened(engine, context, embeddings, shared=True)) as sequence:
            return check_finite((yield from last_logits(engine, sequence, context.ids, loop)), "predict_logits")

    return loop.call(work)


def recomputed(engine: Engine, ids: list[int], embeddings: PromptEmbeddings | None = None) -> Logits:
    """The logits after some ids, computed from nothing; in the loop's thread."""
    with closing(engine.open_sequence((), embeddings, shared=False)) as sequence:
        while (at := len(sequence)) < len(ids):
            part = ids[at : sequence.call_end(at, engine.most_rows)]
            (found,) = engine.step([Segment(sequence, part)])
        assert found is not None
        return found


def measured(engine: Engine, loop: EngineLoop, context: Context, measure: Callable[[Logits, list[int]], T]) -> list[T]:
    """The results of `measure` for the logits before each piece of the prompt, and of its ids; the first id aside."""
    ids = context.ids

    def of(rows: Logits, at: int) -> T:
        return measure(rows, ids[at + 1 : at + 1 + len(rows)])

    return _pieces(engine, loop, context, ids[:-1], "all", "score", of)


def _pieces(
    engine: Engine,
    loop: EngineLoop,
    context: Context,
    ids: list[int],
    output: Literal["all", "hidden"],
    where: str,
    measure: Callable[[Logits, int], T],
) -> list[T]:
    """What `measure` makes of the rows of each piece of a prompt's `ids`, and of the position of the first row."""

    def work() -> Generator[None, None, list[T]]:
        embeddings, found = (yield from embedded(context)), list[T]()
        with closing(_opened(engine, context, embeddings)) as sequence:
            for rows in appended(engine, sequence, ids, output, loop):
                found.append(measure(check_finite(rows, where), len(sequence) - len(rows)))
                yield
        return found

    return loop.call(work)


def _itself(rows: Logits, at: int) -> Logits:
    return rows


def measured_ends(engine: Engine, loop: EngineLoop, prompts: Ids[Context], measure: Callable[[Logits], T]) -> list[T]:
    """What `measure` makes of the logits after each of several prompts; short ones are computed together."""

    def work() -> Generator[None, None, list[T]]:
        found: dict[int, T] = {}
        most = min(loop.scheduler.task_rows(0), engine.most_rows)
        for numbers in packed([len(each) for each in prompts], most, MAX_SEGMENTS):
            with ExitStack() as stack:
                every = [_opened(engine, prompts[i], None, shared=True) for i in numbers]
                opened = [stack.enter_context(closing(each)) for each in every]
                rows: Ids[Logits | None]
                if len(numbers) == 1:
                    rows = [(yield from last_logits(engine, opened[0], prompts[numbers[0]].ids, loop))]
                else:
                    each = zip(numbers, opened, strict=True)
                    segments = [Segment(own, prompts[i].ids[len(own) :]) for i, own in each]
                    rows = loop.room.made_for(partial(engine.step, segments))
                for i, row in zip(numbers, rows, strict=True):
                    assert row is not None
                    found[i] = measure(check_finite(row, "rerank"))
            yield
        return [found[i] for i in range(len(prompts))]

    return loop.call(work)


class Scores(list[float]):
    """The scores of documents.

    Attributes:
        tokens: how many the model has read for them.
    """

    def __init__(self, scores: Iterable[float], tokens: int) -> None:
        super().__init__(scores)
        self.tokens = tokens


def steps_of(tokenizer: Tokenizer, top_logprobs: int, rows: Logits, tokens: list[int]) -> list[Step]:
    """A step for each of `tokens`, with its log-probability in its row of logits, and the likeliest ones there."""
    found = []
    for row, token, logprob in zip(rows, tokens, log_probs(rows, tokens).tolist(), strict=True):
        text = candidate(tokenizer, token, logprob).text
        found.append(Step(token, logprob, None, text, likeliest(tokenizer, token, logprob, row, top_logprobs)))
    return found


def embedding(engine: Engine, loop: EngineLoop, context: Context, pooling: str, normalize: bool) -> Logits:
    """A prompt as one vector: see `Model.embed`."""
    pieces = _pieces(engine, loop, context, context.ids, "hidden", "embed", _itself)
    total = np.sum([rows.sum(0, dtype=np.float64) for rows in pieces], 0)
    vector: Floats = total / len(context) if pooling == "mean" else pieces[-1][-1].astype(np.float64)
    return of_unit_length(vector) if normalize else vector.astype(np.float32)


def of_unit_length(vectors: npt.ArrayLike) -> Logits:
    """Vectors [..., width], each divided by its length, as float32; zeros stay."""
    exact = np.asarray(vectors, np.float64)
    lengths = np.linalg.norm(exact, axis=-1, keepdims=True)
    return (exact / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def checked_pooling(pooling: Any) -> str:
    """`pooling`; `ArgumentError` if it is unknown."""
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        hint = f"give {' or '.join(map(repr, POOLINGS))}"
        raise ArgumentError(f"pooling is {pooling!r}", where="embed", hint=hint)
    return pooling


def _read(
    engine: Engine, prompt: Ids[int], embeddings: PromptEmbeddings | None, salt: str = ""
) -> Generator[None, None, None]:
    """Reads states of a prompt's beginning that are kept on disk."""
    if engine.kept is not None and (work := engine.kept.reading(prompt, embeddings, salt)) is not None:
        yield from work


def _opened(engine: Engine, context: Context, embeddings: PromptEmbeddings | None, *, shared: bool = False) -> Sequence:
    """A sequence for a prompt, with its adapter."""
    prompt, salt = context.ids if shared else (), context.salt
    return engine.open_sequence(prompt, embeddings, shared=shared, salt=salt, adapter=context.adapter)


def embedded(context: Context) -> Generator[None, None, PromptEmbeddings | None]:
    """The rows of a prompt's images, which are encoded in pieces where they are not known; None without images."""
    if context.images is None:
        return None
    found: PromptEmbeddings = yield from context.images.encoded()
    return found


def appended(
    engine: Engine,
    sequence: Sequence,
    ids: list[int],
    output: Literal["last", "all", "hidden"],
    loop: EngineLoop,
    start: int = 0,
) -> Iterator[Logits]:
    """Appends what a sequence lacks of some ids, in pieces, each computed on demand.

    Args:
        loop: says how many rows a piece may have, and makes room.
        start: the position of the first id.

    Returns:
        Of each piece the logits of all rows or of the last one, or the hidden states of all, float32 [rows, width].
        With "last", nothing useful but for the last piece.
    """
    while (at := len(sequence)) < start + len(ids):
        most = min(loop.scheduler.task_rows(at), engine.most_rows)
        if output == "all":
            most = min(most, max(1, ALL_LOGITS // engine.config.vocab_size))
        piece = ids[at - start : min(sequence.call_end(at, most) - start, len(ids))]
        if output == "hidden":
            yield engine.hidden(sequence, piece)
        else:
            (found,) = loop.room.made_for(partial(engine.step, [Segment(sequence, piece, output)]))
            assert found is not None
            yield np.atleast_2d(found)


def last_logits(
    engine: Engine, sequence: Sequence, ids: list[int], loop: EngineLoop, start: int = 0
) -> Generator[None, None, Logits]:
    """Appends what a sequence lacks of some ids, in pieces; the logits after the last, float32[vocab]."""
    last: Logits | None = None
    for rows in appended(engine, sequence, ids, "last", loop, start):
        last = rows[-1]
        if len(sequence) < start + len(ids):
            yield
    assert last is not None, "there is at least one id that the sequence lacks"
    return last
