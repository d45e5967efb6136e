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
        copies: whether copies to shared memory run by themselves (cp.async).
        bf16: whether it computes with pairs of bf16: tensor cores multiply them, of 16 k at a time.
    """

    shared: int = 163 << 10
    overlaps: bool = False
    together: bool = False
    copies: bool = True
    bf16: bool = True


#: Those of sm_80.
AMPERE = Features()
