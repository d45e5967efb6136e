"""Changes to logits: bias, penalties for repeated tokens, and DRY for repeated sequences.

Sampling stage, under `sampler.py`. Everything here works in place on a float64 copy of the logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, log
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlx.errors import SamplingError
from rlx.sampling.options import SampleOpts

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

_BEYOND_ALL = 1e30  # a penalty this large is not increased further


class Bias:
    """Numbers that are added to the logits of some ids.

    Args:
        pairs: ids, ascending, and numbers.
    """

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        self._last = pairs[-1][0] if pairs else -1
        self._ids = np.array([token for token, _ in pairs] if self._last < 2**62 else [], np.intp)
        self._values = np.array([value for _, value in pairs])

    def add(self, logits: Floats) -> None:
        """Adds the numbers; `SamplingError` for an id outside the vocabulary."""
        if self._last >= len(logits):
            what = f"logit_bias names token {self._last}, and the vocabulary holds {len(logits)}"
            raise SamplingError(what, where="sampling", hint=f"ids run from 0 to {len(logits) - 1}")
        logits[self._ids] += self._values


def penalize(logits: Floats, recent: Ids, opts: SampleOpts) -> None:
    """Repetition penalty, then the frequency and presence penalties, for the tokens in `recent`."""
    tokens, counts = np.unique(recent, return_counts=True)
    found, factor = logits[tokens], opts.repetition_penalty
    scaled = np.where(found > 0, found / factor, found * factor)
    logits[tokens] = scaled - counts * opts.frequency_penalty - opts.presence_penalty


class Dry:
    """DRY: penalizes tokens that would continue a repeated sequence.

    If the last n tokens occurred before, the token that followed them is penalized; the penalty grows with n. Of
    several earlier occurrences the longest counts. Repetitions end at sequence breakers, which are never penalized.
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
        self._breakers = _Breakers(opts, tokenizer)

    def penalize(self, logits: Floats, recent: Ids) -> None:
        """Subtracts the penalties from `logits`; `recent` are the tokens to search, in order."""
        for token, length in self.repetitions(recent).items():
            if length >= self._allowed:
                logits[token] -= self._multiplier * self._base ** (length - self._allowed)

    def repetitions(self, recent: Ids) -> dict[int, int]:
        """Token -> length of the longest earlier sequence that equals the last tokens and that it followed."""
        longest: dict[int, int] = {}
        limit = self._breakers.unbroken(recent, self._longest)
        if limit < self._allowed:
            return longest
        alive = np.flatnonzero(recent[:-1] == recent[-1])  # ends of what is repeated
        for length in range(1, limit + 1):
            for token in np.unique(recent[alive + 1]).tolist():
                if token not in self._breakers.tokens:
                    longest[token] = length
            alive = alive[alive >= length]
            if length == limit or not len(alive):
                break
            alive = alive[recent[alive - length] == recent[-1 - length]]
        return longest


class _Breakers:
    """Sequence breakers: tokens, sequences of tokens, and texts that may begin and end inside a token.

    Attributes:
        tokens: tokens that are breakers by themselves.
    """

    def __init__(self, opts: SampleOpts, tokenizer: Callable[[], Tokenizer] | None) -> None:
        texts = [each for each in opts.dry_sequence_breakers if isinstance(each, str)]
        given = [each for each in opts.dry_sequence_breakers if not isinstance(each, str)]
        if texts and tokenizer is None:
            raise SamplingError(
                f"{texts[0]!r} is a text, and there is no tokenizer", where="dry_sequence_breakers",
                hint="give sequences of token ids, or an empty tuple for none",
            )  # fmt: skip
        self.tokens = {each[0] for each in given if len(each) == 1}
        self._bytes_of: Callable[[int], bytes] | None = None
        if texts and tokenizer:
            known = tokenizer()
            self.tokens.update(*map(known.tokens_with, texts))
            self._bytes_of = known.token_bytes
        self._texts = [text.encode() for text in texts]
        self._sequences = [list(each) for each in given if len(each) > 1]
        self._reach = max(map(len, [*self._texts, *self._sequences]), default=0)

    def unbroken(self, recent: Ids, most: int) -> int:
        """The number of tokens after the last breaker in `recent`, at most `most`."""
        tail = recent[max(len(recent) - most - self._reach, 0) :].tolist()
        behind = [at for at, token in enumerate(tail, 1) if token in self.tokens]
        behind += [
            at for seq in self._sequences for at in range(len(seq), len(tail) + 1) if tail[at - len(seq) : at] == seq
        ]
        return min(len(tail) - max([*behind, *self._behind_texts(tail)], default=0), most)

    def _behind_texts(self, tail: list[int]) -> list[int]:
        """For each text breaker, the index after the token in which its last occurrence ends."""
        if self._bytes_of is None:
            return []
        pieces = [self._bytes_of(token) for token in tail]
        written, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
        found = [(written.rfind(text), len(text)) for text in self._texts]
        return [bisect_left(ends, at + size) + 1 for at, size in found if at >= 0]
