"""What every language model runner offers, and the reference way to generate.

Runners stage. `LmRunner.generate` here computes the whole context anew for every token: slow, without state, and the
measure for the cached decode in `cached.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlx.arguments import known_arguments
from rlx.errors import ArgumentError, MultimodalError, PromptError, TokenizerError
from rlx.runners.checks import TokenIds, check_ids, fit_context
from rlx.runners.exclusive import Exclusive, Use
from rlx.runners.generation import (
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
from rlx.runners.stopping import OnToken, checked_count
from rlx.runtime.devices import Device
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

OnBatchToken = Callable[[int, int], bool | None]
"""Called with a prompt's number and every new token; False ends that generation, anything else goes on."""

GREEDY = SampleOpts.greedy()
SPECULATIONS = ("prompt-lookup", "mtp")


class LmRunner(ABC):
    """A language model that can be asked for logits and for text.

    A subclass gives `family`, `vocab_size` and `predict_logits`; the rest works on top of them. One caller at a time: a
    second thread gets a `BusyError` at once, and so does a callback that calls its own runner.
    """

    _on_token: OnToken | None = None
    """The callback of calls that give none."""
    _streams = True
    """Whether the callback is called while tokens come, not when all are there."""
    _sample: SampleOpts | None = None
    """How tokens are chosen by calls that do not say."""
    _speculative: str | None = None
    """How calls guess that do not say."""
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
        """Width of the logits; ids run from 0 to one less."""

    @property
    def max_seq(self) -> int | None:
        """How many tokens the context holds; None if nothing bounds it."""
        return None

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back.

        Raises:
            TokenizerError: there is none.
        """
        hint = "give and take token ids, and leave stop strings out"
        raise TokenizerError(f"the {self.family} runner has no tokenizer", where="tokenizer", hint=hint)

    @property
    def stop_ids(self) -> Set[int]:
        """Tokens that end a generation: the end of a text or of a turn."""
        return frozenset()

    @property
    def device(self) -> Device:
        """What the model runs on."""
        return Device.CPU

    @abstractmethod
    def predict_logits(self, ids: TokenIds, all_positions: bool = False) -> Logits:
        """Logits of the token after `ids`; leaves no state behind.

        Args:
            ids: the context, at least one token.
            all_positions: the logits after every position, not only after the last.

        Returns:
            float32[vocab_size], or float32[len(ids), vocab_size] with `all_positions`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds something that is no id.
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
        tokens; a full context. The token that ends it is in the result. The last token needs no room in the context, so
        a prompt of `max_seq` tokens still gets one.

            answer = runner.generate(runner.tokenizer.encode("Once upon"), 20)
            print(answer.text, answer.finish_reason)

        Args:
            ids: the prompt, at least one token.
            n_new: how many tokens at most.
            on_token: called once for every token of the result, in order. What it raises ends the generation and comes
                through; the runner stays usable.
            sample: how to choose tokens: a `SampleOpts`, or "recommended" for what the model's files recommend;
                `default_sample` if None.
            stop_at_eog: False goes on behind `stop_ids`.
            stop: texts that end it; `Generation.text` is what came before them.
            min_tokens: before as many, no token is one of `stop_ids` and no stop string counts.
            speculative: `prompt-lookup` or `mtp` checks several guessed tokens at once; the result is the same. The
                runner's own choice if None.
            top_logprobs: also report log-probabilities in `Generation.steps`: of each token, and of this many of the
                likeliest at its place.

        Returns:
            A list of ids that also knows its `text`, `finish_reason` and `steps`.

        Raises:
            PromptError: the prompt is empty, does not fit into the context, or holds something that is no id.
            ArgumentError: a count is no whole number, or negative; a stop string is empty; no such speculation.
            NumericalError: a logit is NaN or infinite.
            BusyError: the runner is in use, or was closed.
        """
        on_token = on_token or self._on_token
        late = None if self._streams else on_token
        ending = Ending(n_new, stop_at_eog, stop, min_tokens, None if late else on_token)
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
        """The tokens of `generate` one at a time, each computed when it is asked for.

        The arguments are checked at once. A stream that is not finished keeps other threads out; close it, drop it, or
        use the runner in the same thread, which ends it.

            for step in runner.stream(ids, 20):
                print(step.text, end="", flush=True)

        Returns:
            An iterator of `Step`: `token`, `text`, `logprob` (of the model's own distribution), `top_logprobs` and, in
            the last one, `finish_reason`.

        Raises:
            What `generate` does.
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
        """`generate` for several prompts, side by side where the runner can: the same tokens, more of them a second.

        Prompts may have any lengths. Each generation ends by itself, and the session, if there is one, stays as it was.

        Args:
            prompts: at least one, each as for `generate`.
            n_new: how many tokens at most, of each.
            on_token: called with the prompt's number and the token; False ends that generation only. Tokens of one
                generation come in order; of different ones as they are computed.
            sample: as for `generate`. With a seed, prompt i gets the tokens of `generate` with the seed `seed + i`.
            stop_at_eog, stop, min_tokens, top_logprobs: as for `generate`, for each of them.

        Returns:
            A generation for each prompt, in their order.

        Raises:
            PromptError: there are no prompts, or what `generate` says about one of them: `where` has its number.
            ArgumentError, NumericalError, BusyError: as `generate`.
        """
        opts, requests = self._sampling(sample), []
        for i, context in enumerate(self._contexts(prompts)):
            ending = Ending(n_new, stop_at_eog, stop, min_tokens, partial(on_token, i) if on_token else None)
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
        """Every request's tokens, here one after the other; `length`: of the longest prompt and answer, at most."""
        return [collected(self._source(request), request, use) for request in requests]

    @property
    def recommended_sample(self) -> SampleOpts | None:
        """How the makers of the model want tokens to be chosen; None if its files do not say."""
        return None

    @property
    def default_sample(self) -> SampleOpts:
        """How tokens are chosen where a call does not say: greedily, unless the runner was opened with a `sample`."""
        return self._sample or GREEDY

    def _sampling(self, sample: Sample) -> SampleOpts:
        """What a call's `sample` means."""
        return resolved(sample, self.recommended_sample, self.default_sample)

    def _guesses(self, speculative: str | None) -> str | None:
        """How a call guesses: as it says, else as the runner does."""
        return checked_speculation(self._speculative if speculative is None else speculative)

    def _request(
        self, ids: TokenIds, ending: Ending, sample: Sample, speculative: str | None, top_logprobs: int | None
    ) -> Request:
        """A generation, its arguments checked."""
        context, tokenizer = self.checked_ids(ids), lambda: self.tokenizer
        stopping = ending.behind(len(context), self.max_seq, self.stop_ids if ending.stop_at_eog else (), tokenizer)
        sampler = Sampler(self._sampling(sample), context, tokenizer)
        alternatives = checked_count("top_logprobs", top_logprobs)
        return Request(context, sampler, stopping, tokenizer, speculative, alternatives=alternatives)

    def _source(self, request: Request) -> Source:
        """The tokens of a generation; here each computes the whole context anew."""
        if request.speculative:
            hint = "leave `speculative` out"
            raise ArgumentError("nothing is speculated without a cache", where="generate", hint=hint)
        context = list(request.context)

        def after(token: int) -> Logits:
            context.append(token)
            return self._logits(context)

        return stepwise(lambda: self._logits(context), after, request)

    def _logits(self, context: list[int]) -> Logits:
        """`predict_logits` for a caller that uses the runner already."""
        return self.predict_logits(context)

    def score(self, ids: TokenIds) -> Logits:
        """Log-probabilities of a text's tokens, each given what precedes it; leaves no state behind.

        Returns:
            float32[len(ids) - 1]: natural logarithms, of `ids[i + 1]` after `ids[: i + 1]` at i.

        Raises:
            PromptError: there are fewer than two ids, more than the context holds, or something that is no id.
            NumericalError: a logit is NaN or infinite.
        """
        context = self.checked_ids(ids)
        if len(context) < 2:
            raise PromptError("one token has nothing before it", where="score", hint="give at least two tokens")
        with self._exclusive("score") as use:
            rows = self._all_logits(context)
            use.closing(rows)
            return np.concatenate([log_probs(piece, after) for piece, after in _with_next(rows, context)])

    def _all_logits(self, context: list[int]) -> Generator[Logits, None, None]:
        """The logits after every token but the last, float32[some rows, vocab] at a time."""
        yield self.predict_logits(context[:-1], all_positions=True)

    @property
    def supports_multimodal(self) -> bool:
        """Whether `generate_multimodal` works."""
        return False

    def generate_multimodal(
        self,
        prompt: str,
        images: Any,
        *arguments: Any,
        **options: Any,
    ) -> Generation:
        """As `generate`, for a text with images. No family takes images yet: it is there to say so.

        Args:
            images: arrays uint8[height, width, 3].
            arguments, options: as for `generate`; or, in the order of the original with the bytes of one image: width,
                height, tokenizer, n_new, on_token.

        Raises:
            MultimodalError: always.
        """
        raise MultimodalError(
            f"the {self.family} runner takes text only", where="generate_multimodal",
            hint="leave the images out; `supports_multimodal` tells beforehand",
        )  # fmt: skip

    def close(self) -> None:  # noqa: B027 - a runner may well hold nothing
        """Give back what the runner holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.family}, {self.vocab_size} tokens, context {self.max_seq}>"

    def checked_ids(self, ids: TokenIds, what: str = "prompt") -> list[int]:
        """`ids` as a new list that fits into the context; `PromptError` says what is wrong with it."""
        return fit_context(check_ids(ids, self.vocab_size, what), self.max_seq, what)


def checked_speculation(name: str | None) -> str | None:
    """`name`; `ArgumentError` if it is no way to guess."""
    if name not in (None, *SPECULATIONS):
        hint = f"there is {', '.join(map(repr, SPECULATIONS))}, and None"
        raise ArgumentError(f"speculative is {name!r}", where="generate", hint=hint)
    return name


def _with_own_seed(opts: SampleOpts, number: int) -> SampleOpts:
    """Options for one of several generations, so that they differ and can be had again."""
    seed = getattr(opts, "seed", None)  # what is no SampleOpts the sampler refuses
    return opts if seed is None else replace(opts, seed=(seed + number) % 2**64)


def _with_next(pieces: Iterable[Logits], ids: list[int]) -> Iterator[tuple[Logits, list[int]]]:
    """Pieces of logits with the tokens that come after each of their rows."""
    at = 1
    for rows in pieces:
        yield rows, ids[at : at + len(rows)]
        at += len(rows)
