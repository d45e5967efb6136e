"""How products of many rows are shared among blocks and warps (`matrix_large.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from rlx.backends.cuda.code import RESERVED, TYPICAL_MULTIPROCESSORS, WARPS
from rlx.backends.cuda.kernels.row_parts import CHUNK
from rlx.backends.cuda.layouts import ROWS, Form

LINE = 2 * CHUNK  # bytes of a row of a chunk
ATOM = 8 * LINE  # bytes of eight rows of a chunk


@dataclass(frozen=True)
class Shape:
    """How the work is shared.

    Attributes:
        lines: of warps; each has other weights.
        columns: of eight rows of x that a warp has.
        each: tiles of the weights that a warp has.
        together: whether four warps multiply together.
        resident: how many blocks a multiprocessor has at a time, and not more: else it could get two while another one
            has none, because blocks come while those of the kernel before still run.
    """

    lines: int
    columns: int
    each: int = 2
    together: bool = False
    resident: int = 1

    @property
    def rows(self) -> int:
        """Rows of x of a block."""
        return WARPS // self.lines * self.columns * 8

    @property
    def lag(self) -> int:
        """Chunks right before the newest one whose products may not be done when it is there."""
        return int(self.together)

    def tiles(self, parts: int) -> int:
        """Tiles of a weight in a block, of which a layer has one, or two if it is gated."""
        return self.lines * self.each // parts


#: How long the blocks of a multiprocessor take, measured on an H200 over Q4_K and BF16; of warps that multiply alone an
#: estimate. An eighth of the columns takes half the time: the work on the weights is the same.
_TOGETHER = {
    Shape(8, columns, 1, True, resident): time
    for resident, times in ((1, (32.0, 31.3, 28.3, 26.0, 23.2, 21.6, 19.2, 17.6)), (2, (42.6, 39.4, 33.7, 28.5)))
    for columns, time in zip(range(32 // resident, 0, -4), times, strict=True)
}
_ALONE = {Shape(4, 4, resident=2): 8.0, Shape(2, 2, resident=2): 5.0, Shape(4, 4): 8.0, Shape(2, 2): 5.0}

#: Rows from one number to the next that may have another shape, and what the same one may cost more.
_STEP, _LITTLE = 64, 1.05


@dataclass(frozen=True)
class ShapeRange:
    """A shape, and the smallest and largest number of rows of the calls that it is for."""

    least: int
    most: int
    shape: Shape


def shapes_of(
    form: Form, rows: tuple[int, int], n: int, parts: int, together: bool, count: int, shared: int
) -> list[ShapeRange]:
    """Shapes for calls of some rows, those of many first.

    Multiprocessors compute blocks in waves: a shape is good if the last wave is nearly full, and few of its rows are
    not there.

    Args:
        rows: the smallest and largest number of a call.
        n: outputs of the layer, and of those that are computed beside it.
        parts: 2 if the layer is gated.
        together: whether the card lets four warps multiply together.
        count: of parts of x.
        shared: bytes of shared memory that a block can have.
    """
    times = _TOGETHER if together else _ALONE
    fit = [shape for shape in times if stages_of(form, shape, shared, count)] or [*times][-1:]

    def time(shape: Shape, rows: int) -> float:
        blocks = -(-n // (shape.tiles(parts) * ROWS)) * -(-rows // shape.rows)
        return -(-blocks // (TYPICAL_MULTIPROCESSORS * shape.resident)) * times[shape]

    found = dict[int, Shape]()
    last: Shape | None = None
    for most in (rows[1], *range((rows[1] - 1) // _STEP * _STEP, rows[0] - 1, -_STEP)):
        best = min((time(shape, most), i, shape) for i, shape in enumerate(fit))
        if last is None or time(last, most) > _LITTLE * best[0]:
            found[most] = last = best[-1]
    ends = [*found, 0]
    return [ShapeRange(below + 1, most, found[most]) for most, below in pairwise(ends)]


def shape_of_experts(form: Form, few: bool, together: bool, count: int, shared: int) -> Shape:
    """The shape for experts; `few` if each has few rows on average. The rest as for `shapes_of`."""
    columns = 4 if few else 8
    shape = Shape(8, columns, 1, True, 2) if together else Shape(4, columns // 2, resident=2)
    return shape if stages_of(form, shape, shared, count) else replace(shape, resident=1)


def stages_of(form: Form, shape: Shape, shared: int, count: int) -> int:
    """How many chunks of x and the weights a block has in shared memory; 0 if it has not the room.

    Two blocks of a multiprocessor hide more than further chunks of one, if each has enough.

    Args:
        shared: bytes of shared memory that a block can have.
        count: of parts of x.
    """
    nbytes = shape.rows * count * LINE + WARPS * shape.each * code_bytes(form)
    least, most = (2 * shape.resident + 1, 6) if shape.together else (2, 3)
    found = (most_bytes(shape, shared) - ATOM) // nbytes
    return min(found, most) if found >= least else 0


def most_bytes(shape: Shape, shared: int, more: int = 0) -> int:
    """Bytes of shared memory of a block if a multiprocessor has `more` blocks than it shall have at a time."""
    return (shared + RESERVED) // (shape.resident + more) - RESERVED


def code_bytes(form: Form) -> int:
    """Bytes of a chunk of a tile, without scales."""
    return CHUNK // form.unit * form.code_bytes
