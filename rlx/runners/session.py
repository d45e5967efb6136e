"""The session of a runner: one sequence that stays between calls. And calls that return logits.

Runners stage, under `cached.py`. Each call is a task of the engine loop: it runs in the loop's thread, in pieces,
between the steps of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rlx.engine.batch import Batch, Segment
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import Sequence
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.request.context import Context, PromptLike, check_finite, check_ids
from rlx.engine.request.output import Logits, Step, candidate, likeliest, log_probs
from rlx.engine.request.request import Job
from rlx.engine.token_engine import TokenEngine
from rlx.errors import ArgumentError, BusyError, PromptError
from rlx.runners.multimodal import MultimodalRunner

if TYPE_CHECKING:
    from rlx.engine.kv.snapshot import Snapshot

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
POOLINGS = ("mean", "last")
ALL_LOGITS = 1 << 24  # maximum number of logits of one piece


@dataclass
class Session:
    """A sequence that a runner keeps.

    Attributes:
        sequence: the tokens in the cache.
        longest: how many of them belong to the session; the loop may not have dropped the others yet.
    """

    sequence: Sequence
    longest: int

    @property
    def length(self) -> int:
        """Number of tokens in the session. Tokens that a grammar forced at the end of an answer are not computed."""
        return min(self.longest, len(self.sequence))


class SessionRunner(MultimodalRunner):
    """A `MultimodalRunner` with a session.

    Args:
        engine: a loaded model.
    """

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine
        self._closed = False
        self._reused = 0
        self._kept: dict[str, Session] = {}  # at most one; whoever takes it out owns it

    # ---------------------------------------------------------------------------------------------- the session

    def prefill_logits(self, ids: PromptLike) -> Logits:
        """Starts a session with `ids`. What the cache knows of their beginning is not recomputed.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id; the previous session is
                unchanged.
            NumericalError: a logit is NaN or infinite.
        """
        self._check_open("prefill_logits")
        context = self.checked_prompt(ids)

        def work() -> Generator[None, None, Logits]:
            embeddings = yield from embedded(context)
            if (old := self._taken()) is not None:
                old.close()
            yield from self._read(context.ids, embeddings)
            sequence = self._engine.open_sequence(context.ids, embeddings)
            try:
                self._reused += len(sequence)
                last = yield from last_logits(self._engine, sequence, context.ids, self._loop)
                logits = check_finite(last, "prefill")
            except BaseException:
                sequence.discard()
                raise
            self._put(sequence, len(context))
            return logits

        return self._loop.call(work)

    def decode_logits(self, token: int) -> Logits:
        """Continues the session by one token.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no session, the context is full, or `token` is not a valid token id.
            NumericalError: a logit is NaN or infinite.
        """
        self._check_open("decode_logits")
        (checked,) = check_ids([token], self.vocab_size, "token")

        def work() -> Logits:
            session = self._kept.get("session")
            if session is None or not session.length:
                raise PromptError("there is no session", where="decode_logits", hint="call prefill_logits first")
            past, sequence = session.length, session.sequence
            if self.max_seq is not None and past >= self.max_seq:
                raise PromptError(
                    f"the context is full: it holds {past} tokens", where="decode_logits",
                    hint="start a new session with prefill_logits, or open the model with a larger max_seq",
                )  # fmt: skip
            self._loop.room.use(sequence)
            try:
                (logits,) = self._loop.room.made_for(
                    lambda: self._engine.step(Batch([Segment(sequence, [checked])]))
                )
                assert logits is not None
                found = check_finite(logits, f"position {past}")
            except BaseException:
                sequence.rewind(min(past, len(sequence)))
                raise
            finally:
                self._loop.room.keep(sequence)
            session.longest = past + 1
            return found

        return self._loop.call(work)

    @property
    def past_seq(self) -> int:
        """Number of tokens in the session."""
        session = self._kept.get("session")
        return 0 if session is None else session.length

    def reset(self) -> None:
        """Ends the session."""
        self._check_open("reset")
        old = self._taken()
        if old is not None:
            self._loop.call(old.close)

    def snapshot(self) -> Snapshot:
        """A copy of the session: its token ids, the used part of every cache, and the recurrent states.

        It is immutable, and `Snapshot.save` writes it to a file.
        """
        self._check_open("snapshot")

        def work() -> Snapshot:
            session = self._kept.get("session")
            if session is None:
                return self._engine.snapshot_of(self._engine.open_sequence(shared=False))
            self._loop.room.use(session.sequence)
            try:
                return self._engine.snapshot_of(session.sequence)
            finally:
                self._loop.room.keep(session.sequence)

        return self._loop.call(work)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the session by a snapshot. The context may be longer or shorter than that of the snapshot's runner.

        Raises:
            SnapshotError: it is of another model, or of another KV cache type; the session is unchanged.
            PromptError: it holds more tokens than the context.
        """
        self._check_open("restore")

        def work() -> None:
            sequence = self._engine.restored(snapshot)
            self._put(sequence, len(sequence))

        self._loop.call(work)

    def _taken(self) -> Sequence | None:
        """The session's sequence, which belongs to the caller from now on."""
        session = self._kept.pop("session", None)
        return None if session is None else session.sequence

    def _put(self, sequence: Sequence, length: int) -> None:
        """Makes a sequence the session, in the loop's thread."""
        old = self._taken()
        self._kept["session"] = Session(sequence, length)
        self._loop.room.keep(sequence)
        if old is not None:
            old.close()

    def _adopt(self, job: Job, count: int) -> None:
        """Makes the sequence of a job the session, with the first `count` tokens of its answer but the last."""
        old = self._taken()
        self._kept["session"] = Session(job.sequence, len(job.prompt) + count - 1)
        if old is not None:
            self._loop.release(old)

    # ---------------------------------------------------------------------------------------------- logits

    def predict_logits(self, ids: PromptLike, all_positions: bool = False) -> Logits:
        self._check_open("predict_logits")
        context = self.checked_prompt(ids)

        def work() -> Generator[None, None, Logits]:
            embeddings, prompt = (yield from embedded(context)), () if all_positions else context.ids
            yield from self._read(prompt, embeddings)
            sequence = self._engine.open_sequence(prompt, embeddings, shared=not all_positions)
            try:
                if not all_positions:
                    last = yield from last_logits(self._engine, sequence, context.ids, self._loop)
                    return check_finite(last, "predict_logits")
                found = []
                for rows in appended(self._engine, sequence, context.ids, "all", self._loop):
                    found.append(check_finite(rows, "predict_logits"))
                    yield
                return np.concatenate(found)
            finally:
                sequence.close()

        return self._loop.call(work)

    def _scores(self, context: Context) -> Logits:
        return np.concatenate(self._measured(context, log_probs))

    def score_steps(self, ids: PromptLike, top_logprobs: int = 0) -> list[Step]:
        """`score` as steps, with the likeliest tokens at each position. Stateless.

        Args:
            top_logprobs: how many of the likeliest tokens each step has.

        Returns:
            A step for each id but the first: `token`, `logprob`, `text` and `top_logprobs`.

        Raises:
            PromptError, NumericalError: as `score`.
            TokenizerError: the model has no tokenizer.
        """
        context, tokenizer = self.checked_prompt(ids), self.tokenizer

        def steps(rows: Logits, tokens: list[int]) -> list[Step]:
            found = []
            for row, token, logprob in zip(rows, tokens, log_probs(rows, tokens).tolist(), strict=True):
                text = candidate(tokenizer, token, logprob).text
                found.append(Step(token, logprob, None, text, likeliest(tokenizer, token, logprob, row, top_logprobs)))
            return found

        if len(context) < 2:
            self._check_open("score_steps")
            return []
        return [step for piece in self._measured(context, steps) for step in piece]

    def _measured(self, context: Context, measure: Callable[[Logits, list[int]], T]) -> list[T]:
        """What `measure` makes of the logits before each piece of the prompt, and of its ids; the first id aside."""
        self._check_open("score")

        def work() -> Generator[None, None, list[T]]:
            embeddings, found, at = (yield from embedded(context)), list[T](), 1
            sequence = self._engine.open_sequence((), embeddings, shared=False)
            try:
                for rows in appended(self._engine, sequence, context.ids[:-1], "all", self._loop):
                    found.append(measure(check_finite(rows, "score"), context.ids[at : at + len(rows)]))
                    at += len(rows)
                    yield
                return found
            finally:
                sequence.close()

        return self._loop.call(work)

    def embed(self, ids: PromptLike, pooling: str = "mean", normalize: bool = True) -> Logits:
        """A text as one vector: the hidden states after the final norm, pooled. Stateless.

        Args:
            pooling: `mean` over all positions, or `last`, the only position that has seen the whole text.
            normalize: scale to length 1, so that the dot product of two vectors is their cosine similarity.

        Returns:
            float32[hidden].

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
            ArgumentError: `pooling` is unknown.
            NumericalError: a hidden state is NaN or infinite.
        """
        if pooling not in POOLINGS:
            hint = f"give {' or '.join(map(repr, POOLINGS))}"
            raise ArgumentError(f"pooling is {pooling!r}", where="embed", hint=hint)
        self._check_open("embed")
        context = self.checked_prompt(ids)

        def work() -> Generator[None, None, list[Logits]]:
            embeddings, pieces = (yield from embedded(context)), list[Logits]()
            sequence = self._engine.open_sequence((), embeddings, shared=False)
            try:
                for rows in appended(self._engine, sequence, context.ids, "hidden", self._loop):
                    pieces.append(check_finite(rows, "embed"))
                    yield
                return pieces
            finally:
                sequence.close()

        pieces = self._loop.call(work)
        total = np.sum([rows.sum(0, dtype=np.float64) for rows in pieces], 0)
        vector: Floats = total / len(context) if pooling == "mean" else pieces[-1][-1].astype(np.float64)
        length = float(np.linalg.norm(vector)) if normalize else 1.0
        return np.asarray(vector / (length or 1.0), np.float32)

    def _read(self, prompt: Ids[int], embeddings: PromptEmbeddings | None) -> Generator[None, None, None]:
        """Reads states of a prompt's beginning that are kept on disk."""
        kept = self._engine.kept
        if kept is not None and (work := kept.reading(prompt, embeddings)) is not None:
            yield from work

    def _check_open(self, where: str) -> None:
        """`BusyError` if the runner was closed."""
        if self._closed:
            raise BusyError("the runner was closed", where=where, hint="open the model again")


