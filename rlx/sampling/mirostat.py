"""Mirostat 2: a bound on the surprise of a token that follows what was drawn (Basu et al. 2021).

Sampling stage, under `sampler.py`.
"""

from __future__ import annotations

from math import log

import numpy as np

from rlx.sampling.filters import Floats, Logits, Places, log_shares

_BITS = 1 / log(2)


class Mirostat:
    """The state of Mirostat 2: the bound, in bits, at first twice the surprise that is aimed at.

    The surprise of a token, -log2 p, is that in the distribution before anything is left out, after the temperature.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau, self._eta, self.bound = tau, eta, 2 * tau
        self._surprises: Floats = np.empty(0)

    def keep(self, logits: Logits) -> Places:
        """The tokens that surprise no more than the bound, or the least surprising one."""
        self._surprises = -log_shares(logits) * _BITS
        kept = np.flatnonzero(self._surprises <= self.bound)
        return kept if len(kept) else np.array([self._surprises.argmin()])

    def accept(self, token: int) -> None:
        """Moves the bound after `token` was chosen from the logits that `keep` saw last."""
        if token < len(self._surprises) and np.isfinite(self._surprises[token]):
            self.bound -= self._eta * (float(self._surprises[token]) - self._tau)

    def copy(self) -> Mirostat:
        """Another with the same state; the arrays are never changed, so they are shared."""
        other = Mirostat(self._tau, self._eta)
        other.bound, other._surprises = self.bound, self._surprises
        return other
