"""Fixtures of the tests of `rlx chat`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from desk import Desk
from fake_engine import Opened, install
from talker import Talker


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, talker: Talker) -> Iterator[Opened]:
    """Opening a model opens the talker; in the end every engine must be closed, whatever happened."""
    opened = install(monkeypatch, talker.make)
    yield opened
    assert all(engine.closed for engine in opened.engines)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch, talker: Talker) -> Desk:
    return Desk(monkeypatch, talker)
