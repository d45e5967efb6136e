"""Mirostat 2: an adaptive bound on the surprise of the next token (Basu et al. 2021).

Sampling stage, under `sampler.py`.
"""

from __future__ import annotations

from math import log

import numpy as np

from rlx.sampling.filters import Floats, Logits, Places, log_shares

_BITS = 1 / log(2)


class Mirostat:
    """The state of Mirostat 2.

    The surprise of a token is -log2 p, after the temperature and before any token is removed.

    Args:
        tau: the target surprise in bits.
        eta: the learning rate of the bound.

    Attributes:
        bound: the largest surprise allowed, in bits; at first twice the target.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau, self._eta, self.bound = tau, eta, 2 * tau
        self._surprises: Floats = np.empty(0)

    def keep(self, logits: Logits) -> Places:
        """The indices of the tokens whose surprise is within the bound; the least surprising one if there is none."""
        self._surprises = -log_shares(logits) * _BITS
        kept = np.flatnonzero(self._surprises <= self.bound)
        return kept if len(kept) else np.array([self._surprises.argmin()])

    def accept(self, token: int) -> None:
        """Updates the bound after `token` was chosen from the logits of the last call of `keep`."""
        if token < len(self._surprises) and np.isfinite(self._surprises[token]):
            self.bound -= self._eta * (float(self._surprises[token]) - self._tau)

    def copy(self) -> Mirostat:
        """A copy of the state. The arrays are shared, because they are never changed."""
        other = Mirostat(self._tau, self._eta)
        other.bound, other._surprises = self.bound, self._surprises
        return other
