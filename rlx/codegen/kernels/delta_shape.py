"""What the two forms of the gated delta rule share: the shape of the problem and where a unit finds its data.

Columns of a state never meet in the delta rule, so a unit is a strip of columns of one head. Both forms go through a
strip in panels of a few vectors, and keep a panel in a packed copy while they do more than one row: rows of a state lie
a power of two apart, and a strip of them would use a fraction of the first cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from llvmlite import ir

from rlx.codegen.tiles import F32X16, Emitter, Index

#: Rows of a panel: where they start, and the bytes from one to the next.
Rows: TypeAlias = tuple[ir.Value, Index]


@dataclass(frozen=True)
class Shape:
    """What makes a kernel of the gated delta rule: see `delta.gated_delta`.

    Attributes:
        strip: columns of a unit, a divisor of value_dim.
        vectors: vectors of a panel, a divisor of those of a strip.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    order: str
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
    """Addresses of a unit's data, in row 0: of its strip, or of one panel of it; `after` is where the state goes."""

    state: ir.Value
    q: ir.Value
    k: ir.Value
    v: ir.Value
    g: ir.Value
    beta: ir.Value
    out: ir.Value
    after: ir.Value

    def shifted(self, e: Emitter, offset: Index) -> Place:
        """The same, some bytes of columns further."""
        return replace(self, **{name: e.at(getattr(self, name), offset) for name in ("state", "v", "out", "after")})


def locate(e: Emitter, shape: Shape, unit: ir.Value) -> Place:
    """Where a unit's data lie; units count strips of a head, then heads."""
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


def copy_rows(e: Emitter, count: int, vectors: int, source: Rows, target: Rows) -> None:
    """Copies `count` rows of some vectors."""
    with e.loop(0, count) as row:
        for v in range(vectors):
            value = e.load(F32X16, e.at(source[0], (row.i, source[1]), 64 * v))
            e.store(value, e.at(target[0], (row.i, target[1]), 64 * v))


def divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
