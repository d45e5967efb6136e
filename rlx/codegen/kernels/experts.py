"""Linear layers of experts: out[row, slot] = x[row] or x[row, slot] times packed W[ids[row, slot]] transposed.

With one row, as in decode, a unit is 16 results of one slot: only the weights of the chosen experts are read.

    for slot that has units in begin .. end:
        the row times those blocks of its expert, W streamed, as a linear with one row does it

With more, a unit is 16 results of one expert, whatever rows chose it. About 16 units of one expert make a stretch, and
a stretch of each expert comes before the next of any: experts differ in rows, and so every range of units has some of
many experts.

    for stretch that has units in begin .. end:
        for macro tile of the pairs (row, slot) that chose the expert, found by a scan of the ids:
            those rows times the blocks, as a linear does it: W unpacked once for all of them

A pair has the number row * slots + slot, in ids and in the result. All arithmetic is that of `linear.py`, so the bits
are those of a linear of the expert alone, whatever rows share a tile.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.codegen.kernel import Kernel
from rlx.codegen.kernels import linear
from rlx.codegen.kernels.multiply import Rows, Shape
from rlx.codegen.layouts import BLOCK_ROWS
from rlx.codegen.target import Target
from rlx.codegen.tiles import I1, I16, I32, I64, LANES, POINTER, Emitter
from rlx.ir.dtypes import DType

_STRETCH = 16  # units of a stretch at most: enough that finding an expert's rows is little beside their work


def units(n: int, *, experts: int, slots: int, single: bool = False) -> int:
    """Work units of `expert_linear` with the same options."""
    if single:
        return slots * linear.units(n)
    return experts * _stretch(n) * -(-linear.units(n) // _stretch(n))


def _stretch(n: int) -> int:
    """Units of a stretch: stretches are equal, but the last one of an expert may have units without work."""
    blocks = linear.units(n)
    return -(-blocks // -(-blocks // _STRETCH))


def expert_linear(
    dtype: DType,
    n: int,
    k: int,
    act: str,
    target: Target,
    *,
    experts: int,
    slots: int,
    x_slots: bool = False,
    gated: str | None = None,
    single: bool = False,
) -> Kernel:
    """A kernel for out = x We^T, or gate(x We^T) * (x Ue^T) where gated, e the expert of each row and slot.

    Buffers: `x` (q8a, f32 or bf16 rows, [rows, k], or [rows, slots, k] with `x_slots`), `ids` i32[rows, slots], `w`
    (experts packed [n, k] each, one after the other), `w_up` where gated, `out` f32[rows, slots, n], which overlaps
    nothing. The ids are not checked: the caller vouches for them. Extents: `rows` unless `single`. Units: `units`.

    Args:
        dtype, act, gated: as for `linear.linear`.
        single: there is one row, as in decode.

    Raises:
        CompileError: an option out of its range.
        ShapeError: k does not fit the type's blocks.
    """
    linear.check(dtype, k, act, gated, target)
    shape = Shape(dtype, k, act, False, False, gated, ragged=n % BLOCK_ROWS > 0, single=single)
    e = Emitter(target, ["x", "ids", *shape.weights, "out"], [] if single else ["rows"])
    e.args["n"] = e.i64(n)
    writer = _Experts(e, shape, n, slots, 1 if x_slots else slots)
    if single:
        writer.write_slots()
    else:
        writer.write_experts(experts, _stretch(n))
    return e.finish(f"experts_{dtype}_{act}", _outline(shape, n, experts, slots, x_slots))


class _Experts(linear.LinearWriter):
    """A kernel while it is written. Its rows are those of a macro tile, which are listed in scratch memory."""

    def __init__(self, e: Emitter, shape: Shape, n: int, slots: int, pairs_a_row: int) -> None:
        super().__init__(e, shape)
        self.blocks, self.slots, self.pairs_a_row = linear.units(n), slots, pairs_a_row
        listed = 8 * (1 if shape.single else self.macro_rows)
        self.pairs, self.places = e.stack(listed), e.stack(listed)  # of each row: its number, where x is
        self.first_block = e.i64(0)  # of the expert at hand

    def write_slots(self) -> None:
        """The only row: a slot's units stream past it."""
        with self.e.cut(self.blocks) as (slot, first, last):
            self._one_pair(slot, first, last)

    def write_experts(self, experts: int, stretch: int) -> None:
        """Any number of rows, stretch by stretch."""
        e = self.e
        with self.e.cut(stretch) as (number, first, last):
            start = e.b.mul(e.b.udiv(number, e.i64(experts)), e.i64(stretch))
            last = e.smin(e.b.add(start, last), self.blocks)
            self._one_expert(e.b.urem(number, e.i64(experts)), e.b.add(start, first), last)

    def _one_pair(self, pair: ir.Value, first: ir.Value, last: ir.Value) -> None:
        e, zero = self.e, self.e.i64(0)
        e.store(pair, self.pairs, 8)
        self._choose(e.b.zext(e.load(I32, e.at(e.args["ids"], (pair, 4)), 4), I64))
        self._take_rows(e.i64(1))
        with e.loop(first, last) as u:
            self._streamed_tile(self._rows(zero, zero, 1), zero, u.i)

    def _one_expert(self, expert: ir.Value, first: ir.Value, last: ir.Value) -> None:
        e = self.e
        self._choose(expert)
        found = self._count(expert)
        with e.loop(0, found, self.macro_rows) as m:
            count = e.smin(self.macro_rows, e.b.sub(found, m.i))
            self._list(expert, m.i)
            self._take_rows(count)
            self._macro_tile(e.i64(0), count, first, last)

    def _choose(self, expert: ir.Value) -> None:
        self.first_block = self.e.b.mul(expert, self.e.i64(self.blocks))

    # --- the pairs of an expert ---------------------------------------------------------------------------------------

    def _count(self, expert: ir.Value) -> ir.Value:
        """How many pairs chose an expert."""
        e = self.e
        with e.loop(0, self._all_pairs(), LANES, [e.i64(0)]) as z:
            z.values = [e.b.add(z.values[0], self._how_many(self._hits(expert, z.i)))]
        return z.results[0]

    def _list(self, expert: ir.Value, first: ir.Value) -> None:
        """Lists the pairs of a macro tile, from the expert's pair number `first` on."""
        e = self.e
        with e.loop(0, self._all_pairs(), LANES, [e.b.neg(first)]) as z:
            hits = self._hits(expert, z.i)
            with e.loop(0, self._how_many(hits), 1, [hits, *z.values]) as hit:
                bits, at = hit.values
                lane = e.call("llvm.cttz.i16", I16, [bits, ir.Constant(I1, 1)])
                with e.when(e.b.icmp_unsigned("<", at, e.i64(self.macro_rows))):
                    e.store(e.b.add(z.i, e.b.zext(lane, I64)), e.at(self.pairs, (at, 8)), 8)
                hit.values = [e.b.and_(bits, e.b.sub(bits, ir.Constant(I16, 1))), e.b.add(at, e.i64(1))]
            z.values = hit.results[1:]

    def _how_many(self, hits: ir.Value) -> ir.Value:
        return self.e.b.zext(self.e.call("llvm.ctpop.i16", I16, [hits]), I64)

    def _all_pairs(self) -> ir.Value:
        return self.e.b.mul(self.e.args["rows"], self.e.i64(self.slots))

    def _hits(self, expert: ir.Value, first: ir.Value) -> ir.Value:
        """Of 16 pairs a bit for each one that chose the expert."""
        e = self.e
        mask = e.tail_mask(e.b.sub(self._all_pairs(), first))
        ids = e.masked_load(I32, e.at(e.args["ids"], (first, 4)), mask)
        same = e.b.icmp_signed("==", ids, e.splat(e.b.trunc(expert, I32)))
        return e.b.bitcast(e.b.and_(same, mask), I16)

    def _take_rows(self, count: ir.Value) -> None:
        """Finds the activations of the listed pairs."""
        e = self.e
        with e.loop(0, count) as r:
            pair = self._result_row(r.i)
            x = e.at(e.args["x"], (e.b.udiv(pair, e.i64(self.pairs_a_row)), self.shape.row_bytes))
            e.store(x, e.at(self.places, (r.i, 8)), 8)
            if self.scratch.terms:
                self.multiply.write_terms(x, e.at(self.scratch.terms, (r.i, self.multiply.term_bytes)))

    # --- where a linear finds what it multiplies ----------------------------------------------------------------------

    def _rows(self, macro: ir.Value, row: ir.Value, count: int) -> Rows:
        e = self.e
        x = [e.load(POINTER, e.at(self.places, (row, 8), 8 * i), 8) for i in range(count)]
        return Rows(x, self._terms(row))

    def _result_row(self, row: ir.Value) -> ir.Value:
        return self.e.load(I64, self.e.at(self.pairs, (row, 8)), 8)

    def _block(self, name: str, unit: ir.Value) -> ir.Value:
        return super()._block(name, self.e.b.add(self.first_block, unit))


def _outline(shape: Shape, n: int, experts: int, slots: int, x_slots: bool) -> str:
    """What a person reads instead of the vector code."""
    x = "x[row, slot]" if x_slots else "x[row]"
    product = f"dot({x}, w[e, i])"
    if shape.gated:
        product = f"{shape.gated}({product}) * dot({x}, w_up[e, i])"
    loop = f"slot, block = divmod(unit, {linear.units(n)})\n    for row, e in [(0, ids[0, slot])]:\n"
    if not shape.single:
        loop = (
            f"stretch, rest = divmod(unit, {_stretch(n)})\n"
            f"    group, e = divmod(stretch, {experts})\n"
            f"    block = group * {_stretch(n)} + rest\n"
            "    for row, slot in the pairs with ids[row, slot] == e:\n"
        )
    return (
        f"# x {shape.act}[rows, {f'{slots}, ' * x_slots}{shape.k}], ids [rows, {slots}], "
        f"w {shape.dtype} packed [experts, {n}, {shape.k}]\n"
        f"for unit in range(begin, end):\n    {loop}"
        f"        for i in range(16 * block, min(16 * block + 16, {n})):  # 16 lanes\n"
        f"            out[row, slot, i] = {product}\n"
    )
