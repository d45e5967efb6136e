"""Kernel selection for calls of many rows: products by tiles, experts whose rows are sorted, attention of prompts.

A function returns no launches if its kernels do not serve, as where shared memory is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from rlx.backends.cuda.code import I8, I64, THREADS, Code, Value
from rlx.backends.cuda.kernels import attention_prompt as prompts
from rlx.backends.cuda.kernels import groups, row_parts
from rlx.backends.cuda.kernels import matrix_large as larges
from rlx.backends.cuda.kernels.attention import Attention
from rlx.backends.cuda.kernels.cache import Cache
from rlx.backends.cuda.kernels.cards import Part
from rlx.backends.cuda.kernels.large_shape import Shape, ShapeRange, shape_of_experts, shapes_of, stages_of
from rlx.backends.cuda.kernels.matrix_large import Rows
from rlx.backends.cuda.kernels.row_parts import Parts
from rlx.backends.cuda.launches import ANY, SCRATCH, Arg, Blocks, Body, Context, Launch
from rlx.backends.cuda.layouts import ROWS, Form, form_of
from rlx.backends.sizes import extent, rows, static
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import BF16
from rlx.ir.node import Node
from rlx.ir.segments import is_segmented

_BESIDE = 16  # blocks of rows that are computed side by side


def linear(n: Node, c: Context, weight: Node, args: Mapping[str, Arg]) -> list[Launch]:
    """A linear layer.

    Where tensor cores do not multiply bf16 none: the kernel of few rows computes as many at a time, over codes as they
    lie.
    """
    if not c.features.bf16:
        return []
    part = c.part(static(weight, 0))
    return _products(n, c, args, weight, _RowBlocks(n.shape[0], part, 1), max(part.count, c.outputs))


def heads(n: Node, c: Context, weight: Node, args: Mapping[str, Arg]) -> list[Launch]:
    """Of x [rows, heads, k] each head has its own matrix."""
    part, number = c.part(static(weight, 1)), static(n.inputs[0], 1)
    return _products(n, c, args, weight, _RowBlocks(n.shape[0], part, number), part.count * number)


@dataclass(frozen=True)
class _RowBlocks:
    """The rows of blocks of a linear layer, or of some that have a matrix of x each, side by side.

    Attributes:
        count: rows of x.
        part: what a card has of the outputs.
        number: of matrices.
    """

    count: DimLike
    part: Part
    number: int

    def sizes(self, n: Node, c: Context, form: Form, parts: int, outputs: int) -> list[ShapeRange]:
        """The shapes of its blocks."""
        given = form, dims.bounds(self.count, c.bounds), outputs, parts
        return shapes_of(*given, c.features.together, _split(n, c), c.features.shared)

    def blocks(self, size: ShapeRange) -> Blocks:
        """How many there are, without those for tiles of the weights."""
        return Blocks(self.count, size.shape.rows, self.number, least=size.least, most=size.most)

    def __call__(self, k: Code, block: Value, own: int) -> Rows:
        """The `own` rows of a block."""
        number, part = self.number, self.part
        first, some = block // number * own, k.number(k.dim(self.count))
        return Rows(
            row=lambda i: k.smaller(first + i, some - 1) * number + block % number,
            valid=lambda i: first + i < some,
            start=lambda i: part.place(k, ((first + i) * number + block % number) * part.whole),
            matrix=block % number if number > 1 else None,
        )


@dataclass(frozen=True)
class _ExpertBlocks:
    """The rows of blocks of experts.

    Attributes:
        units: pairs of a row and an expert.
        count: of experts.
        part: what a card has of the outputs.
        slots: experts of a row.
        own_rows: whether each pair has a row of its own.
    """

    units: DimLike
    count: int
    part: Part
    slots: int
    own_rows: bool

    def sizes(self, n: Node, c: Context, form: Form, parts: int, outputs: int) -> list[ShapeRange]:
        """The shape of its blocks."""
        few = c.most(self.units) <= 32 * self.count
        shape = shape_of_experts(form, few, c.features.together, _split(n, c), c.features.shared)
        return [ShapeRange(0, ANY, shape)]

    def blocks(self, size: ShapeRange) -> Blocks:
        """How many there are, without those for tiles of the weights."""
        return Blocks(self.units + self.count * size.shape.rows, size.shape.rows)

    def __call__(self, k: Code, block: Value, own: int) -> Rows:
        """The `own` rows of a block."""
        k.wait()  # the groups come from the kernel before
        table, count, part = k.pointers["scratch"], self.count, self.part
        found = groups.find(k, table, count, own, block)

        def unit(i: Value) -> Value:
            return groups.unit(k, table, count, k.smaller(found.start + i, found.end - 1))

        return Rows(
            row=lambda i: unit(i) if self.own_rows else unit(i) // self.slots,
            valid=lambda i: found.start + i < found.end,
            start=lambda i: part.place(k, unit(i) * part.whole),
            matrix=found.expert,
            some=found.start < found.end,
        )


def experts(n: Node, c: Context, weight: Node, args: Mapping[str, Arg]) -> list[Launch]:
    """Rows that each go to some experts: those of one are computed together."""
    x, ids = n.inputs[:2]
    units, count = extent(ids.shape, ids), static(weight, 0)
    row_blocks = _ExpertBlocks(units, count, c.part(static(weight, 1)), static(ids, 1), len(x.shape) == 3)
    before = -(-4 * (c.most(units) + count + 1) // 256) * 256  # bytes of the groups, in front of the rows
    given = {name: arg for name, arg in args.items() if name != "ids"}
    launches = _products(n, c, given, weight, row_blocks, 0, before)
    if not launches:
        return []

    def group(k: Code) -> None:
        groups.group(k, k.dim(units), count)

    pointers: dict[str, Arg] = {"ids": ids, "groups": SCRATCH}
    first = c.launch(n, "group", pointers, Blocks(count + 1), group, launches[0].scratch)
    return [first, *launches]


def _split(n: Node, c: Context) -> int:
    """The parts of x."""
    return 1 if n.inputs[0].dtype is BF16 else 3 if c.exact else 2


@dataclass(frozen=True)
class _Multiply(Body):
    """The body of a kernel of products.

    Attributes:
        form: of the weights.
        x: how x lies in memory.
        shape: how the work is shared.
        stages: chunks in shared memory.
        gated, out: as of `Large`.
        row_blocks: gives the rows of a block.
        blocks: without those for tiles of the weights.
        weights, biases: names of their pointers.
        before: bytes in front of the parts of x that another kernel stored; None if x is taken as it is.
    """

    form: Form
    x: Parts
    shape: Shape
    stages: int
    gated: str | None
    out: str
    row_blocks: _RowBlocks | _ExpertBlocks
    blocks: Blocks
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    before: int | None

    @property
    def tiles(self) -> int:
        """Blocks with the same rows."""
        return -(-self.row_blocks.part.count // (ROWS * self.shape.tiles(len(self.weights))))

    def __call__(self, k: Code) -> None:
        block, tile = _of_tile(k, self.blocks, self.tiles)
        some, of, part = self.row_blocks(k, block, self.shape.rows), k.pointers, self.row_blocks.part
        weights = [of[name] for name in self.weights]
        if some.matrix is not None:
            start = some.matrix.to(I64) * self.form.places(part.count, self.x.width)[2]
            weights = [k.at(each, I8, start) for each in weights]
        at = larges.Operands(
            weights=weights,
            x=of["x"] if self.before is None else k.at(of["scratch"], I8, self.before),
            rows=some,
            out=of["out"],
            tile=tile * self.shape.tiles(len(weights)),
            bias=[part.numbers(k, of[name]) for name in self.biases],
            residual=of.get("residual"),
            aligned=part.whole % 4 == 0,
        )
        with k.when(some.some) if some.some else nullcontext():
            large = larges.Large(k, self.form, part.count, self.x, self.shape, self.stages, self.gated, self.out)
            large.emit(at)


def _products(
    n: Node, c: Context, args: Mapping[str, Arg], weight: Node, row_blocks: _RowBlocks | _ExpertBlocks, outputs: int,
    before: int = 0,
) -> list[Launch]:  # fmt: skip
    """The kernel that stores parts of the rows of x, if these are not taken as they are, and those of the products.

    Args:
        args: the pointers of the products; "x" is the rows of x.
        outputs: of the layer, and of those that are computed beside it.
        before: bytes in front of the stored parts.
    """
    x, form, width, count = n.inputs[0], form_of(weight.dtype), static(weight, -1), _split(n, c)
    gated, out = dict(n.attrs).get("gated"), dict(n.attrs).get("out", "f32")
    taken = row_parts.as_they_are(width) if count == 1 else None
    parts = taken or row_parts.parts_of(width, count)
    weights, biases = (tuple(name for name in args if name[0] == kind) for kind in "wb")
    sizes = row_blocks.sizes(n, c, form, len(weights), outputs)
    stages = [stages_of(form, size.shape, c.features.shared, count) for size in sizes]
    if not all(stages) or c.own:
        return []
    x_rows = rows(x)
    scratch = before if taken else extent([x_rows, parts.nbytes], n) + before
    given = args if taken else {name: arg for name, arg in args.items() if name != "x"}
    given = {**given, "scratch": SCRATCH} if before or not taken else given
    launches = list[Launch]()
    if not taken:
        items = Blocks(extent([x_rows, parts.padded // row_parts.SPLIT], n), THREADS)

        def write(k: Code) -> None:
            row_parts.write_parts(k, parts, k.dim(x_rows), before)

        launches.append(c.launch(n, "parts", {"x": x, "parts": SCRATCH}, items, write, scratch))
    for size, chunks in zip(sizes, stages, strict=True):
        blocks = row_blocks.blocks(size)
        body = _Multiply(
            form, parts, size.shape, chunks, gated, out, row_blocks, blocks, weights, biases, None if taken else before
        )
        blocks = replace(blocks, times=blocks.times * body.tiles)
        launches.append(c.launch(n, n.op, given, blocks, body, scratch, split=row_blocks.part.split))
    return launches


def _of_tile(k: Code, blocks: Blocks, tiles: int) -> tuple[Value, Value]:
    """The number of a block without those for tiles of the weights, and that of its tiles.

    Blocks that run at a time have the same few tiles, for up to `_BESIDE` blocks of rows: so weights are read from
    memory about once.
    """
    every = (k.number(k.dim(blocks.count)) + (blocks.per - 1)) // blocks.per * blocks.times
    first = k.block // (tiles * _BESIDE) * _BESIDE
    rest, some = k.block - first * tiles, k.smaller(every - first, _BESIDE)
    return first + rest % some, rest // some


def attention(
    n: Node, c: Context, a: Attention, args: Mapping[str, Arg], columns: int, count: DimLike,
    caches_of: Callable[[Code], tuple[Cache, Cache]],
) -> list[Launch]:  # fmt: skip
    """Attention of prompts; sequences of one row in a call are left to another kernel.

    Args:
        columns, count: of the table of segments.
    """
    q, keys, values = n.inputs[:3]
    tiles = prompts.tiles_of(a, keys.dtype, values.dtype, c.features.shared, exact=c.exact)
    if tiles is None or c.own:
        return []
    size, some = prompts.rows_of(a), q.shape[0]
    if is_segmented(n):  # each sequence may begin a block
        some = some + count * size

    def body(k: Code) -> None:
        segment, first = prompts.find_rows(k, a, k.pointers.get("segments"), columns, count)
        prompts.prompt_attention(k, a, tiles, *caches_of(k), segment, first)

    return [c.launch(n, n.op, args, Blocks(some, size, prompts.parts_of(a)), body, split=a.cards > 1)]
