"""Speculative decoding: drafts, and steps that verify several of them."""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.engine.speculation import draft_model, drafts, mtp

__all__ = ["draft_model", "drafts", "mtp"]

#: Parts that few models need, imported when they are first used.
_PARTS = {name: f"rlx.engine.speculation.{name}" for name in __all__}

__getattr__ = names_of("rlx.engine.speculation", _PARTS)
