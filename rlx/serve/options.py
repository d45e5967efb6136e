"""Options of the server. Server stage: every field is an option of `rlx serve`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOptions:
    """How a model is served."""
