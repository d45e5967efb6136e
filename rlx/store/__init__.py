"""What is kept on disk: entries by key, of a few kinds, in one folder with one set of rules."""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.store import misses

__all__ = ["misses"]

#: What a program from the cache does not need, imported when it is first used.
_PARTS = {name: f"rlx.store.{name}" for name in __all__}

__getattr__ = names_of("rlx.store", _PARTS)
