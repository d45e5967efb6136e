"""A group of requests, whose tokens one consumer reads: those of a batch, or the choices of an answer.

Runners stage, above the handles.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.engine.loop.handle import Handle
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.request.output import Generation, Step

News = list[tuple[int, list[Step]]]
"""Numbers of requests, and their new steps; no steps where one is over."""


class RequestGroup:
    """Requests that were handed over together, read by one thread or one asyncio task: whichever has tokens.

    Args:
        loop: computes them.
        handles: at least one.

    Attributes:
        handles: one for each request.
    """

    def __init__(self, loop: EngineLoop, handles: Sequence[Handle]) -> None:
        self._loop, self.handles, self._notifier = loop, handles, handles[0].job.notifier
        self._read = [0] * len(handles)
        self._open = set(range(len(handles)))

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
            seen = self._notifier.news
            if found := self._found():
                return found
            self._loop.wake()  # the task's own thread must not compute
            if not await self._notifier.wait_async(seen, seconds):
                return None
        return []

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

    def results(self) -> list[Generation]:
        """Waits for the ends of all requests, and returns their tokens.

        Raises:
            RlxError: of the first request that fails; the others are aborted.
        """
        try:
            while left := [handle for handle in self.handles if not handle.is_over]:
                seen = self._notifier.news
                if not sum(handle.read() for handle in left):  # all of them, not only up to the first
                    self._loop.wait(self._notifier, seen)
                for handle in left:
                    if handle.is_over:
                        handle.result()
        finally:
            self.abort()
        return [handle.result() for handle in self.handles]

    def abort(self) -> None:
        """Ends all requests. May be called again."""
        for handle in self.handles:
            handle.abort()
