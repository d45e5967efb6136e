"""The engine: requests, scheduler, batches, model runner, sequences in a pool."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.engine import adapters, engine, token_engine

__all__ = ["adapters", "engine", "token_engine"]

# Parts that not every command needs, imported when they are first used.
__getattr__ = modules_of(__name__, __all__)
