"""What a caller may choose about a compile. Everything here is part of the compile key; nothing else changes code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rlx.errors import ArgumentError

MAX_SLOTS = 1 << 20  # upper bound of SLOTS
MAX_PAST = 1 << 20  # upper bound of PAST_SEQ and CTX: a run-time scalar, so a generous bound costs nothing
FUSIONS = ("gated", "bias", "residual", "norm", "rope", "elementwise", "prologue")


@dataclass(frozen=True)
class Options:
    """Choices of one program.

    Attributes:
        precision: "exact" computes with float32 activations, "auto" may prepare int8 activations for quantized weights
            and, with `bf16_dots`, bf16 activations for bf16 weights, with `bf16_tiles` for quantized ones.
        seq: (smallest, largest) number of rows a call brings; equal ends make SEQ a constant.
        all_rows: True keeps the logits of every row, False those of the last one only.
        fusions: which groups of fusion rules run, of `FUSIONS`; "prologue" is the schedule's, see there.
        symbols: bounds of further symbols, name -> (lowest, highest).
        sequences: True makes every row the one new token of a sequence of its own, see `rlx.ir.sequences`.
        whole: outputs of which every row is kept even where `all_rows` is False.
        packed: tables that are packed though the graph only looks rows up: another graph of the model multiplies them.
        bf16_dots: whether the target has dot products of bf16. The compiler sets it: it is the target's to say.
        bf16_tiles: whether the target multiplies tiles of bf16. The compiler sets it.
    """

    precision: str = "auto"
    seq: tuple[int, int] = (1, 1)
    all_rows: bool = False
    fusions: tuple[str, ...] = FUSIONS
    symbols: tuple[tuple[str, tuple[int, int]], ...] = field(default=())
    sequences: bool = False
    whole: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    bf16_dots: bool = False
    bf16_tiles: bool = False

    def __post_init__(self) -> None:
        if self.precision not in ("exact", "auto"):
            raise ArgumentError(f"precision {self.precision!r} is unknown", hint='Choose "exact" or "auto".')
        if not 1 <= self.seq[0] <= self.seq[1]:
            hint = "Give (smallest, largest), both at least 1."
            raise ArgumentError(f"a bucket {self.seq} is no range of row counts", hint=hint)
        if self.sequences and self.seq[0] == self.seq[1]:
            raise ArgumentError(f"a batch of {self.seq[0]} rows and no other", hint="Give a range of row counts.")
        for name, (low, high) in self.symbols:
            if low > high:
                raise ArgumentError(f"the bounds {low}..{high} are no range", where=f"symbol {name}")
        unknown = set(self.fusions) - set(FUSIONS)
        if unknown:
            raise ArgumentError(f"unknown fusions {sorted(unknown)}", hint=f"Known: {', '.join(FUSIONS)}.")

    @property
    def phase(self) -> str:
        if self.sequences:
            return "batch"
        return "decode" if self.seq == (1, 1) else "prefill"

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Bounds of every symbol."""
        room = (16, MAX_PAST)
        usual = {"SEQ": self.seq, "PAST_SEQ": (0, MAX_PAST), "CTX": room, "WINDOW_CTX": room, "SLOTS": (1, MAX_SLOTS)}
        return {**usual, **dict(self.symbols)}

    def with_(self, **changes: Any) -> Options:
        return replace(self, **changes)
