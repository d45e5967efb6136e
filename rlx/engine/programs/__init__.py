"""The programs of a model: which there are, those in memory, and what is shown of them."""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.engine.programs import ready

__all__ = ["ready"]

#: Parts that few models need, imported when they are first used.
_PARTS = {name: f"rlx.engine.programs.{name}" for name in __all__}

__getattr__ = names_of("rlx.engine.programs", _PARTS)
