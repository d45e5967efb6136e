"""The interface of every language model runner, and the reference implementation of generation.

Runners stage. `LmRunner.generate` here recomputes the whole context for every token: slow, stateless, and the reference
that the cached decode in `cached.py` is checked against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlx.backends import Device
from rlx.errors import ArgumentError, MultimodalError, PromptError, TokenizerError
from rlx.runners.generation.checks import TokenIds, check_ids, fit_context
from rlx.runners.generation.exclusive import Exclusive, Use
from rlx.runners.generation.requests import (
    Ending,
    Generation,
    Logits,
    Request,
    Source,
    Stream,
    collected,
    log_probs,
    steps,
    stepwise,
)
from rlx.runners.generation.stopping import OnToken, checked_count
from rlx.runners.opening.options import known_arguments
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

OnBatchToken = Callable[[int, int], bool | None]
"""Called with a prompt's number and every new token; False ends that generation."""

GREEDY = SampleOpts.greedy()
SPECULATIONS = ("prompt-lookup", "mtp")


class LmRunner(ABC):
    """A language model that returns logits and generates tokens.

    A subclass provides `family`, `vocab_size` and `predict_logits`; the other methods build on these. One caller at a
    time: a second thread gets a `BusyError` at once, and so does a callback that calls its own runner.
    """

    _on_token: OnToken | None = None
    """The default callback of calls that give none."""
    _streams = True
    """Whether the default callback is called per token; otherwise after the last token."""
    _sample: SampleOpts | None = None
    """Default sampling options of calls that give none."""
    _speculative: str | None = None
    """Default speculative decoding of calls that give none."""
    _exclusive: Exclusive

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        runner = super().__new__(cls)
        runner._exclusive = Exclusive("runner")
        return runner

    @property
    @abstractmethod
    def family(self) -> str:
        """Short name of the model family, such as `qwen3`."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of logits; token ids are 0 to `vocab_size - 1`."""

    @property
    def max_seq(self) -> int | None:
        """How many tokens the context holds; None if it is unlimited."""
        return None

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts text to token ids and back.

        Raises:
            TokenizerError: the runner has none.
        """
        hint = "use token ids, without stop strings"
        raise TokenizerError(f"the {self.family} runner has no tokenizer", where="tokenizer", hint=hint)

    @property
    def stop_ids(self) -> Set[int]:
        """Token ids that end a generation: end of text or end of a chat message."""
        return frozenset()

    @property
    def device(self) -> str:
        """What the model runs on."""
        return Device.CPU

    @abstractmethod
    def predict_logits(self, ids: TokenIds, all_positions: bool = False) -> Logits:
        """Logits of the token after `ids`. Stateless: the session is not changed.

        Args:
            ids: the context, at least one token.
            all_positions: the logits after every position, not only after the last.

        Returns:
            float32[vocab_size], or float32[len(ids), vocab_size] with `all_positions`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
            NumericalError: a logit is NaN or infinite.
        """

    @known_arguments
    def generate(
        self,
        ids: TokenIds,
        n_new: int,
        on_token: OnToken | None = None,
        sample: Sample = None,
        stop_at_eog: bool = True,
        *,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        speculative: str | None = None,
        top_logprobs: int | None = None,
    ) -> Generation:
        """Up to `n_new` tokens that continue `ids`, greedily unless `sample` or the runner says otherwise.

        It ends with the first of: one of `stop_ids`; a stop string; a token for which `on_token` returns False; `n_new`
        tokens; a full context. The result includes the token that ends it. The last token is not stored in the context,
        so a prompt of `max_seq` tokens still gets one.

            answer = runner.generate(runner.tokenizer.encode("Once upon"), 20)
            print(answer.text, answer.finish_reason)

        Args:
            ids: the prompt, at least one token.
            n_new: maximum number of tokens.
            on_token: called once for every token of the result, in order. An exception from it ends the generation and
                propagates; the runner stays usable.
            sample: sampling options: a `SampleOpts`, or "recommended" for those in the model's files; `default_sample`
                if None.
            stop_at_eog: False continues after `stop_ids`.
            stop: strings that end the generation; `Generation.text` ends before them.
            min_tokens: until there are this many tokens, `stop_ids` are not chosen and stop strings are ignored.
            speculative: `prompt-lookup` or `mtp`: speculative decoding checks several guessed tokens in one step; the
                result is the same. None takes the runner's default.
            top_logprobs: also report log-probabilities in `Generation.steps`: of each token, and of this many of the
                likeliest tokens at its position.

        Returns:
            A list of token ids with the attributes `text`, `finish_reason` and `steps`.

        Raises:
            PromptError: the prompt is empty, longer than the context, or holds an invalid token id.
            ArgumentError: a count is negative or not a whole number, a stop string is empty, or `speculative` is
                unknown.
            NumericalError: a logit is NaN or infinite.
            BusyError: the runner is in use, or was closed.
        """
        on_token = on_token or self._on_token
        late = None if self._streams else on_token
        watch = None if late else on_token
        ending = Ending(n_new, stop_at_eog, stop, min_tokens, watch, pieces=top_logprobs is not None)
        request = self._request(ids, ending, sample, self._guesses(speculative), top_logprobs)
        request.watched = bool(ending.on_token or stop) or top_logprobs is not None
        with self._exclusive("generate") as use:
            found = collected(self._source(request), request, use)
        if late:
            for token in found:
                late(token)
        return found

    @known_arguments
    def stream(
        self,
        ids: TokenIds,
        n_new: int,
        sample: Sample = None,
        stop_at_eog: bool = True,
        *,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        speculative: str | None = None,
        top_logprobs: int | None = None,
    ) -> Stream:
        """The tokens of `generate` as an iterator. Each token is computed on demand.

        Arguments are checked immediately. An unfinished stream blocks other threads. To end it, close it, drop it, or
        call the runner again in the same thread.

            for step in runner.stream(ids, 20):
                print(step.text, end="", flush=True)

        Returns:
            An iterator of `Step`: `token`, `text`, `logprob` (under the model's own distribution), `top_logprobs` and,
            in the last one, `finish_reason`.

        Raises:
            As `generate`.
        """
        ending = Ending(n_new, stop_at_eog, stop, min_tokens, None, pieces=True)
        request = self._request(ids, ending, sample, self._guesses(speculative), top_logprobs)
        return Stream(self._exclusive("stream"), steps(self._source(request), request))

    @known_arguments
    def generate_batch(
        self,
        prompts: Sequence[TokenIds],
        n_new: int,
        on_token: OnBatchToken | None = None,
        sample: Sample = None,
        stop_at_eog: bool = True,
        *,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        top_logprobs: int | None = None,
    ) -> list[Generation]:
        """`generate` for several prompts at once: the same tokens at a higher total rate, where the runner can batch.

        Prompts may differ in length. Each generation ends independently. The session, if there is one, is unchanged.

        Args:
            prompts: at least one, each as for `generate`.
            n_new: maximum number of tokens for each prompt.
            on_token: called with the prompt's number and the token; False ends that generation only. Tokens of one
                generation come in order; tokens of different generations may interleave.
            sample: as for `generate`. With a seed, prompt i gets the tokens of `generate` with the seed `seed + i`.
            stop_at_eog, stop, min_tokens, top_logprobs: as for `generate`, for each prompt.

        Returns:
            One generation per prompt, in the order of the prompts.

        Raises:
            PromptError: there are no prompts, or one of them is invalid as for `generate`; `where` has its number.
            ArgumentError, NumericalError, BusyError: as `generate`.
        """
        opts, requests = self._sampling(sample), []
        for i, context in enumerate(self._contexts(prompts)):
            watch = partial(on_token, i) if on_token else None
            ending = Ending(n_new, stop_at_eog, stop, min_tokens, watch, pieces=top_logprobs is not None)
            requests.append(self._request(context, ending, _with_own_seed(opts, i), None, top_logprobs))
        longest = max(len(request.context) for request in requests) + n_new
        with self._exclusive("generate_batch") as use:
            return self._together(requests, longest if self.max_seq is None else min(longest, self.max_seq), use)

    def _contexts(self, prompts: Sequence[TokenIds]) -> list[list[int]]:
        if not isinstance(prompts, Sequence | np.ndarray):
            raise PromptError(f"expected several prompts, found a {type(prompts).__name__}", where="generate_batch")
        if not len(prompts):
            raise PromptError("there are no prompts", where="generate_batch", hint="give at least one")
        return [self.checked_ids(ids, f"prompt {i}") for i, ids in enumerate(prompts)]

    def _together(self, requests: list[Request], length: int, use: Use) -> list[Generation]:
        """The tokens of every request, one request at a time. `length`: maximum length of a prompt with its answer."""
        return [collected(self._source(request), request, use) for request in requests]

    @property
    def recommended_sample(self) -> SampleOpts | None:
        """The sampling options in the model's files; None if there are none."""
        return None

    @property
    def default_sample(self) -> SampleOpts:
        """The sampling options of calls that give none: greedy, unless the runner was opened with a `sample`."""
        return self._sample or GREEDY

    def _sampling(self, sample: Sample) -> SampleOpts:
        """Resolves a call's `sample` argument."""
        return resolved(sample, self.recommended_sample, self.default_sample)

    def _guesses(self, speculative: str | None) -> str | None:
        """The speculative decoding of a call: its argument, else the runner's default."""
        return checked_speculation(self._speculative if speculative is None else speculative)

    def _request(
        self, ids: TokenIds, ending: Ending, sample: Sample, speculative: str | None, top_logprobs: int | None
    ) -> Request:
        """A generation with checked arguments."""
        context, tokenizer = self.checked_ids(ids), lambda: self.tokenizer
        stopping = ending.behind(len(context), self.max_seq, self.stop_ids if ending.stop_at_eog else (), tokenizer)
        sampler = Sampler(self._sampling(sample), context, tokenizer)
        alternatives = checked_count("top_logprobs", top_logprobs)
        return Request(context, sampler, stopping, tokenizer, speculative, alternatives=alternatives)

    def _source(self, request: Request) -> Source:
        """The tokens of a generation; here each step recomputes the whole context."""
        if request.speculative:
            hint = "leave `speculative` out"
            raise ArgumentError("speculative decoding needs a cache", where="generate", hint=hint)
        context = list(request.context)

        def after(token: int) -> Logits:
            context.append(token)
            return self._logits(context)

        return stepwise(lambda: self._logits(context), after, request)

    def _logits(self, context: list[int]) -> Logits:
        """`predict_logits` without the check for exclusive use: the caller holds it already."""
        return self.predict_logits(context)

    def score(self, ids: TokenIds) -> Logits:
        """Log-probabilities of a text's tokens, each given the tokens before it. Stateless.

        Returns:
            float32[len(ids) - 1], natural logarithms: element i is that of `ids[i + 1]` after `ids[: i + 1]`.

        Raises:
            PromptError: there are fewer than two ids, more than the context holds, or an invalid token id.
            NumericalError: a logit is NaN or infinite.
        """
        context = self.checked_ids(ids)
        if len(context) < 2:
            raise PromptError("a single token has no predecessor", where="score", hint="give at least two tokens")
        with self._exclusive("score") as use:
            rows = self._all_logits(context)
            use.closing(rows)
            return np.concatenate([log_probs(piece, after) for piece, after in _with_next(rows, context)])

    def _all_logits(self, context: list[int]) -> Generator[Logits, None, None]:
        """The logits after every token but the last, in pieces float32[some rows, vocab]."""
        yield self.predict_logits(context[:-1], all_positions=True)

    @property
    def supports_multimodal(self) -> bool:
        """Whether `generate_multimodal` works; False for all families."""
        return False

    def generate_multimodal(
        self,
        prompt: str,
        images: Any,
        *arguments: Any,
        **options: Any,
    ) -> Generation:
        """`generate` for text with images. No family supports images yet, so this always raises.

        Args:
            images: arrays uint8[height, width, 3].
            arguments, options: as for `generate`; or, in RLX's order with the encoded bytes of one image: width,
                height, tokenizer, n_new, on_token.

        Raises:
            MultimodalError: always.
        """
        raise MultimodalError(
            f"the {self.family} runner takes text only", where="generate_multimodal",
            hint="leave the images out; `supports_multimodal` says whether a runner takes images",
        )  # fmt: skip

    def close(self) -> None:  # noqa: B027 - a runner may hold no resources
        """Releases what the runner holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.family}, {self.vocab_size} tokens, context {self.max_seq}>"

    def checked_ids(self, ids: TokenIds, what: str = "prompt") -> list[int]:
        """`ids` as a new list that fits the context; `PromptError` says what is wrong with it."""
        return fit_context(check_ids(ids, self.vocab_size, what), self.max_seq, what)


def checked_speculation(name: str | None) -> str | None:
    """`name`; `ArgumentError` if there is no such speculative decoding."""
    if name not in (None, *SPECULATIONS):
        hint = f"give {', '.join(map(repr, SPECULATIONS))}, or None"
        raise ArgumentError(f"speculative is {name!r}", where="generate", hint=hint)
    return name


def _with_own_seed(opts: SampleOpts, number: int) -> SampleOpts:
    """Options for one of several generations: a different, reproducible seed for each."""
    seed = getattr(opts, "seed", None)  # the sampler reports what is not a SampleOpts
    return opts if seed is None else replace(opts, seed=(seed + number) % 2**64)


def _with_next(pieces: Iterable[Logits], ids: list[int]) -> Iterator[tuple[Logits, list[int]]]:
    """Pairs each piece of logits with the tokens that come after its rows."""
    at = 1
    for rows in pieces:
        yield rows, ids[at : at + len(rows)]
        at += len(rows)
