"""Requests that begin together. The server uses it for the choices of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.engine.loop.handle import News, RequestGroup
from rlx.engine.request.request import Request
from rlx.engine.threads import Notifier

if TYPE_CHECKING:
    from rlx.runners.base import LmRunner

__all__ = ["News", "Together"]


class Together(RequestGroup):
    """Requests that were handed over together."""

    def __init__(self, runner: LmRunner, requests: Sequence[Request]) -> None:
        notifier, plans = Notifier(), [runner._plan(request) for request in requests]
        for job, _ in plans:
            job.notifier = notifier
        super().__init__(runner._loop, runner._started(plans), notifier)
        runner._loop.wake()
