"""From logits to a token: the sampling options and the sampler that draws.

Runners stage, between the last row of logits and the next token. The steps and their order are those of llama.cpp's
default chain: repetition penalty, top-k, top-p, min-p, temperature, draw. The filters therefore look at the model's own
distribution, and the temperature flattens or sharpens what they left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import isfinite, log
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericalError, SamplingError

Ids = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleOpts:
    """How to choose the next token. The defaults draw from the model's distribution as it is.

    Attributes:
        temperature: divides the logits before the draw; 0 takes the likeliest token and draws nothing.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their share reaches p, the one that reaches it included; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        repetition_penalty: for tokens among the last `repetition_window`, positive logits are divided by it and others
            multiplied (Keskar et al. 2019, CTRL, section 4.1); 1 changes nothing.
        seed: of the random numbers, 0 to 2**64 - 1; None takes one from the operating system.
        repetition_window: how many tokens back the penalty looks, the prompt included; None means all of them.

    Raises:
        SamplingError: an option of the wrong type or out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    repetition_window: int | None = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high, whole, optional = _RANGES[field.name]
            value = _checked(field.name, getattr(self, field.name), low, high, whole=whole, optional=optional)
            object.__setattr__(self, field.name, value)
        if self.repetition_penalty == 0:
            raise SamplingError("repetition_penalty is 0", where="SampleOpts", hint="1 is off; more than 1 penalizes")

    @classmethod
    def greedy(cls) -> SampleOpts:
        """Always the likeliest token, the lowest id among equals."""
        return cls(temperature=0.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


_MAX_WHOLE = 2**64 - 1
# Smallest and largest value, whether it is a whole number, whether None is one of its values.
_RANGES: dict[str, tuple[float, float, bool, bool]] = {
    "temperature": (0, float("inf"), False, False),
    "top_k": (0, _MAX_WHOLE, True, False),
    "top_p": (0, 1, False, False),
    "min_p": (0, 1, False, False),
    "repetition_penalty": (0, float("inf"), False, False),
    "seed": (0, _MAX_WHOLE, True, True),
    "repetition_window": (0, _MAX_WHOLE, True, True),
}


def _checked(name: str, value: Any, low: float, high: float, *, whole: bool, optional: bool) -> int | float | None:
    if optional and value is None:
        return None
    kind = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = ("a whole number" if whole else "a number") + (" or None" if optional else "")
        raise SamplingError(f"{name} is {value!r}, expected {expected}", where="SampleOpts")
    number = int(value) if whole else float(value)  # type: ignore[call-overload]
    if not (low <= number <= high and (whole or isfinite(number))):
        upper = "" if high == float("inf") else f" to {int(high)}"
        expected = f"{int(low)}{upper}" if upper else f"a finite number of at least {int(low)}"
        raise SamplingError(f"{name} is {value!r}, expected {expected}", where="SampleOpts")
    return number


class Sampler:
    """Chooses the tokens of one generation.

    The generator of random numbers advances from token to token: equal logits, options and seed give equal tokens, and
    two draws of one sampler are independent. Ties are broken by the id, the lowest first.

    Args:
        opts: the options.
        history: tokens before the first draw (the prompt), for the repetition penalty.

    Raises:
        SamplingError: `opts` is something else.
    """

    def __init__(self, opts: SampleOpts, history: Iterable[int] = ()) -> None:
        if not isinstance(opts, SampleOpts):
            hint = "SampleOpts.greedy() is the default"  # type: ignore[unreachable]
            raise SamplingError(f"found {opts!r}, expected a SampleOpts", where="sample", hint=hint)
        self.opts = opts
        self._random = np.random.Generator(np.random.PCG64(opts.seed))
        window = 0 if opts.repetition_penalty == 1 else opts.repetition_window
        self._recent = deque(history, window)

    def sample(self, logits: npt.NDArray[np.floating[Any]]) -> int:
        """The next token for `logits`, float[vocab]; it joins the history.

        Raises:
            NumericalError: a NaN or +inf among the logits, or nothing but -inf. A single -inf excludes its token.
        """
        token = self._likeliest(logits) if self.opts.is_greedy else self._draw(logits)
        self._recent.append(token)
        return token

    def distribution(self, logits: npt.NDArray[np.floating[Any]]) -> tuple[Ids, Floats]:
        """Ascending ids and their probabilities (float64, sum 1) as the next draw sees them."""
        if self.opts.is_greedy:
            return np.array([self._likeliest(logits)]), np.ones(1)
        ids, weights = self._weights(logits)
        return ids, weights / weights.sum()

    def _likeliest(self, logits: npt.NDArray[np.floating[Any]]) -> int:
        values = self._penalized(logits.astype(np.float64)) if self._recent else logits
        token = int(values.argmax())  # the place of a NaN, if there is one
        _check_finite(values[token])
        return token

    def _draw(self, logits: npt.NDArray[np.floating[Any]]) -> int:
        ids, weights = self._weights(logits)
        shares = weights.cumsum()
        at = shares.searchsorted(self._random.random() * shares[-1], side="right")
        last = shares.searchsorted(shares[-1])  # where rounding must not go beyond: the last token that has a share
        return int(ids[min(at, last)])

    def _weights(self, logits: npt.NDArray[np.floating[Any]]) -> tuple[Ids, Floats]:
        """Ids that the filters leave, ascending, and their probabilities up to a factor."""
        opts, values = self.opts, self._penalized(logits.astype(np.float64))
        top = float(values.max())
        _check_finite(top)
        ids: Ids = np.arange(len(values))
        if 0 < opts.top_k < len(values):
            ids, values = _only(_largest(values, opts.top_k), ids, values)
        if opts.top_p < 1:
            ids, values = _only(_largest(values, _nucleus_size(values, opts.top_p)), ids, values)
        if opts.min_p > 0:
            ids, values = _only(np.flatnonzero(values >= top + log(opts.min_p)), ids, values)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to exp(-inf) = 0
            return ids, np.exp((values - top) / opts.temperature)

    def _penalized(self, values: Floats) -> Floats:
        """`values`, changed in place for recent tokens."""
        if self._recent:
            recent = np.fromiter(set(self._recent), np.intp)
            found, penalty = values[recent], self.opts.repetition_penalty
            values[recent] = np.where(found > 0, found / penalty, found * penalty)
        return values


def _only(places: Ids, ids: Ids, values: Floats) -> tuple[Ids, Floats]:
    return ids[places], values[places]


def _largest(values: Floats, count: int) -> Ids:
    """Ascending places of the `count` largest values; the first places among equals."""
    if count >= len(values):
        return np.arange(len(values))
    border = np.partition(values, len(values) - count)[-count]
    kept = values > border
    kept[np.flatnonzero(values == border)[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _nucleus_size(values: Floats, share: float) -> int:
    """How many of the largest values have at least `share` of the softmax of all; at least one."""
    rising = np.sort(values)
    shares = np.exp(rising - rising[-1])[::-1].cumsum()
    return int(shares.searchsorted(share * shares[-1])) + 1


def _check_finite(top: float) -> None:
    if not isfinite(top):
        raise NumericalError(
            f"the largest logit is {top}", where="sampling",
            hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
        )  # fmt: skip
