"""From a graph to a program on a device: stages, keys, executables, tensors."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.compiler import build, debug, inspection, packed_cache, step_trace

__all__ = ["build", "debug", "inspection", "packed_cache", "step_trace"]

# Parts that few runs need, imported when they are first used.
__getattr__ = modules_of(__name__, __all__)
