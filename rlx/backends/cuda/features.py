"""What a card has that not all have: kernels ask for it here, and know no kinds of cards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Features:
    """What a card has.

    Attributes:
        shared: bytes of shared memory that a block can have.
        overlaps: whether a kernel can start while the one before it ends (programmatic dependent launch); it must then
            `wait`.
        together: whether four warps can multiply together (wgmma).
    """

    shared: int = 163 << 10
    overlaps: bool = False
    together: bool = False


#: Those of sm_80.
AMPERE = Features()
