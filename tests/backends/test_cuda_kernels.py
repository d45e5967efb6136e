"""Kernels of the device "cuda" for many rows, run on paper (`simt.py`) and compared with NumPy in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simt
from weight_bytes import random_bytes

from rlx.backends.cuda import layouts
from rlx.backends.cuda.agreed import choice as choices
from rlx.backends.cuda.agreed import loop as loops
from rlx.backends.cuda.code import THREADS, WARPS, Code, Kernel, kernel_of
from rlx.backends.cuda.features import Features
from rlx.backends.cuda.kernels import attention_prompt as prompts
from rlx.backends.cuda.kernels import groups, row_parts
from rlx.backends.cuda.kernels import linear as linears
from rlx.backends.cuda.kernels import matrix_large as larges
from rlx.backends.cuda.kernels import rows as row_kernels
from rlx.backends.cuda.kernels.attention import Attention
from rlx.backends.cuda.kernels.cache import Cache
from rlx.backends.cuda.kernels.large_shape import Shape, shapes_of, stages_of
from rlx.backends.cuda.kernels.loop import Sequences, advance
from rlx.backends.cuda.kernels.row_linear import FEW, WIDEST, RowLinear, RowShape, row_shape
from rlx.backends.cuda.kernels.rows import rms_norm
from rlx.backends.cuda.target import named
from rlx.ir.dims import PAST_SEQ, SEGMENTS, SEQ
from rlx.ir.dtypes import DTYPES
from rlx.ir.segments import FIRST_ROW, PAST, ROWS, SLOT
from rlx.ir.stored import dequantize

PAGE = 64
CAUSAL = Attention(
    heads=2, kv_heads=1, width=32, scale=0.3, window=None, cap=None, mask="causal", length=0, rows=0, bias_heads=1,
    sinks=False, out="f32",
)  # fmt: skip
#: What differs from it, the type of the cache, rows and positions before them.
ATTENTIONS: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "f16": ({}, "f16", 70, 30),
    "bf16, window": ({"window": 40}, "bf16", 70, 90),
    "f32, odd groups, cap, sinks": ({"heads": 3, "width": 48, "cap": 5.0, "sinks": True}, "f32", 25, 40),
    "wide heads": ({"width": 160}, "f16", 33, 40),
    "several key heads, all positions": ({"heads": 4, "kv_heads": 2, "mask": "none"}, "f16", 20, 0),
    "last visible positions": ({"mask": "visible"}, "f16", 40, 9),
    "more heads than a block has": ({"heads": 70, "width": 16}, "f16", 2, 60),
}


@pytest.fixture(params=["sm_80", "sm_75"])
def features(request: pytest.FixtureRequest) -> Features:
    """What a card has: one whose tensor cores multiply bf16, and one where lanes do."""
    return named(request.param).features


def run(kernel: Kernel, memory: simt.Memory, blocks: int, arguments: dict[str, int]) -> None:
    simt.Program(kernel.text)(memory, blocks, arguments, [0, 0], kernel.shared)  # the sizes of a call are not used


def cache_of(k: Code, name: str, a: Attention, dtype: str, capacity: int) -> Cache:
    return Cache(
        base=k.pointers[name], dtype=DTYPES[dtype], heads=a.kv_heads, width=a.width, capacity=capacity, page=PAGE,
        pages=k.pointers["pages"], table=capacity // PAGE,
    )  # fmt: skip


def stored(values: np.ndarray[Any, Any], dtype: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values as a cache has them, and what they are then."""
    if dtype == "f16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = simt.to_bf16(values)
        return bits, simt.from_bf16(bits)
    return values, values


def expected_attention(
    a: Attention, q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any],
    sinks: np.ndarray[Any, Any], visible: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:  # fmt: skip
    rows, length, group = len(q), k.shape[1], a.heads // a.kv_heads
    own, keys = length - rows + np.arange(rows), np.arange(length)
    scores = np.einsum("rhd,htd->hrt", q.astype(np.float64), np.repeat(k, group, 0)) * a.scale
    if a.cap is not None:
        scores = a.cap * np.tanh(scores / a.cap)
    last = {"causal": own, "none": np.full(rows, length), "visible": visible}[a.mask]
    hidden = keys > last[:, None]
    if a.window is not None:
        hidden |= own[:, None] - keys >= a.window
    weights = np.exp(np.where(hidden, -np.inf, scores))
    total = weights.sum(-1) + (np.exp(sinks.astype(np.float64))[:, None] if a.sinks else 0)
    return np.einsum("hrt,htd->rhd", weights / total[..., None], np.repeat(v, group, 0))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("exact", [True, False])
