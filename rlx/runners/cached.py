"""A runner over an engine: one session in the KV cache, a step a token.

Runners stage, between `engine.py` (token ids in, logits out) and whoever wants text. The session is the tokens in the
cache: `prefill_logits` and `generate` start one, `decode_logits` continues it, `predict_logits` leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from rlx.errors import ArgumentError, BusyError, PromptError, TokenizerError, UnsupportedModelError
from rlx.runners.base import GREEDY, checked_speculation
from rlx.runners.batch import generate_together
from rlx.runners.checks import TokenIds, check_finite, check_ids
from rlx.runners.exclusive import Use
from rlx.runners.generation import Generation, Logits, Request, Source, stepwise
from rlx.runners.looked_up import LookedUp
from rlx.runners.ready import ReadyPrograms
from rlx.runners.speculative import Counters, Drafter, PromptLookup, Speculation
from rlx.runners.stopping import OnToken
from rlx.runners.text_runner import TextRunner
from rlx.runners.token_engine import TokenEngine
from rlx.runtime.devices import Device
from rlx.sampling import SampleOpts
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.runtime.snapshot import Snapshot
    from rlx.text.tokenizer import Tokenizer


POOLINGS = ("mean", "last")
More = Callable[[int, int, Sequence[int]], list[int]]


class CachedRunner(TextRunner):
    """A `TextRunner` that keeps what it has computed.

    One thread at a time: a second one gets a `BusyError` at once instead of a wrong answer, and so does a callback that
    calls its own runner. A closed runner is busy for good.

    Args:
        engine: a loaded model; closed with the runner.
        device: what it runs on.
        sample: how tokens are chosen by calls that do not say; "recommended" for what the model's files recommend, and
            greedily by default.
        on_token: the callback of calls that give none of their own.
        streams: whether `generate` calls it with each token as it comes; False calls it when all tokens are there, when
            it can no longer stop the generation.
        speculative: how `generate` and `stream` guess where a call says nothing else: `prompt-lookup`, `mtp` or not.

    Raises:
        ArgumentError: there is no such speculation.
        UnsupportedModelError: the engine holds a model of another family.
    """

    FAMILY: ClassVar[str | None] = None
    """The one family a subclass is for; None takes any."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        device: Device = Device.CPU,
        sample: Sample = None,
        on_token: OnToken | None = None,
        streams: bool = True,
        speculative: str | None = None,
    ) -> None:
        found = engine.config.family
        if self.FAMILY not in (None, found):
            raise UnsupportedModelError(
                f"{type(self).__name__} runs the family '{self.FAMILY}', this model is of '{found}'",
                hint="rlx.auto_runner picks the runner that fits",
            )
        self._engine, self._device, self._on_token, self._streams = engine, device, on_token, streams
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
    def device(self) -> Device:
        return self._device

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            TokenizerError: the file has none that can be built.
            BusyError: the runner was closed before anyone asked.
        """
        if self._exclusive.closed:
            raise BusyError("the runner was closed", where="tokenizer", hint="open the model again")
        return self._engine.tokenizer

    @property
    def stop_ids(self) -> Set[int]:
        """The tokenizer's `eog_ids`; `TokenizerError` if the file has no tokenizer that can be built."""
        try:
            return self.tokenizer.eog_ids
        except TokenizerError as error:
            hint = "without a tokenizer nothing says where an answer ends: generate(..., stop_at_eog=False)"
            raise TokenizerError(error.what, where=error.where, hint=hint) from error

    # ---------------------------------------------------------------------------------------------- logits

    def predict_logits(self, ids: TokenIds, all_positions: bool = False) -> Logits:
        with self._exclusive("predict_logits"):
            engine = self._engine
            context = self.checked_ids(ids)
            with engine.scratch():
                return check_finite(engine.forward(context, all_positions), "predict_logits")

    def _logits(self, context: list[int]) -> Logits:
        with self._engine.scratch():
            return check_finite(self._engine.forward(context), "predict_logits")

    def _all_logits(self, context: list[int]) -> Generator[Logits, None, None]:
        with self._engine.scratch():
            for rows in self._engine.forward_rows(context[:-1]):
                yield check_finite(rows, "score")

    def embed(self, ids: TokenIds, pooling: str = "mean", normalize: bool = True) -> Logits:
        """A text as one vector: the hidden states in front of the head, after the final norm. Leaves no state behind.

        Args:
            pooling: `mean` over all positions, or `last`, which alone has seen all of the text.
            normalize: scaled to length 1, so that a product of two vectors is the cosine of their angle.

        Returns:
            float32[hidden].

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds something that is no id.
            ArgumentError: there is no such pooling.
            NumericalError: a hidden state is NaN or infinite.
        """
        if pooling not in POOLINGS:
            hint = f"there is {' and '.join(map(repr, POOLINGS))}"
            raise ArgumentError(f"pooling is {pooling!r}", where="embed", hint=hint)
        with self._exclusive("embed"):
            engine = self._engine
            context = self.checked_ids(ids)
            with engine.scratch():
                pieces = [check_finite(rows, "embed") for rows in engine.hidden_rows(context)]
        total = np.sum([rows.sum(0, dtype=np.float64) for rows in pieces], 0)
        vector = total / len(context) if pooling == "mean" else pieces[-1][-1].astype(np.float64)
        length = float(np.linalg.norm(vector)) if normalize else 1.0
        return np.asarray(vector / (length or 1.0), np.float32)

    def prefill_logits(self, ids: TokenIds) -> Logits:
        """Starts a session with `ids`. What they share with the session before is not computed again.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds something that is no id; the session before
                stays as it was.
            NumericalError: a logit is NaN or infinite.
        """
        with self._exclusive("prefill_logits"):
            engine = self._engine
            return self._prefill(engine, self.checked_ids(ids))

    def decode_logits(self, token: int) -> Logits:
        """Continues the session by one token.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no session, the context is full, or `token` is no id.
            NumericalError: a logit is NaN or infinite.
        """
        with self._exclusive("decode_logits"):
            engine = self._engine
            if not engine.past:
                raise PromptError("there is no session", where="decode_logits", hint="call prefill_logits first")
            return self._decode(engine, check_ids([token], self.vocab_size, "token")[0])

    @property
    def past_seq(self) -> int:
        """How many tokens the session holds."""
        return self._engine.past

    def reset(self) -> None:
        """Ends the session."""
        with self._exclusive("reset"):
            engine = self._engine
            engine.reset()

    def snapshot(self) -> Snapshot:
        """A copy of the session: its ids, the used part of every cache, and the recurrent states.

        It is immutable, and `Snapshot.save` writes it to a file.
        """
        with self._exclusive("snapshot"):
            engine = self._engine
            return engine.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on from a snapshot, in place of the session; the context may have another length than it had there.

        Raises:
            SnapshotError: it is of another model, or of another type of cache; the session stays.
            PromptError: it holds more tokens than the context.
        """
        with self._exclusive("restore"):
            engine = self._engine
            engine.restore(snapshot)

    # ---------------------------------------------------------------------------------------------- text

    def disable_decode_compile_cache(self) -> None:
        """From now on `generate` computes the whole context anew for every token: slow, and the measure of the rest."""
        self._cached, self._speculative = False, None

    def generate_packed(self, ids: TokenIds, n_new: int, on_token: OnToken | None = None, **options: Any) -> Generation:
        """`generate`, under the name that the original has for it with packed weights: they are always packed here."""
        return self.generate(ids, n_new, on_token, **options)

    def generate_stoppable(self, ids: TokenIds, n_new: int, on_token: OnToken, **options: Any) -> Generation:
        """`generate`, under the name of the original where the callback may stop it; here it always may."""
        return self.generate(ids, n_new, on_token, **options)

    @property
    def recommended_sample(self) -> SampleOpts | None:
        return self._engine.recommended

    def _source(self, request: Request) -> Source:
        """The tokens of a generation: the prompt is computed once, then a step a token.

        It starts a session of its own, which afterwards holds the prompt and all tokens of the result but the last.
        """
        return self._session_source(request) if self._cached else super()._source(request)

    def _session_source(self, request: Request) -> Source:
        engine = self._engine
        if request.speculative:
            return self._speculative_source(engine, request)

        def first() -> Logits:
            return self._prefill(engine, request.context)

        if request.is_free and engine.repeats:
            return _in_runs(first, engine.greedy, request, engine.max_seq)
        return stepwise(first, lambda token: self._decode(engine, token), request)

    def _speculative_source(self, engine: TokenEngine, request: Request) -> Source:
        """The same tokens, with guessed ones checked several at a time."""
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
        """The same tokens, where nobody needs to see one before the next ones are guessed."""

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
        """The logits after `ids`, which become the session; what the session has of them already is kept."""
        try:
            engine.trim(shared := min(shared_prefix(engine.ids, ids), len(ids) - 1))
            self._reused += shared
            return check_finite(engine.forward(ids[shared:]), "prefill")
        except BaseException:  # an interrupt too: half a prompt is no session
            engine.reset()
            raise

    def _decode(self, engine: TokenEngine, token: int) -> Logits:
        past = engine.past
        if past >= engine.max_seq:
            raise PromptError(
                f"the context is full: it holds {past} tokens", where="decode_logits",
                hint="start anew with prefill_logits, or open the model with a larger max_seq",
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
        """Compiles every program ahead, or finds it in the cache.

        Args:
            on_program: called with each record as it is ready: `phase`, `bucket`, `kernels`, `object_bytes`, `seconds`,
                `cached`.
            batch: how many prompts `generate_batch` will get at once, at most.
            phase: "prefill", "decode", "greedy" or "batch": only the programs of this phase.
            rows: only the programs that take so many rows.

        Raises:
            ArgumentError: `batch` is below 1, or no program is of that phase or takes so many rows.
            CompileError: a program cannot be compiled.
            CacheError: the cache is read-only and lacks a program.
        """
        with self._exclusive("compile"):
            engine = self._engine
            return engine.compile(on_program, batch, phase, rows)

    @property
    def programs(self) -> ReadyPrograms:
        """The programs that were compiled or loaded so far, each with `ir`, `source`, `llvm`, `asm` and `explain`.

        Example: `print(runner.programs["decode"].asm("linear"))`; `runner.compile()` makes those that are missing.

        Raises:
            BusyError: the runner is in use or closed.
        """
        with self._exclusive("programs"):
            return self._engine.ready

    def stats(self) -> Mapping[str, Any]:
        """What the engine holds: bytes, threads, counters of the compile cache; what was `compiled`; `reused_tokens`:
        tokens of prompts that did not have to be computed because the session held them already; and `speculation`: how
        many `steps` with guesses there were, and how many tokens were `drafted` and `accepted`.
        """
        with self._exclusive("stats"):
            engine = self._engine
            return {**engine.stats(), "reused_tokens": self._reused, "speculation": asdict(self._speculated)}

    def close(self) -> None:
        """Gives back the memory and the threads, and ends a stream of this thread; more than once does no harm."""
        if not self._exclusive.closed:
            with self._exclusive("close"):
                self._exclusive.closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        with self._exclusive("with"):
            return self


def _in_runs(first: Callable[[], Logits], more: More, request: Request, most: int) -> Source:
    """The source where nobody needs to see a token before the next one is computed.

    Args:
        first: the logits after the prompt.
        more: tokens after one: at most so many, and none behind a stop.
        most: tokens that the context has room for.
    """
    stopping, found = request.stopping, [request.sampler.sample(first())]
    while True:
        for token in found:
            yield token, None
        found = more(found[-1], stopping.left or most, [*stopping.stop_ids])


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _drafter(engine: TokenEngine, request: Request) -> AbstractContextManager[Drafter]:
    """Who guesses the tokens of a generation, while it lasts."""
    return engine.predicting() if request.speculative == "mtp" else nullcontext(PromptLookup(request.context))
