"""Requests that begin together, read by one asyncio task: whichever has tokens.

Runners stage, above handles. The server uses it for the choices of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.engine.loop.bell import Bell
from rlx.engine.request.output import Step
from rlx.engine.request.request import Request

if TYPE_CHECKING:
    from rlx.runners.base import LmRunner

News = list[tuple[int, list[Step]]]
"""Numbers of requests, and their new steps; no steps where one is over."""


class Together:
    """Requests that were handed over together.

        together = Together(runner, [rlx.Request(ids, 20), rlx.Request(ids, 20)])
        while news := await together.news():
            ...

    Args:
        runner: computes them.
        requests: at least one.

    Attributes:
        handles: one for each request.

    Raises:
        RlxError: as `LmRunner.submit`; then none of them is computed.
    """

    def __init__(self, runner: LmRunner, requests: Sequence[Request]) -> None:
        self._bell, plans = Bell(), [runner._plan(request) for request in requests]
        for job, _ in plans:
            job.bell = self._bell
        self._loop, self.handles = runner._loop, runner._started(plans)
        self._loop.wake()
        self._read = [0] * len(plans)
        self._open = set(range(len(plans)))

    async def news(self, seconds: float | None = None) -> News | None:
        """Waits until there are new steps, or one request is over: then its list of steps is empty.

        Args:
            seconds: how long it waits at most.

        Returns:
            What is new. An empty list if all requests are over; None if the time has passed.

        Raises:
            RlxError: of a request that failed, once its steps were read.
        """
        while self._open:
            if found := self._found():
                return found
            self._loop.wake()  # the task's own thread must not compute
            if not await self._bell.wait_async(self._has_news, seconds):
                return None
        return []

    def _has_news(self) -> bool:
        return any(self.handles[i].has_news() for i in self._open)

    def _found(self) -> News:
        found: News = []
        for i in sorted(self._open):
            handle, at = self.handles[i], self._read[i]
            if steps := handle.steps(at):
                self._read[i] += len(steps)
                found.append((i, steps))
            elif handle.is_over:
                self._open.discard(i)
                found.append((i, []))
        return found

    def abort(self) -> None:
        """Ends all requests. May be called again."""
        for handle in self.handles:
            handle.abort()
