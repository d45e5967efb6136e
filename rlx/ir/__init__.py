"""What a program is: dims, dtypes, the op table, graphs, rewrite rules, verifier, text form, interpreter."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.ir import compare, costs, custom, custom_rules, interp, ops, text, tracing

__all__ = ["compare", "costs", "custom", "custom_rules", "interp", "ops", "text", "tracing"]

# Parts that a program from the cache does not need, imported when they are first used.
__getattr__ = modules_of(__name__, __all__)
