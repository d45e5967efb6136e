"""The engine: requests, scheduler, batches, model runner, sequences in a pool."""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.engine import adapters, engine, token_engine

__all__ = ["adapters", "engine", "token_engine"]

#: Parts that not every command needs, imported when they are first used.
_PARTS = {name: f"rlx.engine.{name}" for name in __all__}

__getattr__ = names_of("rlx.engine", _PARTS)
