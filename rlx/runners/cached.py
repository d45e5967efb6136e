"""A runner over an engine: one session in the KV cache, a step a token.

Runners stage, between `engine.py` (token ids in, logits out) and whoever wants text. The session is the tokens in the
cache: `prefill_logits` and `generate` start one, `decode_logits` continues it, `predict_logits` leaves it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from rlx.errors import BusyError, PromptError, TokenizerError, UnsupportedModelError
from rlx.runners.base import (
    GREEDY,
    LmRunner,
    Logits,
    OnToken,
    TokenIds,
    check_finite,
    check_ids,
    generate_tokens,
)
from rlx.runners.sampling import SampleOpts, Sampler

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.text.tokenizer import Tokenizer


class TokenEngine(Protocol):
    """What a runner needs of an engine; `rlx.runners.engine.Engine` is the one there is.

    Attributes:
        max_seq: how many tokens the cache has room for.
        past: how many it holds.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def past(self) -> int: ...

    max_seq: int

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> Logits:
        """Appends `ids` to the cache; float32[vocab] after the last, or float32[len(ids), vocab], the caller's own."""
        ...

    def trim(self, length: int) -> None:
        """Forgets everything behind the first `length` tokens, of which there are at least as many."""
        ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def scratch(self) -> AbstractContextManager[object]:
        """Inside, the cache is empty; afterwards it is what it was before."""
        ...

    def compile(self, on_program: Callable[[Any], None] | None = None) -> Sequence[Any]: ...
    def stats(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


class CachedRunner(LmRunner):
    """An `LmRunner` that keeps what it has computed.

    One thread at a time: a second one gets a `BusyError` at once instead of a wrong answer, and so does a callback that
    calls its own runner. A closed runner is busy for good.

    Args:
        engine: a loaded model; closed with the runner.

    Raises:
        UnsupportedModelError: the engine holds a model of another family.
    """

    FAMILY: ClassVar[str | None] = None
    """The one family a subclass is for; None takes any."""

    def __init__(self, engine: TokenEngine) -> None:
        found = engine.config.family
        if self.FAMILY not in (None, found):
            raise UnsupportedModelError(
                f"{type(self).__name__} runs the family '{self.FAMILY}', this model is of '{found}'",
                hint="rlx.auto_runner picks the runner that fits",
            )
        self._engine = engine
        self._lock = threading.Lock()
        self._user: tuple[str, str] | None = None
        self._closed = False

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
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use; `TokenizerError` if the file has none that can be built."""
        return self._engine.tokenizer

    @property
    def stop_ids(self) -> Set[int]:
        """The tokenizer's `eog_ids`; `TokenizerError` if the file has no tokenizer that can be built."""
        try:
            return self.tokenizer.eog_ids
        except TokenizerError as error:
            hint = "without a tokenizer nothing says where an answer ends: generate(..., stop_at_eog=False)"
            raise TokenizerError(error.what, where=error.where, hint=hint) from error

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The prompt for a conversation: the model's chat template, up to where the answer begins.

        Args:
            messages: `{"role": ..., "content": ...}`; the text of control tokens in a content stays text.
            tools: JSON schemas of functions that the model may call.

        Raises:
            ChatTemplateError: the model has no template, or it refuses the messages.
        """
        from rlx.text.chat import chat_ids

        return chat_ids(self.tokenizer, messages, tools)

    # ---------------------------------------------------------------------------------------------- logits

    def predict_logits(self, ids: TokenIds, all_positions: bool = False) -> Logits:
        with self._use("predict_logits") as engine:
            context = self.checked_ids(ids)
            with engine.scratch():
                return check_finite(engine.forward(context, all_positions), "predict_logits")

    def prefill_logits(self, ids: TokenIds) -> Logits:
        """Starts a session with `ids`.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds something that is no id; the session before
                stays as it was.
            NumericalError: a logit is NaN or infinite.
        """
        with self._use("prefill_logits") as engine:
            return self._prefill(engine, self.checked_ids(ids))

    def decode_logits(self, token: int) -> Logits:
        """Continues the session by one token.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no session, the context is full, or `token` is no id.
            NumericalError: a logit is NaN or infinite.
        """
        with self._use("decode_logits") as engine:
            if not engine.past:
                raise PromptError("there is no session", where="decode_logits", hint="call prefill_logits first")
            return self._decode(engine, check_ids([token], self.vocab_size, "token")[0])

    @property
    def past_seq(self) -> int:
        """How many tokens the session holds."""
        return self._engine.past

    def reset(self) -> None:
        """Ends the session."""
        with self._use("reset") as engine:
            engine.reset()

    # ---------------------------------------------------------------------------------------------- text

    def generate(
        self,
        ids: TokenIds,
        n_new: int,
        on_token: OnToken | None = None,
        sample: SampleOpts = GREEDY,
        stop_at_eog: bool = True,
    ) -> list[int]:
        """As `LmRunner.generate`: the prompt is computed once, then a step a token.

        It starts a session of its own, which afterwards holds the prompt and all tokens of the result but the last.
        """
        with self._use("generate") as engine:
            context = self.checked_ids(ids)
            count = self.room_for(len(context), n_new)
            stop_ids = self.stop_ids if stop_at_eog else frozenset()
            return generate_tokens(
                self._prefill(engine, context) if count else None,
                lambda token: self._decode(engine, token),
                Sampler(sample, context),
                count,
                on_token,
                stop_ids,
            )

    def _prefill(self, engine: TokenEngine, ids: list[int]) -> Logits:
        engine.reset()
        try:
            return check_finite(engine.forward(ids), "prefill")
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

    def compile(self, on_program: Callable[[Any], None] | None = None) -> Sequence[Any]:
        """Compiles every program ahead, or finds it in the cache.

        Args:
            on_program: called with each record as it is ready: `phase`, `bucket`, `kernels`, `object_bytes`, `seconds`,
                `cached`.

        Raises:
            CompileError: a program cannot be compiled.
            CacheError: the cache is read-only and lacks a program.
        """
        with self._use("compile") as engine:
            return engine.compile(on_program)

    def stats(self) -> Mapping[str, Any]:
        """What the engine holds: bytes, threads, counters of the compile cache."""
        with self._use("stats") as engine:
            return engine.stats()

    def close(self) -> None:
        """Gives back the memory and the threads; once is enough, more does no harm."""
        if not self._closed:
            with self._use("close") as engine:
                self._closed = True
                engine.close()

    @contextmanager
    def _use(self, what: str) -> Iterator[TokenEngine]:
        """The engine, for one caller at a time."""
        if not self._lock.acquire(blocking=False):
            thread, doing = self._user or ("another thread", "something")
            raise BusyError(
                f"the runner is in use: {doing} in thread {thread}", where=what,
                hint="one thread at a time, and not from a callback of its own; open a runner for each thread",
            )  # fmt: skip
        try:
            if self._closed:
                raise BusyError("the runner was closed", where=what, hint="open the model again")
            self._user = (threading.current_thread().name, what)
            yield self._engine
        finally:
            self._user = None
            self._lock.release()

    def __enter__(self) -> Self:
        with self._use("with"):
            return self
