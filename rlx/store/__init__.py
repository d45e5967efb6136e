"""What is kept on disk: entries by key, of a few kinds, in one folder with one set of rules."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.store import misses

__all__ = ["misses"]

# What a program from the cache does not need, imported when it is first used.
__getattr__ = modules_of(__name__, __all__)
