"""Speculative decoding: drafts, and steps that verify several of them."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.engine.speculation import draft_model, drafting, drafts, eagle3, gemma4

__all__ = ["draft_model", "drafting", "drafts", "eagle3", "gemma4"]

# Parts that few models need, imported when they are first used.
__getattr__ = modules_of(__name__, __all__)