def embedded(context: Context) -> Generator[None, None, PromptEmbeddings | None]:
    """The rows of a prompt's images, which are encoded in pieces where they are not known; None without images."""
    if context.images is None:
        return None
    found: PromptEmbeddings = yield from context.images.encoded()
    return found


def appended(
    engine: TokenEngine,
    sequence: Sequence,
    ids: list[int],
    output: Literal["last", "all", "hidden"],
    loop: EngineLoop,
) -> Iterator[Logits]:
    """Appends what a sequence lacks of some ids, in pieces, each computed on demand.

    Args:
        loop: says how many rows a piece may have, and makes room.

    Returns:
        Of each piece the logits of all rows or of the last one, or the hidden states of all, float32 [rows, width].
        With "last", nothing useful but for the last piece.
    """
    while (at := len(sequence)) < len(ids):
        most = min(loop.scheduler.task_rows(at), engine.most_rows)
        if output == "all":
            most = min(most, max(1, ALL_LOGITS // engine.config.vocab_size))
        end = min(sequence.call_end(at, most), len(ids))
        if output == "hidden":
            yield engine.hidden(sequence, ids[at:end])
        else:
            batch = Batch([Segment(sequence, ids[at:end], output)])
            (found,) = loop.room.made_for(partial(engine.step, batch))
            assert found is not None
            yield np.atleast_2d(found)


def last_logits(
    engine: TokenEngine, sequence: Sequence, ids: list[int], loop: EngineLoop
) -> Generator[None, None, Logits]:
    """Appends what a sequence lacks of some ids, in pieces; the logits after the last, float32[vocab]."""
    last: Logits | None = None
    for rows in appended(engine, sequence, ids, "last", loop):
        last = rows[-1]
        if len(sequence) < len(ids):
            yield
    assert last is not None, "there is at least one id that the sequence lacks"
    return last
