"""A token history over an engine: steps that choose the next token, and logits for callers that choose it themselves.

Runners stage, over `engine.py`: the same sessions as `cached.py`, driven one call at a time. The history is `tokens`;
the session in the caches is a prefix of it. A step computes the rest of the history and appends one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlx.errors import PromptError
from rlx.runners.base import GREEDY
from rlx.runners.generation.checks import TokenIds, check_finite, check_ids, fit_context
from rlx.runners.generation.exclusive import Exclusive
from rlx.runners.generation.requests import Logits
from rlx.runners.generation.stopping import NOTHING, OnToken, Stopping, checked_count
from rlx.sampling import SampleOpts, Sampler

if TYPE_CHECKING:
    from rlx.models.config import ModelConfig
    from rlx.runners.engine.engine import Engine
    from rlx.runtime.prompt_embeddings import PromptEmbeddings


class TokenHistory:
    """The tokens so far, and methods that append to them.

    One caller at a time, as `LmRunner`: a second thread gets a `BusyError`.

    Args:
        engine: a model; closed with the history.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: list[int] = []
        self._logits: Logits | None = None  # after the whole history, if the session holds all of it
        self._embeddings: PromptEmbeddings | None = None  # prompt embeddings that the history starts with
        self._sampler: Sampler | None = None
        self._exclusive = Exclusive("generator")
        self._exclusive.restore = lambda: self._engine.recover()  # late binding: profiles replace the engine

    # ---------------------------------------------------------------------------------------------- the history

    def prefill(self, ids: TokenIds) -> None:
        """Replaces the history by a prompt. The next step computes it.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
        """
        with self._exclusive("prefill"):
            self._start(self._checked(ids))

    def prefill_from_embeds(self, ids: TokenIds, embeds: Any, attn_bias: Any = None) -> None:
        """As `prefill`, with prompt embeddings instead of the tokens' own embeddings.

        Args:
            ids: the tokens for the history; layers with their own embedding tables (Gemma 3n and 4) look them up there.
            embeds: numbers [len(ids), hidden], or flat in that order: the input of the first layer, with the model's
                embedding scale applied, as `embed` returns it.
            attn_bias: numbers [len(ids), len(ids)] or [heads, len(ids), len(ids)], or flat in that order; added to the
                scaled scores of every layer and replaces the causal mask: 0 opens a key, -inf masks it, including later
                keys. Sliding windows still apply. Tokens after the prompt are causal.

        Raises:
            PromptError: as `prefill`; a wrong shape; NaN; an infinite number except -inf in the bias; a row of the bias
                that masks every key; later keys opened in a prompt that is longer than one chunk.
        """
        with self._exclusive("prefill_from_embeds"):
            tokens = self._checked(ids)
            self._start(tokens, self._engine.prompt_embeddings(len(tokens), embeds, attn_bias))

    @property
    def tokens(self) -> list[int]:
        """The history, prompt and generated tokens; a copy."""
        return list(self._tokens)

    @property
    def past_seq(self) -> int:
        """Number of tokens in the caches: all but the last after a step, all after `*_get_logits`."""
        return self._engine.past

    def _checked(self, ids: TokenIds) -> list[int]:
        return fit_context(check_ids(ids, self.config.vocab_size, "prompt"), self._engine.max_seq, "prompt")

    def _start(self, tokens: list[int], embeddings: PromptEmbeddings | None = None) -> None:
        self._engine.reset()
        self._tokens, self._embeddings, self._logits, self._sampler = tokens, embeddings, None, None

    # ---------------------------------------------------------------------------------------------- one token

    def step(self, opts: SampleOpts = GREEDY) -> int:
        """Recomputes the whole history, chooses a token and appends it: slow, for comparison with `step_cached`.

        Equal options in consecutive steps continue one random number sequence; changed options restart from their seed.

        Raises:
            PromptError: there is no history, or the context is full.
            NumericalError: a logit is NaN or infinite.
        """
        with self._exclusive("step"):
            return self._step(opts)

    def step_cached(self, opts: SampleOpts = GREEDY) -> int:
        """As `step`, but computes only tokens that are not cached: the prompt at first, then one token.

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
        if past >= len(self._tokens):  # an interrupt between a step and appending its token
            engine.reset()
            past = 0
        if past == 0 and self._embeddings is not None:
            past = len(self._embeddings)
            logits = engine.forward_embeddings(self._tokens[:past], self._embeddings)
        if past < len(self._tokens):
            logits = engine.forward(self._tokens[past:])
        return check_finite(logits, f"position {len(self._tokens) - 1}")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """On an error, cuts the session back to its previous length, or less."""
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
        """`n` tokens by `step`; fewer if one is in `stop_ids`, `on_token` returns False, or the context is full.

        Raises:
            ArgumentError: `n` is not a whole number of at least 0.
            PromptError, NumericalError: as `step`; tokens generated before stay in the history.
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
        """Replaces the history by `ids` and computes it, without choosing a token. Then `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError, NumericalError: as `prefill` and `step`.
        """
        with self._exclusive("prefill_get_last_logits"):
            self._start(self._checked(ids))
            return self._get_logits()

    def decode_get_logits(self, token: int) -> Logits:
        """Appends a token that the caller chose and computes it. Then `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no history, the context is full, or `token` is not a valid token id.
            NumericalError: a logit is NaN or infinite; the history is then unchanged.
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
            self._sampler = None  # it has not seen all tokens of the history
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
        """Waits for pending work of the device. Returns at once: CPU calls are synchronous."""
        with self._exclusive("sync_device"):
            pass

    def stats(self) -> dict[str, Any]:
        """Sizes and counters of the engine; `programs` has the counters of the program tables by phase."""
        with self._exclusive("stats"):
            return self._engine.stats()

    def close(self) -> None:
        """Releases memory and threads. Can be called more than once."""
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
