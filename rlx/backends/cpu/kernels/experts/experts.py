"""Linear layers of experts: out[row, slot] = x[row] or x[row, slot] times packed W[ids[row, slot]] transposed.

`rows.py` defines the units and finds the rows of an expert. With one row, W is streamed as in a linear with one
row. With more rows, W is unpacked once for all rows of a macro tile. The arithmetic is that of `linear.py`, or of
`linear/tiles.py` with tiles. So results have the bits of a linear of the expert alone, whatever rows share a tile.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.isa.amx import DEPTH
from rlx.backends.cpu.kernel import Kernel, once
from rlx.backends.cpu.kernels.experts.rows import Experts, ExpertTiles, ExpertWriter
from rlx.backends.cpu.kernels.linear import linear
from rlx.backends.cpu.kernels.linear import tiles as linear_tiles
from rlx.backends.cpu.kernels.linear.multiply import Rows, Shape
from rlx.backends.cpu.layouts import BLOCK_ROWS, packed_bytes
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import POINTER, Emitter
from rlx.errors import CompileError
from rlx.ir.dtypes import DType


def units(dtype: DType, n: int, k: int, *, experts: int, slots: int, single: bool = False) -> int:
    """Number of work units of `expert_linear` with the same options."""
    return Experts(experts, n, slots, packed_bytes(dtype, BLOCK_ROWS, k)).units(single=single)


@once
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
    tiles: bool = False,
    single: bool = False,
    each: bool = False,
) -> Kernel:
    """A kernel for out = x We^T, or gate(x We^T) * (x Ue^T) if gated, where e is the expert of each row and slot.

    Buffers: `x` (q8a, f32 or bf16 rows, [rows, k], or [rows, slots, k] with `x_slots`), `ids` i32[rows, slots], `w`
    (one packed matrix [n, k] per expert, concatenated), `w_up` if gated, `out` f32[rows, slots, n], which must not
    overlap the others. The kernel does not check the ids; the caller must. Extents: `rows` unless `single`. Units: see
    `units`.

    Args:
        dtype, act, gated: as for `linear.linear`.
        tiles: multiply bf16 activations on tile registers; else by dot products, which take bf16 weights only.
        single: there is exactly one row, as in decode.
        each: slot i is always of expert i, as the heads of a linear are; there is no buffer `ids`.

    Raises:
        CompileError: an option is out of its range.
        ShapeError: k does not fit the type's blocks.
    """
    if tiles and not (linear_tiles.fits(act, k, target) and k % DEPTH == 0):
        raise CompileError(f"no tiles multiply {act} activations, {k} wide", where=f"target {target.level}")
    linear.check(dtype, k, act, gated, target, tiles)
    ragged, signed = n % BLOCK_ROWS > 0, target.isa.signed_codes
    shape = Shape(dtype, k, act, False, False, gated, ragged=ragged, single=single, signed=signed)
    e = Emitter(target, ["x", *["ids"] * (not each), *shape.weights, "out"], [] if single else ["rows"])
    used = Experts(experts, n, slots, shape.block_bytes, x_slots, each)
    (ExpertTiles if tiles else _ExpertVectors)(e, shape, used).write()
    return e.finish(f"experts_{dtype}_{act}", _outline(shape, used))


class _ExpertVectors(ExpertWriter, linear.LinearWriter):
    """Generates a linear kernel of experts in vector code."""

    def __init__(self, e: Emitter, shape: Shape, experts: Experts) -> None:
        super().__init__(e, shape)
        self.take(experts, self.macro_rows)
        self.places = e.stack(8 * self.most)  # the address of each row's activations

    def write(self) -> None:
        self.write_starts()
        self.write_units()

    def multiply_pairs(self, count: ir.Value, first: ir.Value, last: ir.Value) -> None:
        e, zero = self.e, self.e.i64(0)
        with e.loop(0, count) as r:
            x = self.activations_of(r.i)
            e.store(x, e.at(self.places, (r.i, 8)), 8)
            self._prepare_row(x, r.i)
        if not self.shape.single:
            self._macro_tile(zero, count, first, last)
            return
        self.stream_units(self._rows(zero, zero, 1), first, last)

    def _rows(self, macro: ir.Value, row: ir.Value, count: int) -> Rows:
        e = self.e
        x = [e.load(POINTER, e.at(self.places, (row, 8), 8 * i), 8) for i in range(count)]
        return Rows(x, self._prepared(row))


def _outline(shape: Shape, experts: Experts) -> str:
    """The readable outline of the kernel."""
    n, slots, stretch = experts.n, experts.slots, experts.stretch
    product = f"dot({'x[row, slot]' if experts.x_slots else 'x[row]'}, w[e, i])"
    if shape.gated:
        product = f"{shape.gated}({product}) * {product.replace('w[', 'w_up[')}"
    chosen = "slot" if experts.each else "ids[row, slot]"
    loop = f"slot, block = divmod(unit, {experts.blocks})\n    for row, e in [(0, {chosen.replace('row', '0')})]:\n"
    if not shape.single:
        loop = (
            f"stretch, rest = divmod(unit, {stretch})\n"
            f"    group, e = divmod(stretch, {experts.count})\n"
            f"    block = group * {stretch} + rest\n"
            f"    for row, slot in the pairs with {chosen} == e:\n"
        )
    return (
        f"# x {shape.act}[rows, {f'{slots}, ' * experts.x_slots}{shape.k}], "
        f"{'' if experts.each else f'ids [rows, {slots}], '}w {shape.dtype} packed [experts, {n}, {shape.k}]\n"
        f"for unit in range(begin, end):\n    {loop}"
        f"        for i in range(16 * block, min(16 * block + 16, {n})):  # 16 lanes\n"
        f"            out[row, slot, i] = {product}\n"
    )
