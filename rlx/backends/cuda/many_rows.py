"""Kernel selection for calls of many rows: products by tiles, experts whose rows are sorted, attention of prompts.

A function returns no launches if its kernels do not serve, as where shared memory is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

from rlx.backends.cuda.code import I8, I64, THREADS, Code, Value
from rlx.backends.cuda.kernels import attention_prompt as prompts
from rlx.backends.cuda.kernels import groups, row_parts
from rlx.backends.cuda.kernels import matrix_large as larges
from rlx.backends.cuda.kernels.attention import Attention
from rlx.backends.cuda.kernels.cache import Cache
from rlx.backends.cuda.kernels.large_shape import Shape, shape_of, shape_of_experts, stages_of
from rlx.backends.cuda.kernels.matrix_large import Rows
from rlx.backends.cuda.launches import SCRATCH, Arg, Blocks, Context, Launch
from rlx.backends.cuda.layouts import ROWS, form_of
from rlx.backends.sizes import extent, rows, static
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
    part, count = c.part(static(weight, 0)), n.shape[0]
    shape = _shape(n, c, weight, count, max(part.count, c.outputs), _parts(args))

    def place(k: Code, block: Value) -> Rows:
        first, some = block * shape.rows, k.number(k.dim(count))
        return Rows(
            row=lambda i: k.smaller(first + i, some - 1),
            valid=lambda i: first + i < some,
            start=lambda i: part.place(k, (first + i) * part.whole),
        )

    return _products(n, c, args, weight, shape, count, Blocks(count, shape.rows), place)


def heads(n: Node, c: Context, weight: Node, args: Mapping[str, Arg]) -> list[Launch]:
    """Of x [rows, heads, k] each head has its own matrix."""
    x = n.inputs[0]
    count, part, number = x.shape[0], c.part(static(weight, 1)), static(x, 1)
    shape = _shape(n, c, weight, count, part.count * number, 1)

    def place(k: Code, block: Value) -> Rows:
        first, head, some = block // number * shape.rows, block % number, k.number(k.dim(count))
        return Rows(
            row=lambda i: k.smaller(first + i, some - 1) * number + head,
            valid=lambda i: first + i < some,
            start=lambda i: part.place(k, ((first + i) * number + head) * part.whole),
            matrix=head,
        )

    return _products(n, c, args, weight, shape, rows(x), Blocks(count, shape.rows, number), place)


def experts(n: Node, c: Context, weight: Node, args: Mapping[str, Arg]) -> list[Launch]:
    """Rows that each go to some experts: those of one are computed together."""
    x, ids = n.inputs[:2]
    slots, own_rows, units = static(ids, 1), len(x.shape) == 3, extent(ids.shape, ids)
    count, part = static(weight, 0), c.part(static(weight, 1))
    shape = shape_of_experts(c.most(units), count, _parts(args), c.features.together)
    before = -(-4 * (c.most(units) + count + 1) // 256) * 256  # bytes of the groups, in front of the rows

    def place(k: Code, block: Value) -> Rows:
        k.wait()  # the groups come from the kernel before
        table = k.pointers["scratch"]
        found = groups.find(k, table, count, shape.rows, block)

        def unit(i: Value) -> Value:
            return groups.unit(k, table, count, k.smaller(found.start + i, found.end - 1))

        return Rows(
            row=lambda i: unit(i) if own_rows else unit(i) // slots,
            valid=lambda i: found.start + i < found.end,
            start=lambda i: part.place(k, unit(i) * part.whole),
            matrix=found.expert,
            some=found.start < found.end,
        )

    given = {name: arg for name, arg in args.items() if name != "ids"}
    blocks = Blocks(units + count * shape.rows, shape.rows)
    launches = _products(n, c, given, weight, shape, units if own_rows else x.shape[0], blocks, place, before)
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


def _shape(n: Node, c: Context, weight: Node, count: DimLike, outputs: int, parts: int) -> Shape:
    form = form_of(weight.dtype)
    return shape_of(form, c.most(count), outputs, parts, c.features.together, _split(n, c), c.features.shared)


def _parts(args: Mapping[str, Arg]) -> int:
    """Weights of a layer: 2 if it is gated."""
    return len([name for name in args if name[0] == "w"])


def _products(
    n: Node, c: Context, args: Mapping[str, Arg], weight: Node, shape: Shape, x_rows: DimLike, blocks: Blocks,
    place: Callable[[Code, Value], Rows], before: int = 0,
) -> list[Launch]:  # fmt: skip
    """The kernel that stores parts of the rows of x, if these are not taken as they are, and that of the products.

    Args:
        args: the pointers of the products; "x" is the rows of x.
        x_rows: number of these.
        blocks: without those for tiles of the weights.
        place: number among them -> the rows of a block.
        before: bytes in front of the stored parts.
    """
    attrs, form = dict(n.attrs), form_of(weight.dtype)
    gated, out, parts = attrs.get("gated"), attrs.get("out", "f32"), _parts(args)
    part, width = c.part(static(weight, -2)), static(weight, -1)
    count, each = _split(n, c), shape.tiles(parts)
    taken = row_parts.as_they_are(width) if count == 1 else None
    split = taken or row_parts.parts_of(width, count)
    stages = stages_of(form, shape, c.features.shared, count)
    if not stages or c.own:
        return []
    tiles = -(-part.count // (ROWS * each))

    def write(k: Code) -> None:
        row_parts.write_parts(k, split, k.dim(x_rows), before)

    def body(k: Code) -> None:
        block, tile = _of_tile(k, blocks, tiles)
        some, of = place(k, block), k.pointers
        weights = [of[name] for name in args if name[0] == "w"]
        if some.matrix is not None:
            start = some.matrix.to(I64) * form.places(part.count, width)[2]
            weights = [k.at(each, I8, start) for each in weights]
        at = larges.Operands(
            weights=weights,
            x=of["x"] if taken else k.at(of["scratch"], I8, before),
            rows=some,
            out=of["out"],
            tile=tile * each,
            bias=[part.numbers(k, of[name]) for name in args if name[0] == "b"],
            residual=of.get("residual"),
            aligned=part.whole % 4 == 0,
        )
        with k.when(some.some) if some.some else nullcontext():
            larges.Large(k, form, part.count, split, shape, stages, gated, out).emit(at)

    scratch = before if taken else extent([x_rows, split.nbytes], n) + before
    given = args if taken else {name: arg for name, arg in args.items() if name != "x"}
    given = {**given, "scratch": SCRATCH} if before or not taken else given
    products = c.launch(
        n, n.op, given, replace(blocks, times=blocks.times * tiles), body, scratch, split=part.split
    )  # fmt: skip
    if taken:
        return [products]
    items = Blocks(extent([x_rows, split.padded // row_parts.SPLIT], n), THREADS)
    return [c.launch(n, "parts", {"x": n.inputs[0], "parts": SCRATCH}, items, write, scratch), products]


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
