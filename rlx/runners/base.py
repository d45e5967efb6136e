"""What every language model runner offers, and the reference way to generate.

Runners stage. `LmRunner.generate` here computes the whole context anew for every token: slow, without state, and the
measure for the cached decode in `cached.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from numbers import Integral
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, MultimodalError, NumericalError, PromptError
from rlx.runners.sampling import SampleOpts, Sampler

Logits = npt.NDArray[np.float32]
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
OnToken = Callable[[int], bool | None]
"""Called with every new token; False ends the generation, anything else goes on."""

GREEDY = SampleOpts.greedy()


class LmRunner(ABC):
    """A language model that can be asked for logits and for text.

    A subclass gives `family`, `vocab_size` and `predict_logits`; the rest works on top of them.
    """

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
        sample: SampleOpts = GREEDY,
        stop_at_eog: bool = True,
    ) -> list[int]:
        """Up to `n_new` tokens that continue `ids`.

        It ends with the first of: `n_new` tokens; a token for which `on_token` returns False; one of `stop_ids`; a full
        context. The token that ends it is in the result. The last token needs no room in the context, so a prompt of
        `max_seq` tokens still gets one.

        Args:
            ids: the prompt, at least one token.
            n_new: how many tokens at most.
            on_token: called once for every token of the result, in order. What it raises ends the generation and comes
                through; the runner stays usable.
            sample: how to choose tokens; greedy by default.
            stop_at_eog: False goes on behind `stop_ids`.

        Raises:
            PromptError: the prompt is empty, does not fit into the context, or holds something that is no id.
            ArgumentError: `n_new` is no whole number, or negative.
            NumericalError: a logit is NaN or infinite.
        """
        context = self.checked_ids(ids)
        count = self.room_for(len(context), n_new)
        sampler = Sampler(sample, context)

        def step(token: int) -> Logits:
            context.append(token)
            return self.predict_logits(context)

        first = self.predict_logits(context) if count else None
        return generate_tokens(first, step, sampler, count, on_token, self.stop_ids if stop_at_eog else frozenset())

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
        sample: SampleOpts = GREEDY,
    ) -> list[int]:
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

    def room_for(self, prompt: int, n_new: int) -> int:
        """`n_new`, or less where the context ends; `ArgumentError` if it is no count."""
        if not _is_whole(n_new) or n_new < 0:
            raise ArgumentError(f"n_new is {n_new!r}, expected a whole number of at least 0", where="generate")
        return int(n_new) if self.max_seq is None else min(int(n_new), self.max_seq - prompt + 1)


def generate_tokens(
    logits: Logits | None,
    step: Callable[[int], Logits],
    sampler: Sampler,
    count: int,
    on_token: OnToken | None,
    stop_ids: Set[int],
) -> list[int]:
    """The loop of every generation: choose, report, stop or compute the next logits.

    Args:
        logits: after the prompt; None if `count` is 0.
        step: the logits after one more token.
    """
    tokens: list[int] = []
    while len(tokens) < count:
        logits = step(tokens[-1]) if tokens else logits
        assert logits is not None
        tokens.append(sampler.sample(logits))
        if _says_stop(on_token, tokens[-1]) or tokens[-1] in stop_ids:
            break
    return tokens


def _says_stop(on_token: OnToken | None, token: int) -> bool:
    """Only a False stops, NumPy's included: a callback that returns None or a number of characters goes on."""
    answer = on_token(token) if on_token else None
    return isinstance(answer, bool | np.bool_) and not answer


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
    for row in logits.reshape(-1, logits.shape[-1]):  # a row at a time: all at once would make a mask as long
        if not np.isfinite(row).all():
            at = int(np.flatnonzero(~np.isfinite(row))[0])
            raise NumericalError(
                f"logit {at} is {row[at]}", where=where,
                hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
            )  # fmt: skip
    return logits
