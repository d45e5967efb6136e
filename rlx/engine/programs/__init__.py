"""The programs of a model: which there are, those in memory, and what is shown of them."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.engine.programs import ready

__all__ = ["ready"]

# Parts that few models need, imported when they are first used.
__getattr__ = modules_of(__name__, __all__)
