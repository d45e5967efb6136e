"""A runner over an engine: one session in the KV cache, one step per token.

Runners stage, between `engine.py` (token ids in, logits out) and code that works with text. The session is the tokens
in the cache: `prefill_logits` and `generate` start one, `decode_logits` continues it, `predict_logits` does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from rlx.errors import ArgumentError, BusyError, PromptError, TokenizerError, UnsupportedModelError
from rlx.runners.base import GREEDY, checked_speculation
from rlx.runners.engine.batch import generate_together
from rlx.runners.engine.ready import ReadyPrograms
from rlx.runners.engine.token_engine import TokenEngine
from rlx.runners.generation.checks import TokenIds, check_finite, check_ids
from rlx.runners.generation.exclusive import Use
from rlx.runners.generation.requests import Generation, Logits, Request, Source, stepwise
from rlx.runners.generation.stopping import OnToken
from rlx.runners.speculation.prompt_lookup import LookedUp
from rlx.runners.speculation.speculative import Counters, Drafter, PromptLookup, Speculation
from rlx.runners.text_runner import TextRunner
from rlx.sampling import SampleOpts
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.runtime.snapshot import Snapshot
    from rlx.text.tokenizer import Tokenizer


POOLINGS = ("mean", "last")
More = Callable[[int, int, Sequence[int]], list[int]]


class CachedRunner(TextRunner):
    """A `TextRunner` that caches what it has computed.

    One caller at a time: a second thread gets a `BusyError` at once, and so does a callback that calls its own runner.
    A closed runner always raises `BusyError`.

    Args:
        engine: a loaded model; closed with the runner.
        sample: default sampling options of calls that give none; "recommended" for those in the model's files; greedy
            by default.
        on_token: default callback of calls that give none.
        streams: whether `generate` calls it for each token as it is generated. False calls it after the last token; it
            then cannot stop the generation.
        speculative: default speculative decoding of `generate` and `stream`: `prompt-lookup`, `mtp` or None.

    Raises:
        ArgumentError: `speculative` is unknown.
        UnsupportedModelError: the engine holds a model of another family.
    """

    FAMILY: ClassVar[str | None] = None
    """The family that a subclass supports; None for any."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        sample: Sample = None,
        on_token: OnToken | None = None,
        streams: bool = True,
        speculative: str | None = None,
    ) -> None:
        found = engine.config.family
        if self.FAMILY not in (None, found):
            raise UnsupportedModelError(
                f"{type(self).__name__} runs the family '{self.FAMILY}', this model is of '{found}'",
                hint="rlx.auto_runner picks the right runner",
            )
        self._engine, self._on_token, self._streams = engine, on_token, streams
        self._sample = None if sample is None else resolved(sample, engine.recommended, GREEDY)
        self._speculative = checked_speculation(speculative)
        self._reused, self._cached = 0, True
        self._exclusive.restore = engine.recover
        self._speculated = Counters()
        engine.ahead.is_busy = lambda: not self._exclusive.is_free

    # ---------------------------------------------------------------------------------------------- the model

    @property
    def family(self) -> str:
        return self._engine.config.family

    @property
    def vocab_size(self) -> int:
        return self._engine.config.vocab_size

    @property
    def max_seq(self) -> int:
        return self._engine.max_seq

    @property
    def config(self) -> ModelConfig:
        """Sizes and switches of the model."""
        return self._engine.config

    @property
    def device(self) -> str:
        return self._engine.device

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            TokenizerError: the file has none, or it cannot be built.
            BusyError: the runner was closed before the first use.
        """
        if self._exclusive.closed:
            raise BusyError("the runner was closed", where="tokenizer", hint="open the model again")
        return self._engine.tokenizer

    @property
    def stop_ids(self) -> Set[int]:
        """The tokenizer's `eog_ids`; `TokenizerError` if the file has no usable tokenizer."""
        try:
            return self.tokenizer.eog_ids
        except TokenizerError as error:
            hint = "stop ids come from the tokenizer: use generate(..., stop_at_eog=False)"
            raise TokenizerError(error.what, where=error.where, hint=hint) from error

    # ---------------------------------------------------------------------------------------------- logits

    def predict_logits(self, ids: TokenIds, all_positions: bool = False) -> Logits:
        with self._exclusive("predict_logits"):
            context = self.checked_ids(ids)
            with self._engine.scratch():
                return check_finite(self._engine.forward(context, all_positions), "predict_logits")

    def _logits(self, context: list[int]) -> Logits:
        with self._engine.scratch():
            return check_finite(self._engine.forward(context), "predict_logits")

    def _all_logits(self, context: list[int]) -> Generator[Logits, None, None]:
        with self._engine.scratch():
            for rows in self._engine.forward_rows(context[:-1]):
                yield check_finite(rows, "score")

    def embed(self, ids: TokenIds, pooling: str = "mean", normalize: bool = True) -> Logits:
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
        with self._exclusive("embed"):
            context = self.checked_ids(ids)
            with self._engine.scratch():
                pieces = [check_finite(rows, "embed") for rows in self._engine.hidden_rows(context)]
        total = np.sum([rows.sum(0, dtype=np.float64) for rows in pieces], 0)
        vector = total / len(context) if pooling == "mean" else pieces[-1][-1].astype(np.float64)
        length = float(np.linalg.norm(vector)) if normalize else 1.0
        return np.asarray(vector / (length or 1.0), np.float32)

    def prefill_logits(self, ids: TokenIds) -> Logits:
        """Starts a session with `ids`. The prefix that they share with the previous session is not recomputed.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id; the previous session is
                unchanged.
            NumericalError: a logit is NaN or infinite.
        """
        with self._exclusive("prefill_logits"):
            return self._prefill(self._engine, self.checked_ids(ids))

    def decode_logits(self, token: int) -> Logits:
        """Continues the session by one token.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no session, the context is full, or `token` is not a valid token id.
            NumericalError: a logit is NaN or infinite.
        """
        with self._exclusive("decode_logits"):
            if not self._engine.past:
                raise PromptError("there is no session", where="decode_logits", hint="call prefill_logits first")
            return self._decode(self._engine, check_ids([token], self.vocab_size, "token")[0])

    @property
    def past_seq(self) -> int:
        """Number of tokens in the session."""
        return self._engine.past

    def reset(self) -> None:
        """Ends the session."""
        with self._exclusive("reset"):
            self._engine.reset()

    def snapshot(self) -> Snapshot:
        """A copy of the session: its token ids, the used part of every cache, and the recurrent states.

        It is immutable, and `Snapshot.save` writes it to a file.
        """
        with self._exclusive("snapshot"):
            return self._engine.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the session by a snapshot. The context may be longer or shorter than that of the snapshot's runner.

        Raises:
            SnapshotError: it is of another model, or of another KV cache type; the session is unchanged.
            PromptError: it holds more tokens than the context.
        """
        with self._exclusive("restore"):
            self._engine.restore(snapshot)

    # ---------------------------------------------------------------------------------------------- text

    def disable_decode_compile_cache(self) -> None:
        """Makes `generate` recompute the whole context for every token: slow, for comparison with the cached path."""
        self._cached, self._speculative = False, None

    def generate_packed(self, ids: TokenIds, n_new: int, on_token: OnToken | None = None, **options: Any) -> Generation:
        """Alias of `generate`: RLX's name for it with packed weights. rlx always packs weights."""
        return self.generate(ids, n_new, on_token, **options)

    def generate_stoppable(self, ids: TokenIds, n_new: int, on_token: OnToken, **options: Any) -> Generation:
        """Alias of `generate`: RLX's name for it with a callback that may stop it. In rlx every callback may."""
        return self.generate(ids, n_new, on_token, **options)

    @property
    def recommended_sample(self) -> SampleOpts | None:
        return self._engine.recommended

    def _source(self, request: Request) -> Source:
        """The tokens of a generation: the prompt is computed once, then one step per token.

        It starts a new session, which finally holds the prompt and all tokens of the result but the last.
        """
        return self._session_source(request) if self._cached else super()._source(request)

    def _session_source(self, request: Request) -> Source:
        engine = self._engine
        if request.speculative:
            return self._speculative_source(engine, request)

        def first() -> Logits:
            return self._prefill(engine, request.context)

        if request.is_free and engine.repeats:
            return _in_runs(first, partial(engine.greedy, engine.current), request, engine.max_seq)
        return stepwise(first, lambda token: self._decode(engine, token), request)

    def _speculative_source(self, engine: TokenEngine, request: Request) -> Source:
        """The same tokens with speculative decoding: several drafts are checked in one step."""
        if request.is_free and engine.repeats:
            yield from self._drafted_source(engine, request)
            return
        with _drafter(engine, request) as drafter:
            logits = self._prefill(engine, request.context)
            left = request.stopping.left or engine.max_seq
            speculation = Speculation(engine, drafter, left - 1, check_finite, self._speculated)
            try:
                yield from stepwise(lambda: logits, speculation.step, request)
            finally:
                speculation.finish()

    def _drafted_source(self, engine: TokenEngine, request: Request) -> Source:
        """The same tokens with drafts, several per native call: no caller observes single tokens."""

        def first() -> Logits:
            return self._prefill(engine, request.context)

        if request.speculative != "mtp":
            looked_up = LookedUp(engine, PromptLookup(request.context), self._speculated)
            yield from _in_runs(first, looked_up.more, request, engine.max_seq)
            return
        with engine.predicting() as drafter:

            def more(token: int, count: int, stops: Sequence[int]) -> list[int]:
                found = engine.drafted(drafter, token, count, stops, self._speculated)
                return found or [request.sampler.sample(self._decode(engine, token))]

            yield from _in_runs(first, more, request, engine.max_seq)

    def _together(self, requests: list[Request], length: int, use: Use) -> list[Generation]:
        if not self._cached:
            return super()._together(requests, length, use)
        return generate_together(self._engine, requests, length)

    def _prefill(self, engine: TokenEngine, ids: list[int]) -> Logits:
        """The logits after `ids`, which become the session; a shared prefix is reused."""
        try:
            engine.trim(shared := min(shared_prefix(engine.ids, ids), len(ids) - 1))
            self._reused += shared
            return check_finite(engine.forward(ids[shared:]), "prefill")
        except BaseException:  # KeyboardInterrupt included: a partial prompt must not stay in the session
            engine.reset()
            raise

    def _decode(self, engine: TokenEngine, token: int) -> Logits:
        past = engine.past
        if past >= engine.max_seq:
            raise PromptError(
                f"the context is full: it holds {past} tokens", where="decode_logits",
                hint="start a new session with prefill_logits, or open the model with a larger max_seq",
            )  # fmt: skip
        try:
            return check_finite(engine.forward([token]), f"position {past}")
        except BaseException:
            engine.trim(past)
            raise

    # ---------------------------------------------------------------------------------------------- the engine

    def compile(
        self,
        on_program: Callable[[Any], None] | None = None,
        batch: int = 1,
        *,
        phase: str | None = None,
        rows: int | None = None,
    ) -> Sequence[Any]:
        """Compiles every program, or finds it in the cache.

        Args:
            on_program: called with each record when it is ready: `phase`, `bucket`, `kernels`, `object_bytes`,
                `seconds`, `cached`.
            batch: maximum number of prompts that `generate_batch` will compute at once.
            phase: "prefill", "decode", "greedy" or "batch": only the programs of this phase.
            rows: only programs that accept this number of rows.

        Raises:
            ArgumentError: `batch` is below 1, or no program matches `phase` and `rows`.
            CompileError: a program cannot be compiled.
            CacheError: the cache is read-only and lacks a program.
        """
        with self._exclusive("compile"):
            return self._engine.compile(on_program, batch, phase, rows)

    @property
    def programs(self) -> ReadyPrograms:
        """The programs compiled or loaded so far, each with `ir`, `source`, `llvm`, `asm` and `explain`.

        Example: `print(runner.programs["decode"].asm("linear"))`; `runner.compile()` makes the missing ones.

        Raises:
            BusyError: the runner is in use or closed.
        """
        with self._exclusive("programs"):
            return self._engine.ready

    def stats(self) -> Mapping[str, Any]:
        """Sizes and counters of the engine: bytes, threads, compile cache counters, and what was `compiled`.

        `reused_tokens` counts prompt tokens that were not recomputed because the session held them. `speculation`
        counts `steps` with drafts, and how many tokens were `drafted` and `accepted`.
        """
        with self._exclusive("stats"):
            return {**self._engine.stats(), "reused_tokens": self._reused, "speculation": asdict(self._speculated)}

    def close(self) -> None:
        """Releases memory and threads, and ends this thread's stream. Can be called more than once."""
        if not self._exclusive.closed:
            with self._exclusive("close"):
                self._exclusive.closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        with self._exclusive("with"):
            return self


def _in_runs(first: Callable[[], Logits], more: More, request: Request, most: int) -> Source:
    """The source for generations whose single tokens no caller observes: several tokens per native call.

    Args:
        first: the logits after the prompt.
        more: returns tokens after a given one: at most so many, and none after a stop id.
        most: number of tokens that the context has room for.
    """
    stopping, found = request.stopping, [request.sampler.sample(first())]
    while True:
        for token in found:
            yield token, None
        found = more(found[-1], stopping.left or most, [*stopping.stop_ids])


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _drafter(engine: TokenEngine, request: Request) -> AbstractContextManager[Drafter]:
    """A context manager that gives the drafter of a generation."""
    return engine.predicting() if request.speculative == "mtp" else nullcontext(PromptLookup(request.context))
