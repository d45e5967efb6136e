"""Changes to logits: bias, bans, penalties for repeated tokens, and DRY for repeated sequences.

Sampling stage, under `choice.py`. What is found here are ids and numbers; a device applies them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import ceil, log
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rlx.errors import SamplingError
from rlx.sampling.options import SampleOpts

Ids = npt.NDArray[np.intp]

_BEYOND_ALL = 1e30  # a penalty this large is not increased further


class Changes(NamedTuple):
    """Changes of logits, which apply in order: a penalty for repetition where the count is above 0, else an addition.

    Attributes:
        ids: of tokens; those outside the vocabulary are left out.
        counts: how often the token occurs in the window of the penalties, or 0.
        amounts: what is added to its logit.
    """

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.float64]
    amounts: npt.NDArray[np.float64]


class Tokenizer(Protocol):
    """The part of a tokenizer that sequence breakers need."""

    def tokens_with(self, text: str) -> Collection[int]:
        """The ids of all tokens whose text contains this one."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""


class Penalties:
    """The changes of logits by bias, bans and what was written so far.

    Args:
        opts: the options.
        tokenizer: called for the tokenizer if DRY has sequence breakers that are texts.
    """

    def __init__(self, opts: SampleOpts, tokenizer: Callable[[], Tokenizer] | None = None) -> None:
        bias: Sequence[tuple[int, float]] = opts.logit_bias  # type: ignore[assignment]  # stored as pairs
        self._opts, self._largest = opts, bias[-1][0] if bias else -1
        known = [pair for pair in bias if pair[0] < 2**31]
        self._bias = _changes([token for token, _ in known], amounts=[value for _, value in known])
        self._dry = Dry(opts, tokenizer) if opts.dry_multiplier else None

    def changes(self, recent: Collection[int], banned: Collection[int], vocab: int) -> Changes | None:
        """The changes of the next choice; None if there are none.

        Args:
            recent: the last tokens.
            banned: ids that must not be chosen.
            vocab: number of tokens.

        Raises:
            SamplingError: the bias names an id outside the vocabulary.
        """
        opts, parts = self._opts, list[Changes]()
        if opts.logit_bias:
            if self._largest >= vocab:
                what = f"logit_bias names token {self._largest}, and the vocabulary holds {vocab}"
                raise SamplingError(what, where="sampling", hint=f"ids run from 0 to {vocab - 1}")
            parts.append(self._bias)
        if banned:
            parts.append(_changes([*banned], amounts=[-np.inf] * len(banned)))
        if recent and (opts.has_penalties or self._dry):
            ids = list(recent)
            if opts.has_penalties:
                counts = Counter(_last(ids, opts.repetition_window))
                parts.append(_changes([*counts], counts=[*counts.values()]))
            if self._dry:
                found = self._dry.penalties(np.array(_last(ids, opts.dry_penalty_last_n), np.intp))
                parts.append(_changes([*found], amounts=[-each for each in found.values()]))
        if len(parts) > 1:
            return Changes(*map(np.concatenate, zip(*parts, strict=True)))
        return parts[0] if parts else None


def _changes(ids: list[int], counts: Sequence[float] = (), amounts: Sequence[float] = ()) -> Changes:
    """Changes that are all penalties, or all additions."""
    none = np.zeros(len(ids))
    return Changes(np.array(ids, np.int32), np.array(counts, float) if counts else none,
                   np.array(amounts, float) if amounts else none)  # fmt: skip


def _last(recent: list[int], window: int | None) -> list[int]:
    return recent if window is None else recent[max(len(recent) - window, 0) :]


class Dry:
    """DRY: penalizes tokens that would continue a repeated sequence.

    If the last n tokens occurred before, the token that followed them is penalized; the penalty grows with n. Of
    several earlier occurrences the longest counts. Repetitions end at sequence breakers, which are never penalized:
    tokens, sequences of tokens, and texts that may begin and end inside a token.
    Definition: the pull request of its author, oobabooga/text-generation-webui 5677.

    Args:
        opts: its `dry_*` options are used.
        tokenizer: called for the tokenizer if a breaker is given as text.

    Raises:
        SamplingError: a breaker is given as text, and there is no tokenizer.
    """

    def __init__(self, opts: SampleOpts, tokenizer: Callable[[], Tokenizer] | None = None) -> None:
        self._multiplier, self._base, self._allowed = opts.dry_multiplier, opts.dry_base, opts.dry_allowed_length
        # Beyond this length the penalty no longer grows, or is larger than any logit.
        steps = ceil(log(_BEYOND_ALL) / log(self._base)) if self._base > 1 else 0
        self._longest = self._allowed + min(steps, 2**16)
        texts = [each for each in opts.dry_sequence_breakers if isinstance(each, str)]
        given = [each for each in opts.dry_sequence_breakers if not isinstance(each, str)]
        if texts and tokenizer is None:
            raise SamplingError(
                f"{texts[0]!r} is a text, and there is no tokenizer", where="dry_sequence_breakers",
                hint="give sequences of token ids, or an empty tuple for none",
            )  # fmt: skip
        self._breakers = {each[0] for each in given if len(each) == 1}  # tokens that are breakers by themselves
        self._bytes_of: Callable[[int], bytes] | None = None
        if texts and tokenizer:
            known = tokenizer()
            self._breakers.update(*map(known.tokens_with, texts))
            self._bytes_of = known.token_bytes
        self._texts = [text.encode() for text in texts]
        self._sequences = [list(each) for each in given if len(each) > 1]
        self._reach = max(map(len, [*self._texts, *self._sequences]), default=0)

    def penalties(self, recent: Ids) -> dict[int, float]:
        """The numbers that are subtracted from the logits of tokens; `recent` are the tokens to search, in order."""
        found = self.repetitions(recent).items()
        return {
            token: self._multiplier * self._base ** (length - self._allowed)
            for token, length in found
            if length >= self._allowed
        }

    def repetitions(self, recent: Ids) -> dict[int, int]:
        """Token -> length of the longest earlier sequence that equals the last tokens and that it followed."""
        longest: dict[int, int] = {}
        limit = self._unbroken(recent, self._longest)
        if limit < self._allowed:
            return longest
        alive = np.flatnonzero(recent[:-1] == recent[-1])  # ends of what is repeated
        for length in range(1, limit + 1):
            for token in np.unique(recent[alive + 1]).tolist():
                if token not in self._breakers:
                    longest[token] = length
            alive = alive[alive >= length]
            if length == limit or not len(alive):
                break
            alive = alive[recent[alive - length] == recent[-1 - length]]
        return longest

    def _unbroken(self, recent: Ids, most: int) -> int:
        """The number of tokens after the last breaker in `recent`, at most `most`."""
        tail = recent[max(len(recent) - most - self._reach, 0) :].tolist()
        behind = [at for at, token in enumerate(tail, 1) if token in self._breakers]
        behind += [
            at for seq in self._sequences for at in range(len(seq), len(tail) + 1) if tail[at - len(seq) : at] == seq
        ]
        if self._bytes_of is not None:  # texts: the index after the token in which the last occurrence ends
            pieces = [self._bytes_of(token) for token in tail]
            written, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
            found = [(written.rfind(text), len(text)) for text in self._texts]
            behind += [bisect_left(ends, at + size) + 1 for at, size in found if at >= 0]
        return min(len(tail) - max(behind, default=0), most)