def test_attention_of_prompts(name: str, exact: bool, features: Features) -> None:
    changes, dtype, rows, past = ATTENTIONS[name]
    length, rng = rows + past, np.random.default_rng(len(name))
    a = replace(CAUSAL, **changes, length=length, rows=rows)
    tiles = prompts.tiles_of(a, DTYPES[dtype], DTYPES[dtype], features.shared, exact=exact)
    assert tiles is not None
    capacity = -(-length // PAGE) * PAGE
    code = Code("kernel", dict.fromkeys(["q", "keys", "values", "pages", "sinks", "operand", "out"]), [], features)
    segment, first = prompts.find_rows(code, a, None, 0, 0)
    caches = [cache_of(code, which, a, dtype, capacity) for which in ("keys", "values")]
    prompts.prompt_attention(code, a, tiles, caches[0], caches[1], segment, first)
    q = rng.standard_normal((rows, a.heads, a.width)).astype(np.float32)
    (keys, k), (values, v) = (
        stored(rng.standard_normal((a.kv_heads, capacity, a.width)).astype(np.float32), dtype) for _ in range(2)
    )
    sinks, visible = rng.standard_normal(a.heads).astype(np.float32), rng.integers(0, length, rows).astype(np.int32)
    pages = rng.permutation(capacity // PAGE).astype(np.int32)
    memory = simt.Memory()
    given = {"q": q, "sinks": sinks, "operand": visible, "pages": pages, "out": np.full_like(q, np.nan)}
    for which, each in (("keys", keys), ("values", values)):
        paged = np.empty_like(each).reshape(a.kv_heads, -1, PAGE, a.width)
        paged[:, pages] = each.reshape(paged.shape)
        given[which] = paged
    places = {name: memory.put(each) for name, each in given.items()}
    run(kernel_of(code), memory, -(-rows // prompts.rows_of(a)) * prompts.parts_of(a), places)
    expected = expected_attention(a, q, k[:, :length], v[:, :length], sinks, visible)
    limit = 2e-6 if exact or dtype == "f32" else {"f16": 1e-3, "bf16": 8e-3}[dtype]
    assert np.abs(memory.get(places["out"], q.shape) - expected).max() <= limit * np.abs(expected).max()


def test_sequences_share_no_block(features: Features) -> None:
    """Each sequence of several rows has its blocks; what a row gets does not depend on the others."""
    a, rng = replace(CAUSAL, length=0, rows=0), np.random.default_rng(1)
    sizes, columns = (40, 1, 17), 4
    table = np.zeros((3, columns), np.int32)
    table[:, ROWS], table[:, PAST], table[:, SLOT] = sizes, 0, [2, 0, 1]
    table[:, FIRST_ROW] = np.cumsum((0, *sizes))[:3]
    rows, capacity = sum(sizes), PAGE
    q = rng.standard_normal((rows, a.heads, a.width)).astype(np.float32)
    cache = rng.standard_normal((3, 1, capacity, a.width)).astype(np.float16)
    a = replace(a, length=PAST_SEQ + SEQ, rows=SEQ)
    tiles = prompts.tiles_of(a, DTYPES["f16"], DTYPES["f16"], features.shared, exact=True)
    assert tiles is not None
    code = Code("kernel", dict.fromkeys(["q", "keys", "segments", "out"]), ["SEQ", "PAST_SEQ"], features)
    segment, first = prompts.find_rows(code, a, code.pointers["segments"], columns, 3)
    own = Cache(code.pointers["keys"], DTYPES["f16"], 1, a.width, capacity, slotted=True)
    prompts.prompt_attention(code, a, tiles, own, own, segment, first)
    memory = simt.Memory()
    given = {"q": q, "keys": cache, "segments": table, "out": np.full_like(q, np.nan)}
    places = {name: memory.put(each) for name, each in given.items()}
    size = prompts.rows_of(a)
    run(kernel_of(code), memory, -(-(rows + 3 * size) // size), places)
    found = memory.get(places["out"], q.shape)
    for start, count, slot in zip(table[:, FIRST_ROW], sizes, table[:, SLOT], strict=True):
        mine = found[start : start + count]
        if count == 1:
            assert np.isnan(mine).all(), "sequences of one row are computed by another kernel"
            continue
        k = cache[slot, :, :count].astype(np.float32)
        expected = expected_attention(a, q[start : start + count], k, k, np.zeros(2), np.zeros(count))
        assert np.abs(mine - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("level", "dtype", "width", "shape", "gated"),
    [
        ("sm_80", "q8_0", 256, Shape(2, 2), None),
        ("sm_80", "q4_k", 512, Shape(4, 4), "silu"),
        ("sm_80", "bf16", 300, Shape(4, 2), None),
        ("sm_75", "q8_0", 256, Shape(4, 4), None),
        ("sm_75", "q4_k", 512, Shape(4, 2), "silu"),
        ("sm_75", "bf16", 300, Shape(2, 2), None),
        ("sm_90a", "q6_k", 768, Shape(8, 4, 1, True), None),
        ("sm_90a", "q5_k", 512, Shape(4, 4, 2, True), "silu"),
        ("sm_90a", "f16", 200, Shape(4, 4, 1, True), None),
        ("sm_90a", "f32", 256, Shape(8, 8, 1, True), None),
        ("sm_90a", "bf16", 128, Shape(8, 16, 1, True), None),
        ("sm_90a", "q8_0", 128, Shape(8, 12, 1, True), None),
        ("sm_90a", "q4_k", 256, Shape(8, 8, 2, True), "silu"),
        ("sm_90a", "bf16", 128, Shape(8, 8, 2, True), "silu"),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_linears_of_many_rows(level: str, dtype: str, width: int, shape: Shape, gated: str | None, count: int) -> None:
    features = named(level).features
    rows, n = 41 if shape.columns < 12 else shape.rows + 9, 40
    rng, parts = np.random.default_rng(width), 2 if gated else 1
    type_ = DTYPES[dtype]
    form, stored_as = layouts.form_of(type_), row_parts.parts_of(width, count)
    as_it_is = row_parts.as_they_are(width) if count == 1 else None
    split = Code("split", dict.fromkeys(["x", "parts"]), [], features)
    row_parts.write_parts(split, stored_as, rows)
    code = Code("kernel", dict.fromkeys(["x", "w0", "w1", "b0", "b1", "residual", "out"]), [], features)
    tiles = -(-n // (layouts.ROWS * shape.tiles(parts)))
    first, of = code.block // tiles * shape.rows, code.pointers
    at = larges.Operands(
        weights=[of["w0"], of["w1"]][:parts],
        x=of["x"],
        rows=larges.Rows(
            row=lambda i: code.smaller(first + i, rows - 1),
            valid=lambda i: first + i < rows,
            start=lambda i: (first + i) * n,
        ),
        out=of["out"],
        tile=code.block % tiles * shape.tiles(parts),
        bias=[of["b0"], of["b1"]][:parts],
        residual=of["residual"],
        aligned=width != 512,
    )
    stages = stages_of(form, shape, 227 << 10, count)
    larges.Large(code, form, n, as_it_is or stored_as, shape, stages, gated).emit(at)
    x, residual = (rng.standard_normal(size).astype(np.float32) for size in ((rows, width), (rows, n)))
    raw = [random_bytes(type_, n, width, rng) for _ in range(2)]
    biases = rng.standard_normal((2, n)).astype(np.float32)
    given_x = x
    if count == 1:
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        given_x = (x.view(np.uint32) >> 16).astype(np.uint16)
    memory = simt.Memory()
    x_placed, placed = memory.put(given_x), memory.put(np.zeros(rows * stored_as.nbytes, np.uint8))
    items = rows * (stored_as.padded // row_parts.SPLIT)
    run(kernel_of(split), memory, -(-items // THREADS), {"x": x_placed, "parts": placed})
    given = {"b0": biases[0], "b1": biases[1], "residual": residual, "out": np.full((rows, n), np.nan, np.float32)}
    given |= {f"w{i}": layouts.pack(type_, each, n, width) for i, each in enumerate(raw)}
    places = {name: memory.put(each) for name, each in given.items()}
    places["x"] = x_placed if as_it_is else placed
    run(kernel_of(code), memory, tiles * -(-rows // shape.rows), places)
    weights = [dequantize(each, type_, (n, width)) for each in raw]
    if count == 1 and form.scales:  # they are rounded to bf16, as x is
        weights = [simt.from_bf16(simt.to_bf16(each)) for each in weights]
    results = [x.astype(np.float64) @ each.T + bias for each, bias in zip(weights, biases, strict=True)]
    gate = np.clip(results[0], -500, None)
    expected = (gate / (1 + np.exp(-gate)) * results[1] if gated else results[0]) + residual
    found = memory.get(places["out"], (rows, n))
    limit = 1e-6 if count == 3 and dtype != "f32" else 4e-5  # where numbers lie between two bf16, rounding may differ
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("level", ["sm_80", "sm_90a"])
def test_shapes_of_many_rows(level: str) -> None:
    """Each number of rows has one; a call does not compute many more rows than it has, where it fills the card."""
    features = named(level).features
    for dtype, n, parts, count, rows in itertools.product(
        ("q4_k", "bf16", "f32"), (40, 1024, 4096, 24576, 151936), (1, 2), (1, 3), ((65, 512), (513, 2048), (9, 100))
    ):
        sizes = shapes_of(layouts.form_of(DTYPES[dtype]), rows, n, parts, features.together, count, features.shared)
        assert sizes[0].most == rows[1] and sizes[-1].least == 1
        assert all(above.least == below.most + 1 for above, below in itertools.pairwise(sizes))
        if n > 4096 and count == 1 and features.together:
            for own in range(max(rows[0], 128), rows[1] + 1):
                (shape,) = (size.shape for size in sizes if size.least <= own <= size.most)
                assert -(-own // shape.rows) * shape.rows < 1.6 * own


def test_shapes_of_few_rows() -> None:
    """Sets of tiles cover a layer, and what is in shared memory fits."""
    for dtype, rows, n, width, parts, level in itertools.product(
        ("q4_k", "q6_k", "q8_0", "bf16", "f32"), (2, 8, 16, 24, 64, 500), (40, 1024, 12288, 151936), (256, 4096, 12288),
        (1, 2), ("sm_75", "sm_86", "sm_90"),
    ):  # fmt: skip
        features = named(level).features
        form = layouts.form_of(DTYPES[dtype])
        shape = linears.shape_of(form, rows, n, width, parts, features)
        assert 0 < shape.blocks <= -(-parts * shape.sets(n) // WARPS)
        most = 64 if features.bf16 and (rows > 64 or not form.scales) else 32
        assert shape.columns == -(-min(rows, most) // 8)
        x = shape.pieces * shape.piece * form.unit // 32 * linears.record_bytes(form, shape.columns, False)
        assert x + WARPS * shape.slots * shape.each * form.unit_bytes <= features.shared


@pytest.mark.parametrize(
    ("dtype", "width", "rows", "gated", "changes"),
    [
        ("q8_0", 352, 5, None, {}),
        ("q4_k", 768, 8, "silu", {}),
        ("f32", 140, 2, None, {}),
        ("q4_k", 512, 20, "silu", {}),
        ("q6_k", 2304, 9, None, {"each": 2, "piece": 3, "pieces": 2}),
        ("bf16", 300, 33, "silu", {"ranges": 1, "piece": 10}),
        ("q2_k", 768, 7, None, {"each": 2}),
        ("q4_k", 256, 20, "silu", {"blocks": 1}),
        ("q4_0", 1312, 12, None, {"ranges": 1, "piece": 2, "pieces": 2}),
        ("q3_k", 1024, 10, None, {"piece": 1, "pieces": 2}),
        ("f8_e4m3", 256, 3, None, {}),
        ("f16", 520, 17, None, {"ranges": 1, "piece": 1, "pieces": 2, "blocks": 1}),
        ("f32", 288, 64, None, {}),
    ],
)
@pytest.mark.parametrize("rounded", [False, True])
def test_linears_of_few_rows(
    dtype: str, width: int, rows: int, gated: str | None, changes: dict[str, Any], rounded: bool, features: Features
) -> None:
    """Rows have the bits that they have alone."""
    n, rng, type_, parts = 152, np.random.default_rng(width), DTYPES[dtype], 2 if gated else 1
    form = layouts.form_of(type_)
    shape = linears.shape_of(form, rows, n, width, parts, features, rounded)
    shape = replace(shape, **{"columns": -(-rows // 8), **changes})
    x, residual = (rng.standard_normal(size).astype(np.float32) for size in ((rows, width), (rows, n)))
    raw = [random_bytes(type_, n, width, rng) for _ in range(2)]
    bias = rng.standard_normal((2, n)).astype(np.float32)
    if rounded:
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    given = {"b0": bias[0], "b1": bias[1], "residual": residual, "out": np.full((rows, n), np.nan, np.float32)}
    given |= {f"w{i}": layouts.pack(type_, each, n, width) for i, each in enumerate(raw)}
    given |= {"x": (x.view(np.uint32) >> 16).astype(np.uint16) if rounded else x}
    given["passed"] = np.full(shape.passed(n, parts), 0xCD, np.uint8)
    memory = simt.Memory(1 << 25)
    places = {name: memory.put(each) for name, each in given.items()}

    def operands(code: Code, row: int | None) -> linears.Operands:
        of = code.pointers
        return linears.Operands(
            weights=[of["w0"], of["w1"]][:parts], bias=[of["b0"], of["b1"]][:parts], residual=of["residual"],
            x=of["x"], out=of["out"], row=lambda i: (i + (row or 0)) * width,
            valid=lambda i: i < (rows if row is None else 1),
            place=lambda i, column: (i + (row or 0)) * n + column, tile=code.block,
            passed=of["passed"] if shape.passed(n, parts) else None,
        )  # fmt: skip

    code = Code("products", dict.fromkeys(given), [], features)
    linears.Linear(code, form, n, width, shape, gated, rounded=rounded).emit(operands(code, None))
    run(kernel_of(code), memory, shape.blocks * shape.ranges, places)
    if shape.passed(n, parts):
        code = Code("add", dict.fromkeys(given), [], features)
        linears.Linear(code, form, n, width, shape, gated, rounded=rounded).add_ranges(operands(code, None))
        run(kernel_of(code), memory, -(-10 * shape.columns // WARPS), places)
    found = memory.get(places["out"], (rows, n)).copy()
    results = [x.astype(np.float64) @ dequantize(each, type_, (n, width)).T for each in raw]
    results = [result + each for result, each in zip(results, bias, strict=True)]
    gate = np.clip(results[0], -500, None)
    expected = (gate / (1 + np.exp(-gate)) * results[1] if gated else results[0]) + residual
    most = (2e-6 if rounded and dtype != "f32" else 2e-5) * np.abs(expected).max()
    assert np.abs(found - expected).max() <= most
    for row in (0, rows - 1):
        code, own = Code("row", dict.fromkeys(given), [], features), row_shape(form, n, width, parts)
        RowLinear(code, form, n, width, own, gated, rounded=rounded).emit(operands(code, row))
        run(kernel_of(code), memory, own.blocks, places)
        np.testing.assert_array_equal(memory.get(places["out"], (rows, n))[row], found[row])
    if rows <= FEW:
        code, own = Code("few", dict.fromkeys(given), [], features), row_shape(form, n, width, parts, 1 << 30)
        RowLinear(code, form, n, width, own, gated, rounded=rounded, rows=FEW).emit(operands(code, None))
        memory.get(places["out"], (rows, n))[:] = np.nan
        run(kernel_of(code), memory, own.blocks, places)
        np.testing.assert_array_equal(memory.get(places["out"], (rows, n)), found)


def of_rows(code: Code, n: int, width: int, rows: int) -> linears.Operands:
    """The operands of a layer whose blocks have a tile each of so many rows of x."""
    return linears.Operands(
        weights=[code.pointers["w0"]], x=code.pointers["x"], out=code.pointers["out"], row=lambda i: i * width,
        valid=lambda i: i < rows, place=lambda i, column: i * n + column, tile=code.block, bias=[], residual=None,
        passed=code.pointers.get("passed"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "n", "width", "own"),
    [
        ("q8_0", 40, 352, 1),  # one piece for each range
        ("q4_k", 100, 2048, 3),  # pieces of a superblock, several tiles of a block
        ("q5_k", 40, 1280, 1),  # ranges of 2.5 units
        ("q6_k", 40, 2048, 3),  # half superblocks
        ("q2_k", 40, 512, 1),
        ("q4_1", 40, 2048, 3),
        ("mxfp4", 40, 352, 1),
        ("bf16", 40, 2100, 3),
        ("f16", 40, 200, 1),
        ("f32", 40, 130, 1),
    ],
)
def test_a_row_has_the_same_bits_alone(dtype: str, n: int, width: int, own: int, features: Features) -> None:
    """Rings of any shape give the bits that the kernel of several rows has; and those are right."""
    rng, type_ = np.random.default_rng(width), DTYPES[dtype]
    form, tiles = layouts.form_of(type_), -(-n // layouts.ROWS)
    x, raw = rng.standard_normal((2, width)).astype(np.float32), random_bytes(type_, n, width, rng)
    packed, found = layouts.pack(type_, raw, n, width), []
    shape = replace(row_shape(form, n, width, 1, 0), tiles=own, blocks=-(-tiles // own))
    few = linears.shape_of(form, 2, n, width, 1, features)
    given = {"w0": packed, "passed": np.zeros(few.passed(n, 1), np.uint8)}
    for alone in (True, False):
        memory = simt.Memory()
        places = {name: memory.put(each) for name, each in given.items()}
        places |= {"x": memory.put(x), "out": memory.put(np.full((2, n), np.nan, np.float32))}
        code, adds = (Code("kernel", dict.fromkeys(places), [], features) for _ in range(2))
        if alone:
            RowLinear(code, form, n, width, shape).emit(of_rows(code, n, width, 2))
        else:
            linears.Linear(code, form, n, width, few).emit(of_rows(code, n, width, 2))
            linears.Linear(adds, form, n, width, few).add_ranges(of_rows(adds, n, width, 2))
        run(kernel_of(code), memory, shape.blocks if alone else few.blocks * few.ranges, places)
        if not alone:
            run(kernel_of(adds), memory, -(-tiles // WARPS), places)
        found.append(memory.get(places["out"], (2, n))[0].copy())
    expected = x[0].astype(np.float64) @ dequantize(raw, type_, (n, width)).T
    assert np.abs(found[1] - expected).max() <= 2e-5 * np.abs(expected).max()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("dtype", "width"), [("q4_k", 1280), ("q8_0", 2336), ("bf16", 130)])
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_row_is_normalized_in_its_product(
    dtype: str, width: int, out: str, weighted: bool, features: Features
) -> None:
    """It has the bits of a norm before the product; and those are right."""
    rng, n, type_, eps = np.random.default_rng(width), 40, DTYPES[dtype], 1e-3
    form, rounded = layouts.form_of(type_), out == "bf16"
    x, weight = (rng.standard_normal(width).astype(np.float32) * 3 for _ in range(2))
    raw, shape = random_bytes(type_, n, width, rng), row_shape(form, n, width, 1)
    memory, found = simt.Memory(), []
    places = {"x": memory.put(x), "w0": memory.put(layouts.pack(type_, raw, n, width))}
    places |= {"norm": memory.put(weight)} if weighted else {}
    names = ["x", *["norm"] * weighted, "out"]
    before, code, alone = (
        Code("norm", dict.fromkeys(names), [], features),
        *(Code("kernel", dict.fromkeys([*places, "out"]), [], features) for _ in range(2)),
    )
    rms_norm(before, width, eps, out)
    normed = memory.put(np.zeros(width, np.int16 if rounded else np.float32))
    run(kernel_of(before), memory, 1, {name: places.get(name, normed) for name in names})
    RowLinear(code, form, n, width, shape, rounded=rounded).emit(of_rows(code, n, width, 1))
    RowLinear(alone, form, n, width, shape, rounded=rounded, eps=eps).emit(of_rows(alone, n, width, 1))
    for each, source in ((code, normed), (alone, places["x"])):
        place = memory.put(np.full(n, np.nan, np.float32))
        run(kernel_of(each), memory, shape.blocks, {**places, "x": source, "out": place})
        found.append(memory.get(place, (n,)).copy())
    np.testing.assert_array_equal(*found)
    wide = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean() + eps) * (weight if weighted else 1)
    expected = wide @ dequantize(raw, type_, (n, width)).T
    assert np.abs(found[0] - expected).max() <= (2e-2 if rounded else 3e-5) * np.abs(expected).max()


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", ["q4_k", "q8_0", "bf16"])
def test_blocks_of_one_row_fill_the_multiprocessors(dtype: str, shared: int) -> None:
    form = layouts.form_of(DTYPES[dtype])

    def block(n: int, width: int) -> tuple[RowShape, int]:
        """The shape of a layer, and how many of its blocks a multiprocessor has room for."""
        shape = row_shape(form, n, width, 1, form.places(n, width)[2], shared)
        code = Code("kernel", dict.fromkeys(["x", "w0", "out"]), [])
        RowLinear(code, form, n, width, shape).emit(of_rows(code, n, width, 1))
        return shape, (shared + 1024) // (code.shared + 1024)

    for n, most in ((512, 32), (1 << 17, 264)):
        shape, fit = block(n, 1024)
        assert most // 2 < shape.blocks <= most and fit == 2
    assert block(64, WIDEST)[1] >= 1, "the widest row fits"


def test_pairs_of_rows_and_experts() -> None:
    experts, units, rows, rng = 13, 700, 32, np.random.default_rng(0)
    ids = rng.integers(0, experts, units).astype(np.int32)
    ids[ids == 5] = 6
    code = Code("kernel", dict.fromkeys(["ids", "groups"]), [])
    groups.group(code, units, experts)
    memory = simt.Memory()
    places = {"ids": memory.put(ids), "groups": memory.put(np.zeros(units + experts + 1, np.int32))}
    run(kernel_of(code), memory, experts + 1, places)
    table, order = memory.get(places["groups"], (units + experts + 1,), np.int32), np.argsort(ids, kind="stable")
    assert table[: experts + 1].tolist() == [(ids < e).sum() for e in range(experts + 1)]
    assert table[experts + 1 :].tolist() == order.tolist()
    code = Code("kernel", dict.fromkeys(["groups", "out"]), [])
    found = groups.find(code, code.pointers["groups"], experts, rows, code.block)
    for i, value in enumerate((found.expert, found.start, found.end)):
        code.store(code.pointers["out"], value, code.block * 3 + i)
    blocks = (units + experts * rows) // rows
    out = memory.put(np.zeros((blocks, 3), np.int32))
    run(kernel_of(code), memory, blocks, {"groups": places["groups"], "out": out})
    spans = memory.get(out, (blocks, 3), np.int32).tolist()
    covered = [(expert, place) for expert, start, end in spans for place in range(start, end)]
    assert sorted(covered) == sorted((ids[unit], place) for place, unit in enumerate(order))


def test_choices_get_other_numbers() -> None:
    ids, labels = np.array([2, -1, 0, 3, 3], np.int32), np.array([9, 1, (1 << 24) - 1, 0], np.float32)
    code = Code("kernel", dict.fromkeys(["ids", "labels", "out"]), [])
    row_kernels.relabel(code, len(ids))
    memory = simt.Memory()
    places = {"ids": memory.put(ids), "labels": memory.put(labels), "out": memory.put(np.zeros(len(ids), np.int32))}
    run(kernel_of(code), memory, 1, places)
    assert memory.get(places["out"], ids.shape, np.int32).tolist() == [(1 << 24) - 1, -1, 9, 0, 0]


#: Of a row: the token that a step chose, whether its logits are finite, the tokens that it may still get, and whether
#: it then goes on, and is told its token.
ROWS_OF_A_RUN = [
    (7, 1, 5, True, True), (9, 1, 5, False, True), (50, 1, 5, False, True), (-2, 1, 5, False, False),
    (7, 0, 5, False, False), (7, 1, 1, False, True), (8, 1, 2, True, True),
]  # fmt: skip


def block_of_a_run(rows: list[tuple[int, int, int, bool, bool]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the card knows of a run of rows after three steps: its bytes, and those of each row."""
    block = np.zeros(loops.HEAD_BYTES + len(rows) * loops.ROW_BYTES, np.uint8)
    block[: loops.HEAD_BYTES].view(np.int32)[[loops.TABLE, loops.DONE]] = 40, 3
    own = block[loops.HEAD_BYTES :].reshape(len(rows), loops.ROW_BYTES)
    own.view(np.int32)[:, loops.LEFT] = [row[2] for row in rows]
    own.view(np.int32)[:, loops.STOP_COUNT], own.view(np.int32)[:, loops.STOPS_AT + 1] = 2, 9
    own.view(np.float64)[:, loops.NUMBERS_AT :] = np.arange(loops.STEPS) / 64 + np.arange(len(rows))[:, None]
    return block, own


@pytest.mark.parametrize("row", ROWS_OF_A_RUN, ids=str)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_token_goes_to_the_next_step(row: tuple[int, int, int, bool, bool], drawn: bool) -> None:
    """With the random number of that step; what is no token is left to the host."""
    token, is_finite, _, goes_on, told = row
    if not drawn:  # the program itself says -1 then
        token = token if told else -1
    told_token = token if told else -1
    names = ["loop", "found", "token", *(["number"] if drawn else []), "tokens", "positions"]
    code = Code("kernel", dict.fromkeys(names), ["PAST_SEQ", "RUNS"])
    advance(code, Sequences())
    memory, (block, _) = simt.Memory(), block_of_a_run([row])
    given = {
        "loop": block, "token": np.array([token, is_finite], np.int32), "number": np.zeros(1), "tokens": np.int32([5]),
        "positions": np.int32([20]), "found": np.full(loops.STEPS, 99, np.int32),
    }  # fmt: skip
    places = {name: memory.put(given[name]) for name in names}
    kernel = kernel_of(code)
    extents = memory.put(np.array([20, 1], np.int32))
    arguments = {f"p.{name}": at for name, at in places.items()} | {"block": 0, "extents": extents}
    simt.Block(simt.Program(kernel.text), memory, arguments, kernel.shared).run()
    assert memory.get(extents, (2,), np.int32).tolist() == ([21, 1] if goes_on else [20, 0])
    assert memory.get(places["found"], (4,), np.int32).tolist() == [99, 99, 99, told_token]
    assert memory.get(places["loop"], (2,), np.int32)[loops.DONE] == 4
    if drawn:
        assert memory.get(places["number"], (1,), np.float64)[0] == 4 / 64
    assert memory.get(places["tokens"], (1,), np.int32)[0] == (token if goes_on else 5)
    assert memory.get(places["positions"], (1,), np.int32)[0] == 20 + goes_on


def test_tokens_of_several_rows_go_to_the_next_step() -> None:
    """Each row goes on or ends for itself; one that had ended before stays as it is, whatever is chosen from it."""
    rows, columns = [*ROWS_OF_A_RUN, (7, 1, 5, False, False)], 5
    names = ["loop", "found", "token", "number", "tokens", "positions", "segments"]
    code = Code("kernel", dict.fromkeys(names), ["SEGMENTS", "RUNS"])
    advance(code, Sequences(SEGMENTS, columns))
    memory, count, (block, own) = simt.Memory(), len(rows), block_of_a_run(rows)
    segments = np.arange(columns * count, dtype=np.int32).reshape(count, columns)
    segments[:, ROWS] = 1
    segments[-1, ROWS] = 0
    numbers = np.full((count, choices.WORDS), -1.0)
    given = {
        "loop": block, "token": np.array([row[:2] for row in rows], np.int32), "number": numbers,
        "tokens": np.full(count, 5, np.int32), "positions": np.full(count, 20, np.int32),
        "segments": segments, "found": np.full((loops.STEPS, count), 99, np.int32),
    }  # fmt: skip
    places = {name: memory.put(each.reshape(-1)) for name, each in given.items()}
    kernel = kernel_of(code)
    arguments = {f"p.{name}": at for name, at in places.items()} | {"block": 0}
    arguments["extents"] = memory.put(np.array([count, 1], np.int32))
    simt.Block(simt.Program(kernel.text), memory, arguments, kernel.shared).run()
    goes_on, told = (np.array([row[at] for row in rows]) for at in (3, 4))
    after = memory.get(places["segments"], segments.shape, np.int32)
    expected = segments.copy()
    expected[:, ROWS], expected[goes_on, PAST] = goes_on, segments[goes_on, PAST] + 1
    np.testing.assert_array_equal(after, expected)
    found = memory.get(places["found"], (loops.STEPS, count), np.int32)
    assert found[3].tolist() == [row[0] if each else -1 for row, each in zip(rows, told, strict=True)]
    assert (np.delete(found, 3, 0) == 99).all()
    tokens, positions = (memory.get(places[name], (count,), np.int32) for name in ("tokens", "positions"))
    assert tokens.tolist() == [row[0] if each else 5 for row, each in zip(rows, goes_on, strict=True)]
    assert positions.tolist() == (20 + goes_on).tolist()
    drawn = memory.get(places["number"], numbers.shape, np.float64)
    assert drawn[:-1, 0].tolist() == (4 / 64 + np.arange(count - 1)).tolist() and (drawn[-1] == -1).all()
    left = memory.get(places["loop"], block.shape, np.uint8)[loops.HEAD_BYTES :].reshape(own.shape).view(np.int32)
    assert left[:, loops.LEFT].tolist() == [*(row[2] - 1 for row in rows[:-1]), 5]
