"""What the tests of the chat page share: a server that says what it is told, and the page over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from page_browser import Watched
from page_double import Double, serving


@pytest.fixture(scope="session")
def running_double() -> Iterator[tuple[Double, str]]:
    double = Double()
    with serving(double.app) as url:
        yield double, url


@pytest.fixture
def double(running_double: tuple[Double, str]) -> Double:
    """The server that says what a test tells it to, as new."""
    running_double[0].reset()
    return running_double[0]


@pytest.fixture
def double_url(running_double: tuple[Double, str]) -> str:
    return running_double[1]


@pytest.fixture
def watched(browser: Any, double: Double, double_url: str) -> Iterator[Watched]:
    """An empty page of the browser; at the end nothing was wrong in its console, and nobody else was asked."""
    found = Watched(browser, double_url)
    yield found
    found.close()


@pytest.fixture
def page(watched: Watched) -> Any:
    """The chat page, ready."""
    return watched.open()
