"""The server-sent events of OpenAI's streams: what chat and completions have in common. Server stage."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.serve.errors import ApiError, openai_body
from rlx.serve.generation import Event, Progress
from rlx.serve.streaming import comment, event, json_bytes

DONE = event("[DONE]")


class Chunks(ABC):
    """Makes the pieces of a stream, `[DONE]` at the end."""

    @abstractmethod
    def first(self) -> bytes:
        """What comes before anything is computed."""

    @abstractmethod
    def of(self, event: Event) -> bytes:
        """What an event becomes, perhaps nothing."""

    def waiting(self, progress: Progress) -> bytes:
        """A comment, which clients ignore."""
        return comment(f"{progress.processed} of {progress.total} prompt tokens")

    def failed(self, error: ApiError) -> bytes:
        """The error in place of the rest."""
        return event(json_bytes(openai_body(error))) + DONE

    def last(self) -> bytes:
        """The end."""
        return DONE
