"""A token history over an engine: steps that choose the next token, and logits for callers that choose it themselves.

Runners stage, over `cached_history.py`. Calls are tasks of an engine loop, so threads wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlx.engine.images import placed
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.request.context import Context, PromptLike, check_ids
from rlx.engine.request.output import Logits
from rlx.engine.request.stopping import NOTHING, OnToken, checked_count, says_stop
from rlx.errors import ArgumentError, BusyError
from rlx.runners.base import GREEDY
from rlx.runners.generator.cached_history import CachedHistory
from rlx.runners.session import embedded
from rlx.sampling import SampleOpts

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.models.config import ModelConfig


class TokenHistory:
    """The tokens so far, and methods that append to them.

    Args:
        engine: a model; closed with the history.
    """

    def __init__(self, engine: Engine) -> None:
        self._closed = False
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        """Begins an empty history on an engine."""
        self._engine, self._loop = engine, EngineLoop(engine)
        self._history = CachedHistory(engine, self._loop)

    # ---------------------------------------------------------------------------------------------- the history

    def prefill(self, ids: PromptLike) -> None:
        """Replaces the history by a prompt. The next step computes it.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
        """
        context = self._checked(ids)

        def work() -> Generator[None, None, None]:
            self._history.start(context.ids, (yield from embedded(context)))

        self._call(work)

    def prefill_from_embeds(self, ids: PromptLike, embeds: Any, attn_bias: Any = None) -> None:
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
        context = self._checked(ids)
        if context.images is not None:
            hint = "give the rows of images among `embeds`, and token ids"
            raise ArgumentError("a prompt with images takes no embeds", where="embeds", hint=hint)
        embeddings = self._engine.prompt_embeddings(len(context), embeds, attn_bias)
        self._call(lambda: self._history.start(context.ids, embeddings))

    @property
    def tokens(self) -> list[int]:
        """The history, prompt and generated tokens; a copy."""
        return list(self._history.tokens)

    @property
    def past_seq(self) -> int:
        """Number of tokens in the caches: all but the last after a step, all after `*_get_logits`."""
        return self._history.cached

    def _checked(self, prompt: PromptLike) -> Context:
        engine, config = self._engine, self.config
        return placed(prompt, engine.images, config.vocab_size, engine.max_seq, "prompt", f"{config.family} model")

    # ---------------------------------------------------------------------------------------------- one token

    def step(self, opts: SampleOpts = GREEDY) -> int:
        """Recomputes the whole history, chooses a token and appends it: slow, for comparison with `step_cached`.

        Equal options in consecutive steps continue one random number sequence; changed options restart from their seed.

        Raises:
            PromptError: there is no history, or the context is full.
            NumericalError: a logit is NaN or infinite.
        """

        def work() -> Generator[None, None, int]:
            self._history.empty_caches()
            return (yield from self._history.step(opts))

        token: int = self._call(work)
        return token

    def step_cached(self, opts: SampleOpts = GREEDY) -> int:
        """As `step`, but computes only tokens that are not cached: the prompt at first, then one token.

        Afterwards `past_seq == len(tokens) - 1`: the new token is the input of the next step.
        """
        token: int = self._call(lambda: self._history.step(opts))
        return token

    # ---------------------------------------------------------------------------------------------- several tokens

    def generate(
        self, n: int, opts: SampleOpts = GREEDY, *, on_token: OnToken | None = None, stop_ids: Set[int] = NOTHING
    ) -> list[int]:
        """`n` tokens by `step`; fewer if one is in `stop_ids`, `on_token` returns False, or the context is full.

        Raises:
            ArgumentError: `n` is not a whole number of at least 0.
            PromptError, NumericalError: as `step`; tokens generated before stay in the history.
        """
        return self._generate(self.step, n, opts, on_token, stop_ids)

    def generate_cached(
        self, n: int, opts: SampleOpts = GREEDY, *, on_token: OnToken | None = None, stop_ids: Set[int] = NOTHING
    ) -> list[int]:
        """As `generate`, by `step_cached`."""
        return self._generate(self.step_cached, n, opts, on_token, stop_ids)

    def _generate(
        self,
        step: Callable[[SampleOpts], int],
        n: int,
        opts: SampleOpts,
        on_token: OnToken | None,
        stop_ids: Set[int],
    ) -> list[int]:
        room, tokens = self._engine.max_seq + 1 - len(self._history.tokens), list[int]()
        most, is_over = min(checked_count("n", n) or 0, room), False
        while not is_over and len(tokens) < most:
            tokens.append(step(opts))
            is_over = says_stop(on_token, tokens[-1]) or tokens[-1] in stop_ids
        return tokens

    def generate_from_embeds(
        self,
        ids: PromptLike,
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

    def prefill_get_last_logits(self, ids: PromptLike) -> Logits:
        """Replaces the history by `ids` and computes it, without choosing a token. Then `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError, NumericalError: as `prefill` and `step`.
        """
        context = self._checked(ids)

        def work() -> Generator[None, None, Logits]:
            self._history.start(context.ids, (yield from embedded(context)))
            return (yield from self._history.last_logits())

        found: Logits = self._call(work)
        return found

    def decode_get_logits(self, token: int) -> Logits:
        """Appends a token that the caller chose and computes it. Then `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no history, the context is full, or `token` is not a valid token id.
            NumericalError: a logit is NaN or infinite; the history is then unchanged.
        """
        checked = check_ids([token], self.config.vocab_size, "token")
        found: Logits = self._call(lambda: self._history.append(checked))
        return found

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
        self._call(lambda: None)

    def stats(self) -> dict[str, Any]:
        """Sizes and counters of the engine; `programs` has the counters of the program tables by phase."""
        self._check_open()
        return self._engine.stats()

    def close(self) -> None:
        """Releases memory and threads. Can be called more than once."""
        self._loop.close()
        if not self._closed:
            self._closed = True
            self._engine.close()

    def _call(self, work: Callable[[], Any]) -> Any:
        """Runs a task in the loop's thread."""
        self._check_open()
        return self._loop.call(work)

    def _check_open(self) -> None:
        if self._closed:
            raise BusyError("the generator was closed", where="generator", hint="open the model again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self.config
        return f"<{type(self).__name__}: {config.family}, {len(self._history.tokens)} tokens, context {self.max_seq}>"
