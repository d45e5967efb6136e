"""How far a card is ahead of the host in runs of steps."""

from __future__ import annotations

import pytest

from rlx.backends.cuda.token_loop import StepsAhead


def noted_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each step whose tokens are taken: how many steps the card had begun besides."""
    ahead, take = list[int](), StepsAhead.take

    def noted(self: StepsAhead, count: int, seconds: float = 1.0) -> list[list[int]]:
        tokens = take(self, count, seconds)
        ahead.append(self.ahead)
        return tokens

    monkeypatch.setattr(StepsAhead, "take", noted)
    return ahead
