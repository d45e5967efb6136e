"""How products of many rows are shared among blocks and warps (`matrix_large.py`)."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    lines: int
    columns: int
    each: int = 2
    together: bool = False

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


#: How long a chunk takes with so many columns, in products of eight columns: besides the products there is what a
#: block does for each chunk, and few columns do not hide it. Measured on an H100.
_CHUNK_TIME = {32: 32.0, 16: 21.5, 8: 15.5, 4: 14.0}


def shape_of(form: Form, rows: int, n: int, parts: int, together: bool, count: int, shared: int) -> Shape:
    """The shape for calls of up to so many rows.

    Args:
        n: outputs of the layer, and of those that are computed beside it.
        parts: 2 if the layer is gated.
        together: whether the card lets four warps multiply together.
        count: of parts of x.
        shared: bytes of shared memory that a block can have.
    """
    if not together:
        shapes = [Shape(4, 4), Shape(2, 2)]
        return next((s for s in shapes if _blocks(s, rows, n, parts) >= TYPICAL_MULTIPROCESSORS), shapes[-1])
    shapes = [Shape(8, columns, 1, True) for columns in _CHUNK_TIME]
    fit = [shape for shape in shapes if stages_of(form, shape, shared, count)] or shapes[-1:]
    return min(fit, key=lambda s: -(-_blocks(s, rows, n, parts) // TYPICAL_MULTIPROCESSORS) * _CHUNK_TIME[s.columns])


def _blocks(shape: Shape, rows: int, n: int, parts: int) -> int:
    return -(-n // (shape.tiles(parts) * ROWS)) * -(-rows // shape.rows)


def shape_of_experts(units: int, experts: int, parts: int, together: bool) -> Shape:
    """The shape for calls of up to so many pairs of a row and an expert."""
    few = units <= 32 * experts
    if together:
        return Shape(8, 4 if few else 8, 1, True)
    return Shape(4, 2) if few else Shape(4, 4)


def stages_of(form: Form, shape: Shape, shared: int, count: int) -> int:
    """How many chunks of x and the weights a block has in shared memory; 0 if it has not the room.

    Two blocks of a multiprocessor hide more than further chunks of one, if each has enough.

    Args:
        shared: bytes of shared memory that a block can have.
        count: of parts of x.
    """
    nbytes = shape.rows * count * LINE + WARPS * shape.each * code_bytes(form)
    least, good, most = (3, 5, 6) if shape.together else (2, 2, 3)
    half, whole = ((room - ATOM) // nbytes for room in (shared // 2 - RESERVED, shared))
    found = half if half >= good else whole
    return min(found, most) if found >= least else 0


def code_bytes(form: Form) -> int:
    """Bytes of a chunk of a tile, without scales."""
    return CHUNK // form.unit * form.code_bytes
