"""The gated delta rule: the shape, and the addresses of a unit's data.

In the delta rule the columns of a state are independent. So a unit is a strip of columns of one head, which is
processed in panels of a few vectors. For more than one row the kernel works on a packed copy of the panel: the rows of
a state are a power of two apart in memory, so a strip would map to only a part of the sets of the L1 cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from llvmlite import ir

from rlx.backends.cpu.tiles import Emitter, Index

#: The rows of a panel: the address of the first one, and the bytes from one to the next.
Rows: TypeAlias = tuple[ir.Value, Index]


@dataclass(frozen=True)
class Shape:
    """The compile-time parameters of a kernel of the gated delta rule, see `delta.gated_delta`.

    Attributes:
        strip: columns of a unit, a divisor of value_dim.
        vectors: vectors of a panel, a divisor of the vectors of a strip.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    order: str
    corrects: bool
    strip: int
    vectors: int

    @property
    def key_row(self) -> int:
        """Bytes of a row of q or k."""
        return 4 * self.key_heads * self.key_dim

    @property
    def value_row(self) -> int:
        """Bytes of a row of v or of the result."""
        return 4 * self.heads * self.value_dim

    @property
    def gate_row(self) -> int:
        """Bytes of a row of g or beta."""
        return 4 * self.heads

    @property
    def state_row(self) -> int:
        """Bytes of a row of a head's state."""
        return 4 * self.value_dim

    @property
    def panel(self) -> int:
        """Bytes of a row of a panel."""
        return 64 * self.vectors

    @property
    def panels(self) -> int:
        """Panels of a strip."""
        return 4 * self.strip // self.panel


@dataclass(frozen=True)
class Place:
    """Addresses of row 0 of a unit's data, for its strip or for one panel of it. `after` receives the new state."""

    state: ir.Value
    q: ir.Value
    k: ir.Value
    v: ir.Value
    g: ir.Value
    beta: ir.Value
    out: ir.Value
    after: ir.Value

    def shifted(self, e: Emitter, offset: Index) -> Place:
        """The same, with the columns moved by `offset` bytes."""
        return replace(self, **{name: e.at(getattr(self, name), offset) for name in ("state", "v", "out", "after")})


def locate(e: Emitter, shape: Shape, unit: ir.Value) -> Place:
    """The addresses of a unit's data. Units are numbered head * strips + strip."""
    strips = shape.value_dim // shape.strip
    head, strip = e.b.sdiv(unit, e.i64(strips)), e.b.srem(unit, e.i64(strips))
    if shape.order == "tiled":
        key_head = e.b.srem(head, e.i64(shape.key_heads))
    else:
        key_head = e.b.sdiv(head, e.i64(shape.heads // shape.key_heads))
    keys, values, columns = (key_head, 4 * shape.key_dim), (head, 4 * shape.value_dim), (strip, 4 * shape.strip)
    state, after = (
        e.at(base, (head, shape.key_dim * shape.state_row), columns)
        for base in (e.args["state"], e.args.get("after", e.args["state"]))
    )
    return Place(
        state=state,
        q=e.at(e.args["q"], keys),
        k=e.at(e.args["k"], keys),
        v=e.at(e.args["v"], values, columns),
        g=e.at(e.args["g"], (head, 4)),
        beta=e.at(e.args["beta"], (head, 4)),
        out=e.at(e.args["out"], values, columns),
        after=after,
    )


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
