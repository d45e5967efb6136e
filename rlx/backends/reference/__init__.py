"""The reference backend: programs lowered for a CPU, computed node by node with the ops" NumPy meanings."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.backends.reference import formats

__all__ = ["formats"]

# For the devices that need nothing else of it, imported when it is first used.
__getattr__ = modules_of(__name__, __all__)
