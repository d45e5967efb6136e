"""What every language model runner offers, and the reference way to generate.

Runners stage. `LmRunner.generate` here computes the whole context anew for every token: slow, without state, and the
measure for the cached decode in `cached.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from math import isfinite
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, MultimodalError, NumericalError, PromptError
from rlx.runners.generation import Generation, Logits, Request, Source, Step, log_probs, steps, stepwise, tokens
from rlx.runners.stopping import OnToken, Stopping, checked_count
from rlx.runtime.devices import Device
from rlx.sampling import SampleOpts, Sampler

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]

OnBatchToken = Callable[[int, int], bool | None]
"""Called with a prompt's number and every new token; False ends that generation, anything else goes on."""

GREEDY = SampleOpts.greedy()
SPECULATIONS = ("prompt-lookup", "mtp")


class LmRunner(ABC):
    """A language model that can be asked for logits and for text.

    A subclass gives `family`, `vocab_size` and `predict_logits`; the rest works on top of them.
    """

    _on_token: OnToken | None = None
    """The callback of calls that give none."""
    _speculative: str | None = None
    """How calls guess that do not say."""

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

    def generate(
        self,
        ids: TokenIds,
        n_new: int,
        on_token: OnToken | None = None,
        sample: SampleOpts | None = None,
        stop_at_eog: bool = True,
        *,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        speculative: str | None = None,
    ) -> Generation:
        """Up to `n_new` tokens that continue `ids`.

        It ends with the first of: one of `stop_ids`; a stop string; a token for which `on_token` returns False; `n_new`
        tokens; a full context. The token that ends it is in the result. The last token needs no room in the context, so
        a prompt of `max_seq` tokens still gets one.

        Args:
            ids: the prompt, at least one token.
            n_new: how many tokens at most.
            on_token: called once for every token of the result, in order. What it raises ends the generation and comes
                through; the runner stays usable.
            sample: how to choose tokens; `default_sample` if None.
            stop_at_eog: False goes on behind `stop_ids`.
            stop: texts that end it; `Generation.text` is what came before them.
            min_tokens: before as many, no token is one of `stop_ids` and no stop string counts.
            speculative: `prompt-lookup` or `mtp` checks several guessed tokens at once; the result is the same. The
                runner's own choice if None.

        Returns:
            A list of ids that also knows its `finish_reason`.

        Raises:
            PromptError: the prompt is empty, does not fit into the context, or holds something that is no id.
            ArgumentError: a count is no whole number, or negative; a stop string is empty; no such speculation.
            NumericalError: a logit is NaN or infinite.
        """
        on_token = on_token or self._on_token
        context = self.checked_ids(ids)
        stopping = self._stopping(len(context), n_new, stop_at_eog, stop, min_tokens, on_token)
        watched = on_token is not None or bool(stop)
        request = self._request(context, sample, stopping, self._guesses(speculative), watched)
        return Generation((token for token, _ in tokens(self._source(request), stopping)), stopping)

    def stream(
        self,
        ids: TokenIds,
        n_new: int,
        sample: SampleOpts | None = None,
        stop_at_eog: bool = True,
        *,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        speculative: str | None = None,
    ) -> Iterator[Step]:
        """The tokens of `generate` one at a time, each computed when it is asked for.

        The arguments are checked at once. Whoever stops asking early closes the iterator, or drops it: until then the
        runner is in use.

        Returns:
            Steps with `token`, `logprob` (of the model's own distribution) and, in the last one, `finish_reason`.

        Raises:
            What `generate` does.
        """
        context = self.checked_ids(ids)
        stopping = self._stopping(len(context), n_new, stop_at_eog, stop, min_tokens, None)
        request = self._request(context, sample, stopping, self._guesses(speculative), True)
        return steps(self._source(request), stopping)

    def generate_batch(
        self,
        prompts: Sequence[TokenIds],
        n_new: int,
        on_token: OnBatchToken | None = None,
        sample: SampleOpts | None = None,
        stop_at_eog: bool = True,
        *,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
    ) -> list[Generation]:
        """`generate` for several prompts, side by side where the runner can: the same tokens, more of them a second.

        Prompts may have any lengths. Each generation ends by itself, and the session, if there is one, stays as it was.

        Args:
            prompts: at least one, each as for `generate`.
            n_new: how many tokens at most, of each.
            on_token: called with the prompt's number and the token; False ends that generation only. Tokens of one
                generation come in order; of different ones as they are computed.
            sample: as for `generate`. With a seed, prompt i gets the tokens of `generate` with the seed `seed + i`.
            stop_at_eog, stop, min_tokens: as for `generate`, for each of them.

        Returns:
            A generation for each prompt, in their order.

        Raises:
            PromptError: there are no prompts, or what `generate` says about one of them: `where` has its number.
            ArgumentError, NumericalError: as `generate`.
        """
        opts = self.default_sample if sample is None else sample
        requests = []
        for i, context in enumerate(self._contexts(prompts)):
            own = partial(on_token, i) if on_token else None
            stopping = self._stopping(len(context), n_new, stop_at_eog, stop, min_tokens, own)
            requests.append(self._request(context, _with_own_seed(opts, i), stopping, None, True))
        longest = max(len(request.context) for request in requests) + n_new
        return self._together(requests, longest if self.max_seq is None else min(longest, self.max_seq))

    def _contexts(self, prompts: Sequence[TokenIds]) -> list[list[int]]:
        if not isinstance(prompts, Sequence | np.ndarray):
            raise PromptError(f"expected several prompts, found a {type(prompts).__name__}", where="generate_batch")
        if not len(prompts):
            raise PromptError("there are no prompts", where="generate_batch", hint="give at least one")
        return [self.checked_ids(ids, f"prompt {i}") for i, ids in enumerate(prompts)]

    def _together(self, requests: list[Request], length: int) -> list[Generation]:
        """Every request's tokens, here one after the other; `length`: of the longest prompt and answer, at most."""
        return [Generation((token for token, _ in tokens(self._source(r), r.stopping)), r.stopping) for r in requests]

    @property
    def default_sample(self) -> SampleOpts:
        """How tokens are chosen where a call says nothing else: greedily, unless the model recommends otherwise."""
        return GREEDY

    def _stopping(
        self,
        prompt: int,
        n_new: int,
        stop_at_eog: bool,
        stop: str | Sequence[str],
        min_tokens: int,
        on_token: OnToken | None,
    ) -> Stopping:
        """What ends a generation behind `prompt` tokens."""
        return Stopping(
            _count(n_new),
            room=None if self.max_seq is None else self.max_seq - prompt + 1,
            stop_ids=self.stop_ids if stop_at_eog else frozenset(),
            stop=stop,
            tokenizer=self._tokenizer,
            min_tokens=min_tokens,
            on_token=on_token,
        )

    def _guesses(self, speculative: str | None) -> str | None:
        """How a call guesses: as it says, else as the runner does."""
        return self._speculative if speculative is None else speculative

    def _request(
        self, context: list[int], sample: SampleOpts | None, stopping: Stopping, speculative: str | None, watched: bool
    ) -> Request:
        sampler = Sampler(self.default_sample if sample is None else sample, context, self._tokenizer)
        return Request(context, sampler, stopping, checked_speculation(speculative), watched)

    def _source(self, request: Request) -> Source:
        """The tokens of a generation; here each computes the whole context anew."""
        if request.speculative:
            hint = "leave `speculative` out"
            raise ArgumentError("nothing is speculated without a cache", where="generate", hint=hint)
        context = list(request.context)

        def after(token: int) -> Logits:
            context.append(token)
            return self.predict_logits(context)

        return stepwise(lambda: self.predict_logits(context), after, request)

    @property
    def _tokenizer(self) -> Callable[[], Tokenizer] | None:
        """What makes the tokenizer, for stop strings; None if there is none."""
        return None

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
        pieces = _with_next(self._all_logits(context), context)
        return np.concatenate([log_probs(rows, after) for rows, after in pieces])

    def _all_logits(self, context: list[int]) -> Iterator[Logits]:
        """The logits after every token but the last, float32[some rows, vocab] at a time."""
        yield self.predict_logits(context[:-1], all_positions=True)

    @property
    def supports_multimodal(self) -> bool:
        """Whether `generate_multimodal` works."""
        return False

    def generate_multimodal(
        self,
        prompt: str,
        images: Sequence[npt.NDArray[np.uint8]],
        n_new: int,
        on_token: OnToken | None = None,
        sample: SampleOpts | None = None,
    ) -> Generation:
        """As `generate`, for a text with images, uint8[height, width, 3] each; `MultimodalError` if there is no way."""
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


