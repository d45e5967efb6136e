"""A history of tokens over an engine: steps that choose the next one, and logits for who chooses himself.

Runners stage, over `engine.py`: the same sessions as `cached.py`, driven a call at a time. The history is `tokens`; the
session in the caches is a prefix of it. A step computes what the session lacks of the history, and appends a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlx.errors import PromptError
from rlx.runners.base import GREEDY
from rlx.runners.checks import TokenIds, check_finite, check_ids, fit_context
from rlx.runners.exclusive import Exclusive
from rlx.runners.generation import Logits
from rlx.runners.stopping import NOTHING, OnToken, Stopping, checked_count
from rlx.sampling import SampleOpts, Sampler

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.runners.engine import Engine
    from rlx.runtime.given import Given


class TokenHistory:
    """The tokens so far, and ways to add to them.

    One thread at a time, as `LmRunner`: a second one gets a `BusyError`.

    Args:
        engine: a model; closed with the history.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: list[int] = []
        self._logits: Logits | None = None  # after the whole history, where that is in the session
        self._given: Given | None = None  # what the history begins with in place of embeddings
        self._sampler: Sampler | None = None
        self._exclusive = Exclusive("generator")
        self._exclusive.restore = lambda: self._engine.recover()  # profiles put another engine in its place

    # ---------------------------------------------------------------------------------------------- the history

    def prefill(self, ids: TokenIds) -> None:
        """Replaces the history by a prompt. Nothing is computed: the next step does it.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds something that is no id.
        """
        with self._exclusive("prefill"):
            self._start(self._checked(ids))

    def prefill_from_embeds(self, ids: TokenIds, embeds: Any, attn_bias: Any = None) -> None:
        """As `prefill`, with embeddings in place of the tokens' own.

        Args:
            ids: the tokens, which the history holds, and of which layers with embeddings of their own (Gemma 3n and 4)
                look those up.
            embeds: numbers [len(ids), hidden], or flat in that order: what the first layer sees, so with the model's
                scale applied; `embed` gives those of tokens.
            attn_bias: numbers [len(ids), len(ids)] or [heads, len(ids), len(ids)], or flat in that order; added to the
                scaled scores of every layer in place of the causal mask: 0 opens a key and -inf closes it, later ones
                included. A sliding window still hides what it has left behind. Tokens behind the prompt are causal.

        Raises:
            PromptError: as `prefill`; a wrong shape; a NaN; an infinite number, but for -inf in the bias; a row of the
                bias that closes everything; later keys opened over more tokens than a call takes.
        """
        with self._exclusive("prefill_from_embeds"):
            tokens = self._checked(ids)
            self._start(tokens, self._engine.give(len(tokens), embeds, attn_bias))

    @property
    def tokens(self) -> list[int]:
        """The history: the prompt, and what came after; a copy."""
        return list(self._tokens)

    @property
    def past_seq(self) -> int:
        """How many tokens of the history the caches hold: all but the last after a step, all after `*_get_logits`."""
        return self._engine.past

    def _checked(self, ids: TokenIds) -> list[int]:
        return fit_context(check_ids(ids, self.config.vocab_size, "prompt"), self._engine.max_seq, "prompt")

    def _start(self, tokens: list[int], given: Given | None = None) -> None:
        self._engine.reset()
        self._tokens, self._given, self._logits, self._sampler = tokens, given, None, None

    # ---------------------------------------------------------------------------------------------- one token

    def step(self, opts: SampleOpts = GREEDY) -> int:
        """Computes the whole history anew, chooses a token and appends it: slow, and the measure for `step_cached`.

        Options that stay equal from step to step go on with their random numbers; others begin with their seed.

        Raises:
            PromptError: there is no history, or the context is full.
            NumericalError: a logit is NaN or infinite.
        """
        with self._exclusive("step"):
            return self._step(opts)

    def step_cached(self, opts: SampleOpts = GREEDY) -> int:
        """As `step`, computing only what the caches lack: the prompt at first, then one token.

        Afterwards `past_seq == len(tokens) - 1`: the new token is the input of the next step.
        """
        with self._exclusive("step_cached"):
            return self._step_cached(opts)

    def _step(self, opts: SampleOpts) -> int:
        self._engine.reset()
        self._logits = None
        return self._step_cached(opts)

    def _step_cached(self, opts: SampleOpts) -> int:
        with self._whole():
            logits = self._logits if self._logits is not None else self._compute()
            if self._sampler is None or self._sampler.opts != opts:
                self._sampler = Sampler(opts, self._tokens)
            token = self._sampler.sample(logits)
        self._tokens.append(token)
        self._logits = None
        return token

    def _compute(self) -> Logits:
        """The logits after the history; the caches then hold all of it."""
        engine, past = self._engine, self._engine.past
        if not self._tokens:
            raise PromptError("there is no history", where="step", hint="call prefill with a prompt first")
        fit_context(self._tokens, engine.max_seq, "history")
        if past >= len(self._tokens):  # an interrupt came between a step and its token
            engine.reset()
            past = 0
        if past == 0 and self._given is not None:
            past = len(self._given)
            logits = engine.forward_given(self._tokens[:past], self._given)
        if past < len(self._tokens):
            logits = engine.forward(self._tokens[past:])
        return check_finite(logits, f"position {len(self._tokens) - 1}")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What fails inside leaves the session at the length that it had, or empty."""
        past = self._engine.past
        try:
            yield
        except BaseException:
            self._engine.trim(min(past, self._engine.past))
            raise

    # ---------------------------------------------------------------------------------------------- several tokens

    def generate(
        self, n: int, opts: SampleOpts = GREEDY, *, on_token: OnToken | None = None, stop_ids: Set[int] = NOTHING
    ) -> list[int]:
        """`n` tokens by `step`, fewer where one is in `stop_ids`, `on_token` returns False, or the context is full.

        Raises:
            ArgumentError: `n` is no whole number of at least 0.
            PromptError, NumericalError: as `step`; what was generated before stays in the history.
        """
        with self._exclusive("generate"):
            return self._generate(self._step, n, opts, on_token, stop_ids)

    def generate_cached(
        self, n: int, opts: SampleOpts = GREEDY, *, on_token: OnToken | None = None, stop_ids: Set[int] = NOTHING
    ) -> list[int]:
        """As `generate`, by `step_cached`."""
        with self._exclusive("generate_cached"):
            return self._generate(self._step_cached, n, opts, on_token, stop_ids)

    def _generate(
        self,
        step: Callable[[SampleOpts], int],
        n: int,
        opts: SampleOpts,
        on_token: OnToken | None,
        stop_ids: Set[int],
    ) -> list[int]:
        room = self._engine.max_seq + 1 - len(self._tokens)
        stopping = Stopping(checked_count("n", n) or 0, room=room, stop_ids=stop_ids, on_token=on_token)
        tokens: list[int] = []
        while stopping.reason is None:
            tokens.append(step(opts))
            stopping.push(tokens[-1])
        return tokens

    def generate_from_embeds(
        self,
        ids: TokenIds,
        embeds: Any,
        n: int,
        opts: SampleOpts = GREEDY,
        *,
        attn_bias: Any = None,
        on_token: OnToken | None = None,
        stop_ids: Set[int] = NOTHING,
    ) -> list[int]:
        """`prefill_from_embeds`, then `generate_cached`."""
        self.prefill_from_embeds(ids, embeds, attn_bias)
        return self.generate_cached(n, opts, on_token=on_token, stop_ids=stop_ids)

    # ---------------------------------------------------------------------------------------------- logits

    def prefill_get_last_logits(self, ids: TokenIds) -> Logits:
        """Replaces the history by `ids` and computes it; chooses nothing. Afterwards `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError, NumericalError: as `prefill` and `step`.
        """
        with self._exclusive("prefill_get_last_logits"):
            self._start(self._checked(ids))
            return self._get_logits()

    def decode_get_logits(self, token: int) -> Logits:
        """Appends a token of the caller's choice and computes it. Afterwards `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no history, the context is full, or `token` is no id.
            NumericalError: a logit is NaN or infinite; the history then stays as it was.
        """
        with self._exclusive("decode_get_logits"):
            checked = check_ids([token], self.config.vocab_size, "token")
            if not self._tokens:
                raise PromptError("there is no history", where="decode_get_logits", hint="call prefill first")
            self._tokens += checked
            try:
                return self._get_logits()
            except BaseException:
                self._tokens.pop()
                raise

    def _get_logits(self) -> Logits:
        with self._whole():
            logits = self._compute()
        if self._sampler is not None:
            self._sampler = None  # the history has tokens that it did not see
        self._logits = logits
        return logits.copy()

    # ---------------------------------------------------------------------------------------------- the model

    @property
    def config(self) -> ModelConfig:
        """Sizes and switches of the model."""
        return self._engine.config

    @property
    def max_seq(self) -> int:
        """How many tokens the context holds."""
        return self._engine.max_seq

    def sync_device(self) -> None:
        """Waits for what the device still does. A CPU does nothing behind a call's back: it returns at once."""
        with self._exclusive("sync_device"):
            pass

    def stats(self) -> dict[str, Any]:
        """What the engine holds and has done; `programs` are the counters of the tables of programs, by phase."""
        with self._exclusive("stats"):
            return self._engine.stats()

    def close(self) -> None:
        """Gives back the memory and the threads; once is enough, more does no harm."""
        if not self._exclusive.closed:
            with self._exclusive("close"):
                self._exclusive.closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self.config
        return f"<{type(self).__name__}: {config.family}, {len(self._tokens)} tokens, context {self.max_seq}>"
