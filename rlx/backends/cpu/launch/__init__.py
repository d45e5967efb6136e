"""How a compiled program runs: the native worker loop, its threads, and a program with its memory."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.backends.cpu.launch import drafts

__all__ = ["drafts"]

# For models with a head that drafts, imported when it is first used.
__getattr__ = modules_of(__name__, __all__)