def _count(n_new: Any) -> int:
    count = checked_count("n_new", n_new)
    if count is None:
        raise ArgumentError("n_new is None, expected a whole number of at least 0", where="generate")
    return count


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


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_ids(ids: TokenIds, vocab_size: int, what: str) -> list[int]:
    """`ids` as a list of at least one Python int inside the vocabulary; `PromptError` otherwise."""
    if isinstance(ids, str | bytes):
        hint = "make ids of it first: runner.tokenizer.encode(text), or runner.chat_ids(messages)"
        raise PromptError(f"expected token ids, found a {type(ids).__name__}", where=what, hint=hint)
    if not isinstance(ids, Sequence | np.ndarray):
        raise PromptError(f"expected a sequence of token ids, found a {type(ids).__name__}", where=what)
    if isinstance(ids, np.ndarray) and ids.ndim == 0:
        raise PromptError("expected a sequence of token ids, found one number", where=what, hint="give [id]")
    if len(ids) == 0:
        raise PromptError("it is empty", where=what, hint="give at least one token, such as tokenizer.bos_id")
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different length
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        _refuse_ids(ids, what)
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        found = f"id {array[outside[0]]} at position {outside[0]} is outside the vocabulary of {vocab_size}"
        raise PromptError(found, where=what, hint=f"ids run from 0 to {vocab_size - 1}")
    return [int(token) for token in array.tolist()]


def _refuse_ids(ids: Any, what: str) -> NoReturn:
    wrong = [(at, token) for at, token in enumerate(ids) if not _is_whole(token)]
    at, token = wrong[0] if wrong else max(enumerate(ids), key=lambda pair: abs(pair[1]))  # all whole: one is huge
    raise PromptError(f"expected a token id at position {at}, found {token!r}", where=what)


def fit_context(ids: list[int], max_seq: int | None, what: str) -> list[int]:
    """`ids`; `PromptError` if there are more than `max_seq`."""
    if max_seq is not None and len(ids) > max_seq:
        raise PromptError(
            f"it has {len(ids)} tokens, and the context holds {max_seq}", where=what,
            hint=f"shorten it, or open the model with a max_seq of at least {len(ids)}",
        )  # fmt: skip
    return ids


def check_finite(logits: Logits, where: str) -> Logits:
    """`logits`, [..., vocab]; `NumericalError` if one of them is NaN or infinite."""
    with np.errstate(all="ignore"):
        if isfinite(np.add.reduce(logits, axis=None)):  # one pass without a mask; no other kind of number does that
            return logits
    for row in logits.reshape(-1, logits.shape[-1]):
        if not np.isfinite(row).all():
            at = int(np.flatnonzero(~np.isfinite(row))[0])
            raise NumericalError(
                f"logit {at} is {row[at]}", where=where,
                hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
            )  # fmt: skip
    return logits
