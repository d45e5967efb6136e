"""Kernel selection: the launches of each node, by a table from op to the function that builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from rlx.backends.cuda import many_rows
from rlx.backends.cuda.agreed.steps import EACH, MANY_ROWS, SPLITS
from rlx.backends.cuda.code import I8, I32, I64, THREADS, WARPS, Code, Value
from rlx.backends.cuda.kernels import cache as caches
from rlx.backends.cuda.kernels import linear as linears
from rlx.backends.cuda.kernels import row_attention as row_attentions
from rlx.backends.cuda.kernels import row_chunks, states
from rlx.backends.cuda.kernels import rows as row_kernels
from rlx.backends.cuda.kernels.attention import Attention
from rlx.backends.cuda.kernels.cache import Cache, Rope, Segment
from rlx.backends.cuda.kernels.cards import Part
from rlx.backends.cuda.kernels.linear import Linear, Operands
from rlx.backends.cuda.kernels.matrix import Matrix
from rlx.backends.cuda.kernels.row_linear import FEW, RowLinear, fits, row_shape
from rlx.backends.cuda.kernels.rows import Normed
from rlx.backends.cuda.launches import COUNTERS, PER_RANGE, RESULT, SCRATCH, Arg, Blocks, Context, Launch
from rlx.backends.cuda.layouts import ROWS, Form, form_of, own_heads
from rlx.backends.sizes import extent, rows, static
from rlx.errors import CompileError, CustomOpError
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import BF16
from rlx.ir.meaning import component
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.segments import is_segmented
from rlx.passes.program import maker, root


def elements(node: Node) -> DimLike:
    """Number of elements."""
    return extent(node.shape, node)


def _plain(n: Node, c: Context, blocks: Blocks, body: Callable[[Code], None]) -> list[Launch]:
    """A launch over the operands in order, then the result."""
    return _named(n, c, [*(f"a{i}" for i in range(len(n.inputs))), "out"], blocks, body)


def _named(n: Node, c: Context, names: Sequence[str], blocks: Blocks, body: Callable[[Code], None], *,
           split: bool = False) -> list[Launch]:  # fmt: skip
    """The same, with names."""
    return [c.launch(n, n.op, dict(zip(names, (*n.inputs, RESULT), strict=False)), blocks, body, split=split)]


def _threads(n: Node, c: Context, count: DimLike, body: Callable[[Code], None]) -> list[Launch]:
    """A thread for each of `count` elements."""
    return _plain(n, c, Blocks(count, THREADS), body)


# -- rows and elements -------------------------------------------------------------------------------------------------


def _elementwise(n: Node, c: Context) -> list[Launch]:
    full = n.shape
    kind = {full[-1:]: "row", (*full[:-1], 1): "column", (1,): "scalar", full: "full"}
    kinds = [kind[i.shape] for i in n.inputs]
    expr, out = _expression(n), dict(n.attrs).get("out", "f32")
    count = elements(n)
    return _threads(
        n, c, count, lambda k: row_kernels.elementwise(k, expr, kinds, k.dim(count), k.dim(full[-1]), out)
    )  # fmt: skip


def _expression(n: Node) -> object:
    """The expression of an elementwise op, also of a single one."""
    if n.op == "elementwise":
        return n["expr"]
    return (n.op, *range(len(n.inputs)), *(value for _, value in n.attrs))


def _rms_norm(n: Node, c: Context) -> list[Launch]:
    _refuse_q8a(n, n["out"])
    return _plain(n, c, Blocks(rows(n)), lambda k: row_kernels.rms_norm(k, k.dim(n.shape[-1]), n["eps"], n["out"]))


def _layer_norm(n: Node, c: Context) -> list[Launch]:
    _refuse_q8a(n, n["out"])
    weights = len(n.inputs) - 1
    return _plain(
        n, c, Blocks(rows(n)), lambda k: row_kernels.layer_norm(k, k.dim(n.shape[-1]), n["eps"], weights, n["out"])
    )  # fmt: skip


def _refuse_q8a(n: Node, out: str) -> None:
    if out == "q8a":
        raise CompileError("this device has no int8 activations", where=repr(n))


def _softmax(n: Node, c: Context) -> list[Launch]:
    return _plain(n, c, Blocks(rows(n)), lambda k: row_kernels.softmax(k, k.dim(n.shape[-1])))


def _reduce(n: Node, c: Context) -> list[Launch]:
    x, mean = n.inputs[0], n.op == "reduce_mean"
    if n["axis"] == -1:
        return _plain(n, c, Blocks(rows(n)), lambda k: row_kernels.row_reduce(k, k.dim(x.shape[-1]), mean))
    count = elements(n)
    return _threads(
        n, c, count, lambda k: row_kernels.column_reduce(k, k.dim(count), k.dim(x.shape[1]), k.dim(x.shape[2]), mean)
    )  # fmt: skip


def _largest(n: Node, c: Context) -> list[Launch]:
    x = n.inputs[0]
    return _plain(
        n, c, Blocks(rows(x)), lambda k: row_kernels.index_of_largest(k, k.dim(x.shape[-1]), n.op == "pick")
    )  # fmt: skip


def _top_k(n: Node, c: Context) -> list[Launch]:
    x = n.inputs[0]
    return _plain(n, c, Blocks(rows(x)), lambda k: row_kernels.top_k(k, static(x, -1), n["k"], n["groups"], n["kept"]))


def _overlay_rows(n: Node, c: Context) -> list[Launch]:
    count = elements(n)
    return _threads(n, c, count, lambda k: row_kernels.overlay_rows(k, k.dim(count), k.dim(n.shape[-1])))


def _take(n: Node, c: Context) -> list[Launch]:
    x, count = n.inputs[0], elements(n)
    shared = len(x.shape) == 1
    return _threads(
        n, c, count, lambda k: row_kernels.take(k, k.dim(count), k.dim(n.shape[-1]), k.dim(x.shape[-1]), shared)
    )  # fmt: skip


def _relabel(n: Node, c: Context) -> list[Launch]:
    count = elements(n)
    return _threads(n, c, count, lambda k: row_kernels.relabel(k, k.dim(count)))


def _row_bytes(n: Node) -> int:
    nbytes = n.dtype.size(tuple(static(n, axis) for axis in range(1, len(n.shape))) or (1,))
    if nbytes % 4:
        raise CompileError(f"rows of {nbytes} bytes are not whole words", where=repr(n))
    return nbytes


def _take_rows(n: Node, c: Context) -> list[Launch]:
    nbytes = _row_bytes(n)
    count = extent([n.shape[0], nbytes // 4], n)
    return _threads(n, c, count, lambda k: row_kernels.take_rows(k, k.dim(count), nbytes))


def _last_row(n: Node, c: Context) -> list[Launch]:
    nbytes, x = _row_bytes(n), n.inputs[0]
    return _threads(n, c, nbytes // 4, lambda k: row_kernels.last_row(k, k.dim(x.shape[0]), nbytes))


def _mix(n: Node, c: Context) -> list[Launch]:
    values, count = n.inputs[0], elements(n)
    return _threads(
        n, c, count,
        lambda k: row_kernels.mix(k, k.dim(count), k.dim(n.shape[1]), k.dim(values.shape[1]), k.dim(n.shape[2])),
    )  # fmt: skip


def _slice(n: Node, c: Context) -> list[Launch]:
    axis, count = n["axis"], elements(n)
    inner = prod(static(n, i) for i in range(axis + 1, len(n.shape)))
    size, kept = static(n.inputs[0], axis), n["stop"] - n["start"]
    return _threads(n, c, count, lambda k: row_kernels.slice_(k, k.dim(count), n["start"], kept, size, inner))


def _concat(n: Node, c: Context) -> list[Launch]:
    axis, count = n["axis"], elements(n)
    inner = prod(static(n, i) for i in range(axis + 1, len(n.shape)))
    sizes = [static(i, axis) * inner for i in n.inputs]
    return _threads(n, c, count, lambda k: row_kernels.concat(k, k.dim(count), sizes))


def _quantize(n: Node, c: Context) -> list[Launch]:
    _refuse_q8a(n, n["out"])
    count = elements(n)
    return _threads(n, c, count, lambda k: row_kernels.elementwise(k, 0, ["full"], k.dim(count), 1, "bf16"))


def _rope_angles(n: Node, c: Context) -> list[Launch]:
    half, sections = static(n, -1) // 2, n["sections"]
    parts = sections and [component(i, sections, n["interleaved"]) for i in range(half)]
    count = extent([n.shape[0], half], n)
    return _threads(
        n, c, count, lambda k: caches.rope_angles(k, k.dim(count), half, n["scale"], parts, len(sections or (1,)))
    )  # fmt: skip


# -- weights -----------------------------------------------------------------------------------------------------------


def _source(node: Node) -> Node:
    """The weight that was packed.

    Raises:
        CompileError: it is no weight.
    """
    if node.op != "pack":
        raise CompileError("only weights can be multiplied or looked up", where=repr(node))
    return node.inputs[0]


def _embedding(n: Node, c: Context) -> list[Launch]:
    table, count, width = _source(n.inputs[0]), elements(n), static(n, -1)
    form, part = form_of(table.dtype), c.part(static(table, 0))

    def body(k: Code) -> None:
        base, ids, out = (k.pointers[name] for name in ("table", "ids", "out"))
        matrix = Matrix(k, base, form, part.count, width)

        def element(i: Value) -> None:
            row = k.load(ids, I32, i // width)
            row = row - part.place(k, k.number(0)) if part.split else row
            with k.guarded((row >= 0) & (row < part.count) if part.split else None):
                k.store(out, matrix.element(row, i % width) * float(n["scale"]), i)

        row_kernels.each(k, k.dim(count), element)

    return _named(n, c, ["table", "ids", "out"], Blocks(count, THREADS), body, split=part.split)


def _linear(n: Node, c: Context) -> list[Launch]:
    weight = _source(n.inputs[1])
    if len(weight.shape) == 3:
        return _linear_of_heads(n, c)
    parts = 2 if n["gated"] else 1
    names = ["x", *(f"w{i}" for i in range(parts)), *(f"b{i}" for i in range(parts * n["bias"]))]
    names += ["residual"] * n["residual"]
    args: dict[str, Arg] = {**dict(zip(names, n.inputs, strict=True)), "out": RESULT}
    many = _many(n, c) and many_rows.linear(n, c, weight, args)
    return many or _linear_launches(n, c, weight, n.shape[0], args, n["gated"], n["out"])


def _many(n: Node, c: Context) -> bool:
    """Whether a call may have many rows, and kernels for them may serve it."""
    return not c.deterministic and c.most(n.inputs[0].shape[0]) > MANY_ROWS


def _linear_launches(
    n: Node, c: Context, weight: Node, count: DimLike, args: Mapping[str, Arg], gated: str | None, out: str
) -> list[Launch]:
    form, part, width = form_of(weight.dtype), c.part(static(weight, 0)), static(weight, 1)
    parts, rounded, height = 2 if gated else 1, n.inputs[0].dtype is BF16, part.count
    room, rows = c.features.shared - c.start, 1 if count == 1 else FEW
    few = c.most(count) <= rows and (rows == 1 or c.features.bf16)
    if few and fits(form, width, parts, room, rounded=rounded, rows=rows):
        own, norm = row_shape(form, height, width, parts, c.weights, c.features.shared), _own_norm(n, c)
        given = {**args, **_norm_args(norm)}

        def one(k: Code) -> None:
            eps, at = float(norm["eps"]) if norm else None, _operands(k, args, width, part, count)
            RowLinear(k, form, height, width, own, gated, out, rounded, eps=eps, rows=rows).emit(at)

        return [c.launch(n, n.op, given, Blocks(own.blocks), one, split=part.split)]
    shape = linears.shape_of(form, c.most(count), height, width, parts, c.features, rounded)
    own_rows, passed = 8 * shape.columns, shape.passed(height, parts)
    each, adding = shape.blocks * shape.ranges, -(-(-(-height // ROWS) * shape.columns) // WARPS)

    def linear(k: Code, each: int) -> tuple[Linear, Operands]:
        at = _operands(k, args, width, part, count, own_rows, each, passed)
        return Linear(k, form, height, width, shape, gated, out, rounded), at

    def products(k: Code) -> None:
        found, at = linear(k, each)
        found.emit(at)

    def add(k: Code) -> None:
        found, at = linear(k, adding)
        found.add_ranges(at)

    blocks = Blocks(count, own_rows, each)
    if not passed:
        return [c.launch(n, n.op, args, blocks, products, split=part.split)]
    scratch = extent([count + (own_rows - 1), passed // own_rows], n)
    first: dict[str, Arg] = {name: arg for name, arg in args.items() if name == "x" or name[0] == "w"}
    after: dict[str, Arg] = {name: arg for name, arg in args.items() if name not in first}
    sums: dict[str, Arg] = {"passed": SCRATCH}
    return [
        c.launch(n, n.op, first | sums, blocks, products, scratch),
        c.launch(n, "add", after | sums, Blocks(count, own_rows, adding), add, scratch, split=part.split),
    ]


def _own_norm(n: Node, c: Context) -> Node | None:
    """The norm of x that each block computes for itself, if a product of one row computes it in its own way."""
    norm = maker(n.inputs[0])
    fits = norm in c.own and norm.op == "rms_norm" and Normed.fits(static(n.inputs[0], -1))
    return norm if fits and norm.shape == n.inputs[0].shape else None


def _norm_args(norm: Node | None) -> dict[str, Arg]:
    """What a product of one row reads in place of normalized x."""
    return dict(zip(("x", "norm"), norm.inputs, strict=False)) if norm else {}


def _operands(
    k: Code, args: Mapping[str, Arg], width: int, part: Part, count: DimLike = 1, own_rows: int = 1, each: int = 0,
    passed: int = 0,
) -> Operands:  # fmt: skip
    """The operands of a block of a linear layer.

    Args:
        own_rows: rows of a block.
        each: blocks with the same rows; 0 if all have.
        passed: bytes of sums that these pass on.
    """
    of, number = k.pointers, k.block // each if each else k.number(0)
    first = number * own_rows
    rows_left = k.number(k.dim(count)) - first
    sums = of.get("passed")
    return Operands(
        weights=[of[name] for name in args if name[0] == "w" and name in of],
        x=of.get("x", k.extents),
        out=of.get("out", k.extents),
        row=lambda i: (first + i) * width,
        valid=lambda i: i < rows_left,
        place=lambda i, column: part.place(k, (first + i) * part.whole + column),
        tile=k.block % each if each else k.block,
        bias=[part.numbers(k, of[name]) for name in args if name[0] == "b" and name in of],
        residual=of.get("residual"),
        passed=None if sums is None else k.at(sums, I8, number.to(I64) * passed),
    )


def _expert_linear(n: Node, c: Context) -> list[Launch]:
    x, ids, *weights = n.inputs
    slots, own_rows = static(ids, 1), len(x.shape) == 3
    names = ["x", "ids", *(f"w{i}" for i in range(len(weights))), "out"]
    if _many(n, c):
        args: dict[str, Arg] = {**dict(zip(names, n.inputs, strict=False)), "out": RESULT}
        if many := many_rows.experts(n, c, _source(weights[0]), args):
            return many

    def place(k: Code, unit: Value) -> tuple[Value, Value]:
        k.wait()  # the numbers of experts come from the kernel before
        return k.load(k.pointers["ids"], I32, unit), unit if own_rows else unit // slots

    return _matrix_for_each(n, c, names, weights[0], elements(ids), place, n["gated"])


def _linear_of_heads(n: Node, c: Context) -> list[Launch]:
    """Of x [rows, heads, k] each head has its own matrix."""
    x, weight = n.inputs
    heads = static(x, 1)
    count = rows(x)
    args: dict[str, Arg] = {"x": x, "w0": weight, "out": RESULT}
    many = _many(n, c) and many_rows.heads(n, c, _source(weight), args)
    return many or _matrix_for_each(
        n, c, list(args), weight, count, lambda k, unit: (unit % heads, unit), None
    )  # fmt: skip


def _matrix_for_each(
    n: Node, c: Context, names: list[str], weights: Node, count: DimLike,
    place: Callable[[Code, Value], tuple[Value, Value]], gated: str | None,
) -> list[Launch]:  # fmt: skip
    """Rows that are each multiplied with a matrix of their own.

    Args:
        place: number of a row of the result -> (number of its matrix, its row of x).
    """
    x, weight = n.inputs[0], _source(weights)
    form, part, width = form_of(weight.dtype), c.part(static(weight, 1)), static(weight, 2)
    nbytes, tiles = form.places(part.count, width)[2], -(-part.count // ROWS)
    _refuse_wide(n, c, form, width)

    def body(k: Code) -> None:
        unit = k.block // tiles
        number, row = place(k, unit)
        matrix = number.to("i64") * nbytes
        at = Operands(
            weights=[k.at(k.pointers[name], "i8", matrix) for name in k.pointers if name[0] == "w"],
            x=k.pointers["x"],
            out=k.pointers["out"],
            row=lambda i: row * width,
            valid=lambda i: i.equals(0),
            place=lambda i, column: part.place(k, unit * part.whole + column),
            tile=k.block % tiles,
            bias=[],
            residual=None,
        )
        shape, rounded = row_shape(form, part.count, width, len(at.weights), shared=c.features.shared), x.dtype is BF16
        RowLinear(k, form, part.count, width, shape, gated, rounded=rounded).emit(at)

    return _named(n, c, names, Blocks(count, 1, tiles), body, split=part.split)


def _refuse_wide(n: Node, c: Context, form: Form, width: int) -> None:
    parts = 2 if dict(n.attrs).get("gated") else 1
    if not fits(form, width, parts, c.features.shared - c.start, rounded=n.inputs[0].dtype is BF16):
        raise CompileError(f"a block of this card has no room for {width} inputs of a row", where=repr(n))


def _linear_pick(n: Node, c: Context) -> list[Launch]:
    weight = _source(n.inputs[1])
    form, height, width = form_of(weight.dtype), static(weight, 0), static(weight, 1)
    _refuse_wide(n, c, form, width)
    shape, norm = row_shape(form, height, width, 1, c.weights, c.features.shared), _own_norm(n, c)

    def body(k: Code) -> None:
        pick = row_kernels.Pick(k, n["cap"])
        zero = k.number(0)
        at = Operands(
            weights=[k.pointers["w0"]], x=k.pointers["x"], out=k.pointers["out"], row=lambda i: zero,
            valid=lambda i: i.equals(0), place=lambda i, column: column, tile=k.block, bias=[], residual=None,
        )  # fmt: skip
        rounded, eps = n.inputs[0].dtype is BF16, float(norm["eps"]) if norm else None
        RowLinear(k, form, height, width, shape, rounded=rounded, take=pick.note, eps=eps).emit(at)
        pick.write(shape.blocks)

    args: dict[str, Arg] = {"x": n.inputs[0], "w0": n.inputs[1], **_norm_args(norm)}
    args |= {"parts": SCRATCH, "counters": COUNTERS, "out": RESULT}
    return [c.launch(n, n.op, args, Blocks(shape.blocks), body, 12 * shape.blocks, 1)]


# -- states ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sequences:
    """The operands that say which sequence a row belongs to.

    Attributes:
        names: of those operands, which are the last.
        columns: of the table of segments.
        count: of segments.
        pages: of a page table.
    """

    names: tuple[str, ...]
    columns: int
    count: DimLike
    pages: DimLike

    def segment(self, k: Code, row: Value) -> Segment:
        """The segment of a row."""
        return caches.segment_of(k, row, k.pointers.get("segments"), self.columns, self.count)

    def alone(self, k: Code, number: Value) -> Segment:
        """A segment by its number; it is found if it has one row."""
        found = caches.numbered_segment(k, number, k.pointers["segments"], self.columns)
        return replace(found, found=found.found & found.env["SEQ"].equals(1))


def _sequences(n: Node) -> _Sequences:
    paged, segmented = bool(dict(n.attrs).get("page")), is_segmented(n)
    names = ("pages",) * paged + ("segments",) * segmented
    table = n.inputs[-1] if segmented else None
    pages = n.inputs[-1 - segmented].shape[-1] if paged else 0
    return _Sequences(names, static(table, 1) if table else 0, table.shape[0] if table else 1, pages)


def _cards(c: Context, cache: Node) -> int:
    """How many cards share the heads of a cache; 1 if each has all of them."""
    where, cards = root(cache), c.layouts.cards
    return cards if where.op == "state" and own_heads(static(where, -3), cards) < static(where, -3) else 1


def _cache(k: Code, n: Node, cache: Node, name: str, s: _Sequences, *, wrap: bool, cards: int = 1) -> Cache:
    """A cache among a node's operands, or its result."""
    where = root(cache)
    plain = where.op == "as_cache"
    heads, capacity, width = where.shape[-3:]
    page = 0 if plain else dict(n.attrs).get("page") or 0
    return Cache(
        base=k.pointers[name],
        dtype=cache.dtype,
        heads=int(str(heads)),
        width=int(str(width)),
        capacity=k.dim(capacity),
        page=page,
        wrap=wrap and not page,
        pages=k.pointers.get("pages"),
        table=k.dim(s.pages),
        slotted=is_segmented(n) and not page and not plain,
        plain=plain,
        cards=cards,
    )


def _rope(n: Node, c: Context) -> list[Launch]:
    x, names = n.inputs[0], ["x", *["weight"] * (n["norm_eps"] is not None), "angles", "out"]
    heads = static(x, 1)
    blocks = Blocks(x.shape[0], 1, -(-heads // WARPS))
    return _named(n, c, names, blocks, lambda k: caches.rope(k, heads, static(x, 2), _rotation(k, n, n.inputs)))


def _rotation(k: Code, n: Node, operands: Sequence[Node], prefix: str = "") -> Rope:
    """How a node rotates; its last operand but those of sequences are the angles.

    Args:
        prefix: of the names of its pointers.
    """
    angles = operands[2 if n["norm_eps"] is not None else 1]
    norm = None if n["norm_eps"] is None else (k.pointers[f"{prefix}weight"], float(n["norm_eps"]))
    return Rope(k.pointers[f"{prefix}angles"], static(angles, 1) // 2, n["style"] == "interleaved", norm)


def _kv_write(n: Node, c: Context) -> list[Launch]:
    cache, x = n.inputs[:2]
    s, rotated = _sequences(n), n.op == "rope_kv_write"
    names = ["cache", "x"] + (["weight"] * (n["norm_eps"] is not None) + ["angles"] if rotated else [])
    names += s.names
    cards = _cards(c, cache)
    heads = static(x, 1) // cards

    def body(k: Code) -> None:
        row, _ = caches.heads_of(k, heads)
        own = _cache(k, n, cache, "cache", s, wrap=n["wrap"], cards=cards)
        how = _rotation(k, n, n.inputs[1:]) if rotated else None
        caches.write(k, own, n["at"], how, s.segment(k, row))

    return _named(n, c, names, Blocks(x.shape[0], 1, -(-heads // WARPS)), body)


def _as_cache(n: Node, c: Context) -> list[Launch]:
    x, s = n.inputs[0], _sequences(n)
    names = ["x", *s.names, "out"]
    positions = x.shape[0] if n["order"] == "rows" else x.shape[1]
    heads = int(str(n.shape[0]))

    def body(k: Code) -> None:
        row, _ = caches.heads_of(k, heads)
        own = _cache(k, n, n, "out", s, wrap=False)
        caches.as_cache(k, own, n["order"], s.segment(k, row), k.dim(positions))

    return _named(n, c, names, Blocks(positions, 1, -(-heads // WARPS)), body)


def _attention(n: Node, c: Context) -> list[Launch]:
    if n["bf16"]:
        raise CompileError("attention of bf16 is not made on this device", where=repr(n))
    q, keys, values = n.inputs[:3]
    s, has_operand = _sequences(n), n["mask"] in ("bias", "visible")
    a = Attention(
        heads=static(q, 1), kv_heads=static(keys, 0) if len(keys.shape) == 3 else static(keys, 1), width=static(q, 2),
        scale=float(n["scale"]), window=n["window"], cap=n["softcap"], mask=n["mask"], length=n["length"],
        rows=q.shape[0], bias_heads=static(n.inputs[3 + n["sinks"]], 1) if n["mask"] == "bias" else 1,
        sinks=n["sinks"], out=n["out"], cards=_cards(c, keys),
    )  # fmt: skip
    names = ["q", "keys", "values", *["sinks"] * n["sinks"], *["operand"] * has_operand, *s.names]
    args: dict[str, Arg] = {**dict(zip(names, n.inputs, strict=True)), "out": RESULT}

    def caches_of(k: Code) -> tuple[Cache, Cache]:
        wrap = n["window"] is not None
        both = (("keys", keys), ("values", values))
        own = [_cache(k, n, cache, name, s, wrap=wrap, cards=a.cards) for name, cache in both]
        return own[0], own[1]

    joined = {maker(node): node for node in (q, keys, values) if maker(node) in c.own and maker(node).op in _JOINED}
    taken = c.start if {*c.needed((q, keys, values))} - {*joined} else 0
    tiles = row_chunks.tiles_of(a, keys.dtype, values.dtype, c.features.shared - taken)

    def whole(k: Code) -> None:
        row, part = k.block // a.parts, k.block % a.parts
        row_attentions.attention(k, a, tiles, *caches_of(k), s.segment(k, row), row, part)

    many = list[Launch]()
    if c.most(q.shape[0]) > MANY_ROWS and not c.deterministic:
        many = many_rows.attention(n, c, a, args, s.columns, s.count, caches_of)
        if not many:
            return [c.launch(n, n.op, args, Blocks(q.shape[0], 1, a.parts), whole, split=a.cards > 1)]
        if not is_segmented(n):
            return many
    for node, name in zip((q, keys, values), ("q", "k", "v"), strict=True):
        args |= _joined_args(maker(node), name) if maker(node) in joined else {}
    early = a.mask == "causal" and maker(keys) in joined and maker(values) in joined
    count = s.count if many else q.shape[0]

    def split(k: Code) -> None:
        some = k.number(k.dim(count)) * a.parts
        place, part = k.block % some // a.parts, k.block % some % a.parts
        share = row_chunks.Share(k.block // some, k.dim_named(EACH), k.dim_named(SPLITS), place)
        own = [_joined(k, maker(node), name) if maker(node) in joined else None
               for node, name in ((q, "q"), (keys, "k"), (values, "v"))]  # fmt: skip
        before = row_attentions.Before(own[0].rope if own[0] else None, (own[1], own[2]))
        segment = s.alone(k, place) if many else s.segment(k, place)
        row = segment.first if many else place
        row_attentions.attention(k, a, tiles, *caches_of(k), segment, row, part, share, before, early)

    blocks = Blocks(count, 1, a.parts, split=True)
    scratch, given = extent([count, 4 * a.heads * a.partial], n), {**args, "scratch": PER_RANGE}
    return [*many, c.launch(n, n.op, given, blocks, split, scratch, takes=joined.keys(), split=a.cards > 1)]


#: What attention of one row computes in its own way if each block computes it for itself.
_JOINED = ("rope", "rope_kv_write", "kv_write")


def _joined_args(node: Node, name: str) -> dict[str, Arg]:
    """The pointers of what comes before attention; that of the queries takes their place."""
    x, *rest = node.inputs[OPS[node.op].writes :]
    found: dict[str, Arg] = {name if name == "q" else f"{name}_x": x}
    if node.op != "kv_write":
        *norm, angles = rest[: 1 + (node["norm_eps"] is not None)]
        found |= {f"{name}_angles": angles, **{f"{name}_weight": weight for weight in norm}}
    return found


def _joined(k: Code, node: Node, name: str) -> row_attentions.Written:
    x, rope = k.pointers[name if name == "q" else f"{name}_x"], None
    if node.op != "kv_write":
        operands = node.inputs[OPS[node.op].writes :]
        rope = _rotation(k, node, operands, f"{name}_")
    return row_attentions.Written(x, node["at"] if OPS[node.op].writes else 0, rope)


def _state_args(n: Node, names: Sequence[str]) -> dict[str, Arg]:
    """The pointers: operands, then the state that is written, and the result."""
    after = n.inputs[len(names) if n["aside"] else 0]
    table: dict[str, Arg] = {"segments": n.inputs[-1]} if is_segmented(n) else {}
    return {**dict(zip(names, n.inputs, strict=False)), **table, "after": after, "out": RESULT}


def _causal_conv(n: Node, c: Context) -> list[Launch]:
    args = _state_args(n, ["state", "x", "weight"])
    channels, taps, s = static(n.inputs[2], 0), static(n.inputs[2], 1), _sequences(n)

    def body(k: Code) -> None:
        states.causal_conv(k, channels, taps, k.pointers.get("segments"), s.columns, n.shape[0])

    blocks = Blocks(s.count, 1, -(-channels // THREADS))
    return [c.launch(n, n.op, args, blocks, body)]


def _gated_delta(n: Node, c: Context) -> list[Launch]:
    args = _state_args(n, ["state", "q", "k", "v", "g", "beta"])
    state, keys, s = n.inputs[0], n.inputs[2], _sequences(n)
    heads, key_dim, value_dim = (static(state, axis) for axis in (-3, -2, -1))
    tiled = n["heads"] == "tiled"
    d = states.Delta(heads, static(keys, 1), key_dim, value_dim, float(n["scale"]), tiled, n["corrects"])

    def body(k: Code) -> None:
        states.gated_delta(k, d, k.pointers.get("segments"), s.columns, n.shape[0])

    return [c.launch(n, n.op, args, Blocks(s.count, 1, d.blocks), body)]


def _call(n: Node, c: Context) -> list[Launch]:
    """Nothing is launched: the host computes it (`host_calls.py`)."""
    return []


KERNELS: dict[str, Callable[[Node, Context], list[Launch]]] = {
    "call": _call,
    "embedding": _embedding,
    "linear": _linear,
    "expert_linear": _expert_linear,
    "overlay_rows": _overlay_rows,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "quantize": _quantize,
    "rope_angles": _rope_angles,
    "rope": _rope,
    "kv_write": _kv_write,
    "rope_kv_write": _kv_write,
    "as_cache": _as_cache,
    "attention": _attention,
    "elementwise": _elementwise,
    "softmax": _softmax,
    "argmax": _largest,
    "pick": _largest,
    "linear_pick": _linear_pick,
    "top_k": _top_k,
    "last_row": _last_row,
    "take_rows": _take_rows,
    "reduce_mean": _reduce,
    "reduce_sum": _reduce,
    "take": _take,
    "relabel": _relabel,
    "mix": _mix,
    "slice": _slice,
    "concat": _concat,
    "causal_conv": _causal_conv,
    "gated_delta": _gated_delta,
}


def select(node: Node, context: Context) -> list[Launch]:
    """The launches of a node, one after the other.

    Raises:
        CompileError: no kernel computes it.
    """
    row = OPS[node.op]
    if row.custom:
        raise CustomOpError("a custom op has no kernel on this device", where=f"custom op {node.op}",
                            hint='Choose device="cpu", or build its formula of ops of the table.')  # fmt: skip
    build = _elementwise if row.elementwise else KERNELS.get(node.op)
    if build is None:
        raise CompileError(f"no kernel serves {node!r}", hint=f"Ops with kernels: {', '.join(KERNELS)}.")
    return build(node, context)
