"""Linear layers of experts against float64, and bit for bit against the linear of each expert alone; on tile registers,
too, emulated and real.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gguf.quants import GGMLQuantizationType, dequantize, quantize
from levels import BF16_TARGETS, DOT_TARGETS, LEVELS, name
from native import aligned, run
from numpy.typing import NDArray
from test_linear import ERROR, GATES, prepared, sizes, weights
from test_linear_tiles import WIDEST, ceiling, count, nearest, on
from test_linear_tiles import target as target  # a fixture

import rlx
from rlx import SEQ, dtypes, ops
from rlx.backends.cpu import layouts
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.experts.experts import expert_linear, units
from rlx.backends.cpu.kernels.experts.rows import Experts
from rlx.backends.cpu.kernels.linear import linear
from rlx.backends.cpu.target import Target
from rlx.ir import meaning
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType
from rlx.ir.interp import run as run_graph
from rlx.ir.meaning import round_to
from rlx.store.cache import CompileCache

Array = NDArray[Any]

INTEGER = [t for t in layouts.PACKED_DTYPES if t.has_integer_codes]
#: The rest of f32 activations differs from int8 ones by nothing that is of experts.
FLOATS = [t for t in layouts.PACKED_DTYPES if t not in INTEGER] + INTEGER[::12]
EXPERTS = 5
ROWS = ((1, 33), (2, 9), (30,))


def stacked(
    dtype: DType, n: int, k: int, seed: int = 0, experts: int = EXPERTS, target: Target | None = None
) -> tuple[Array, Array]:
    """Packed experts one after the other, and their values in float64 [experts, n, k]."""
    packed, values = zip(*(weights(dtype, n, k, seed + e, target) for e in range(experts)), strict=True)
    assert len(packed[0]) == layouts.packed_bytes(dtype, n, k)
    return aligned(np.concatenate(packed)), np.stack(values)


def chosen(rows: int, slots: int, seed: int = 0) -> Array:
    """Different experts a row; the first expert is the favourite, the last one is never chosen."""
    rng = np.random.default_rng([rows, slots, seed])
    odds = np.array([4, 1, 1, 1, 0]) / 7
    ids = [rng.choice(EXPERTS, slots, replace=False, p=odds) for _ in range(rows)]
    return np.array(ids, np.int32)


def inputs(act: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(what the kernel reads, the same in float64); gates bend around zero, so they are of size 1."""
    x = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    rows, values = prepared(act, x.reshape(-1, shape[-1]))
    return rows, values.reshape(shape)


def check(
    dtype: DType,
    act: str,
    target: Target,
    size: tuple[int, int],
    *,
    rows_list: tuple[int, ...],
    slots: int = 3,
    x_slots: bool = False,
    gated: str | None = None,
    tiles: bool = False,
) -> None:
    n, k = size
    (packed, w), (packed_up, up) = (stacked(dtype, n, k, seed, target=target) for seed in (0, 100))
    w, up = (nearest(dtype, each) if tiles else each for each in (w, up))
    matrices, values = ([packed, packed_up], [w, up]) if gated else ([packed], [w])
    for rows in rows_list:
        x, x_values = inputs(act, (rows, slots, k) if x_slots else (rows, k))
        ids = chosen(rows, slots)
        operands = [x, aligned(ids), *matrices]
        options: dict[str, Any] = {"experts": EXPERTS, "slots": slots, "x_slots": x_slots, "gated": gated}
        options |= {"tiles": tiles}
        out = call(expert_linear(dtype, n, k, act, target, **options), target, operands, (rows, slots, n), (dtype, k))
        want = meaning.expert_linear([x_values, ids, *values], {"gated": gated}, {})
        sums = [meaning.expert_linear([abs(x_values), ids, abs(v)], {"gated": None}, {}) for v in values]
        one, both = (ceiling(dtype), 2 * ceiling(dtype)) if tiles else (ERROR[act], 1e-6)
        most = both * sums[0] * sums[1] + 1e-30 if gated else one * sums[0]
        assert (np.abs(out - want) <= most).all(), (rows, (np.abs(out - want) / most).max())
        if rows == 1:
            kernel = expert_linear(dtype, n, k, act, target, single=True, **options)
            np.testing.assert_array_equal(call(kernel, target, operands, (rows, slots, n), (dtype, k)), out)


def call(
    kernel: Kernel,
    target: Target,
    operands: list[Array],
    shape: tuple[int, int, int],
    weights: tuple[DType, int],
    experts: int = EXPERTS,
) -> Array:
    """The result [rows, slots, n] for weights of a type and of so many k."""
    (rows, slots, n), (dtype, k) = shape, weights
    out = np.full((rows + 1, slots, n), 7, np.float32)
    if kernel.extents:
        run(kernel, target, *operands, out, end=units(dtype, n, k, experts=experts, slots=slots), rows=rows)
    else:
        run(kernel, target, *operands, out, end=units(dtype, n, k, experts=experts, slots=slots, single=True))
    assert (out[rows] == 7).all(), f"wrote past {rows} rows"
    return out[:rows]


# The arithmetic is that of `linear`, which is tested for every type on every target: here they take turns.


@pytest.mark.parametrize("dtype", INTEGER[::6], ids=str)
def test_int8_activations(dtype: DType) -> None:
    turn = INTEGER.index(dtype)
    target = DOT_TARGETS[turn % len(DOT_TARGETS)]
    check(dtype, "q8a", target, sizes(dtype, turn), rows_list=ROWS[turn % 3], x_slots=turn % 2 == 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_f32_activations(dtype: DType) -> None:
    turn = FLOATS.index(dtype)
    check(dtype, "f32", LEVELS[turn % len(LEVELS)], sizes(dtype, turn), rows_list=ROWS[turn % 3], x_slots=turn % 2 == 0)


@pytest.mark.parametrize("target", DOT_TARGETS, ids=name)
@pytest.mark.parametrize("dtype", [Q8_0, Q5_K], ids=str)
def test_every_target(dtype: DType, target: Target) -> None:
    check(dtype, "q8a", target, (33, 256), rows_list=(1, 20))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("dtype", "act"), [(Q4_0, "q8a"), (F16, "f32")], ids=str)
def test_gates(dtype: DType, act: str, gate: str) -> None:
    check(dtype, act, LEVELS[-1], (33, 96), rows_list=(1, 30), gated=gate, x_slots=gate == "silu")


@pytest.mark.parametrize("target", BF16_TARGETS, ids=name)
@pytest.mark.parametrize("gated", [None, "silu"])
def test_bf16_activations(gated: str | None, target: Target) -> None:
    check(BF16, "bf16", target, (33, 70), rows_list=(1, 20, 150), gated=gated, x_slots=gated is None)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("act", ["q8a", "f32"])
def test_an_expert_of_more_rows_than_a_macro_tile(act: str, slots: int) -> None:
    check(Q8_0, act, LEVELS[-1], (20, 64), rows_list=(350,), slots=slots)


def needs(act: str, target: Target) -> None:
    if act == "bf16" and not target.has_bf16_dots:
        pytest.skip("this target has no dot products of bf16")


# Weights become bf16 and gates are computed as in `linear/tiles.py`, which is tested for every type and gate.
@on(WIDEST)
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 1), (F16, 30), (Q4_K, 9)], ids=str)
def test_products_on_tiles(dtype: DType, rows: int, target: Target) -> None:
    check(dtype, "bf16", target, (33, 512), rows_list=(rows,), x_slots=rows == 30, tiles=True)


@on(WIDEST)
def test_more_rows_than_a_macro_tile_on_tiles(target: Target) -> None:
    check(Q8_0, "bf16", target, (20, 64), rows_list=(350,), slots=4, tiles=True)


BITS = [(Q6_K, "q8a", None), (Q4_K, "q8a", "silu"), (Q4_0, "f32", None), (F32, "f32", "silu"), (BF16, "bf16", None)]


@pytest.mark.parametrize(
    ("dtype", "act", "gated", "target"),
    [*((*row, LEVELS[-1]) for row in BITS), *((*row, t) for row, t in zip(BITS, LEVELS[:-1], strict=False))],
    ids=lambda v: name(v) if isinstance(v, Target) else str(v),
)
def test_bits_are_those_of_a_linear_of_the_expert(dtype: DType, act: str, gated: str | None, target: Target) -> None:
    """Whatever rows share a tile: experts of no row, of a few, of more than a macro tile."""
    needs(act, target)
    check_alone(dtype, 512, act, gated, target, (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 51))


@on(WIDEST)
@pytest.mark.parametrize(
    ("dtype", "k", "gated"), [(Q6_K, 512, None), (Q4_K, 512, "silu"), (BF16, 1056, "silu")], ids=str
)
def test_bits_on_tiles_are_those_of_a_linear_of_the_expert(
    dtype: DType, k: int, gated: str | None, target: Target
) -> None:
    """In one panel, and in several with a short one."""
    check_alone(dtype, k, "bf16", gated, target, (0, 1, 2, 15, 16, 17, 32, 33, 49, 141), tiles=True)


def check_alone(
    dtype: DType, k: int, act: str, gated: str | None, target: Target, counts: tuple[int, ...], tiles: bool = False
) -> None:
    n, slots = 40, 2
    matrices = [stacked(dtype, n, k, seed, len(counts), target)[0] for seed in ([0, 100] if gated else [0])]
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    x, _ = inputs(act, (len(ids), k))
    x = x.reshape(len(ids), -1)
    options: dict[str, Any] = {"slots": slots, "x_slots": True, "gated": gated, "tiles": tiles}
    kernel = expert_linear(dtype, n, k, act, target, experts=len(counts), **options)
    shape = (len(ids) // slots, slots, n)
    out = call(kernel, target, [x, aligned(ids), *matrices], shape, (dtype, k), len(counts)).reshape(-1, n)
    alone = linear.linear(dtype, n, k, act, target, gated=gated)
    for expert, rows in enumerate(counts):
        blocks = [aligned(m.reshape(len(counts), -1)[expert]) for m in matrices]
        want, end = np.empty((rows, n), np.float32), count(n, k, rows, target) if tiles else linear.units(n)
        run(alone, target, aligned(x[ids == expert]), *blocks, want, end=end, rows=rows, n=n)
        np.testing.assert_array_equal(out[ids == expert], want)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("dtype", "act", "gated"), BITS, ids=str)
def test_bits_do_not_depend_on_the_split(dtype: DType, act: str, gated: str | None, rows: int) -> None:
    needs(act, LEVELS[-1])
    check_split(dtype, 256, act, gated, rows, LEVELS[-1])


@on(WIDEST)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    ("dtype", "k", "gated"), [(Q6_K, 256, None), (BF16, 1056, None), (BF16, 1056, "silu")], ids=str
)
def test_bits_on_tiles_do_not_depend_on_the_split(
    dtype: DType, k: int, gated: str | None, rows: int, target: Target
) -> None:
    check_split(dtype, k, "bf16", gated, rows, target, tiles=True)


def check_split(
    dtype: DType, k: int, act: str, gated: str | None, rows: int, target: Target, tiles: bool = False
) -> None:
    """Ranges that begin and end anywhere: an expert has 35 units in three stretches of 12, one of them without work."""
    n, slots = 35 * 16 - 3, 3
    sizes: dict[str, Any] = {"experts": EXPERTS, "slots": slots}
    matrices = [stacked(dtype, n, k, seed, target=target)[0] for seed in ([0, 100] if gated else [0])]
    x, _ = inputs(act, (rows, k))
    operands = [x, aligned(chosen(rows, slots)), *matrices]
    kernel = expert_linear(dtype, n, k, act, target, **sizes, gated=gated, single=rows == 1, tiles=tiles)
    whole = call(kernel, target, operands, (rows, slots, n), (dtype, k))
    if not tiles:
        both = units(dtype, n, k, **sizes), units(dtype, n, k, **sizes, single=True)
        assert both == (36 * EXPERTS, 35 * slots)
    end, extents = units(dtype, n, k, **sizes, single=rows == 1), {} if rows == 1 else {"rows": rows}
    split = np.zeros_like(whole)
    for first, last in reversed(list(pairwise([0, 1, 4, 4, 11, 12, 14, 24, 26, 63, end - 1, end]))):
        run(kernel, target, *operands, split, begin=first, end=last, **extents)
    np.testing.assert_array_equal(split, whole)


def test_thin_matrices_have_long_stretches() -> None:
    """Stretches of 8 KB, as of adapters of rank 16, kept memory from reading ahead: a third slower."""
    assert [Experts(8, 4096, 1, nbytes).stretch for nbytes in (512, 4352, 1 << 20)] == [128, 16, 16]


#: Root mean square of a block's error relative to its results, by what activations are rounded to.
PROGRAM_ERROR = {"bf16": 5e-3, "q8a": 2e-2, "f32": 1e-6}
Q8 = GGMLQuantizationType.Q8_0


@on(WIDEST)
@pytest.mark.parametrize(("dtype", "least", "act"), [(BF16, 2, "bf16"), (Q8_0, 80, "bf16"), (Q8_0, 79, "q8a")], ids=str)
def test_experts_in_a_program(dtype: DType, least: int, act: str, target: Target) -> None:
    """A feed-forward block, from passes to results; two of five experts a row get 32 rows on average from 80 on.

    Weights in bf16 want dots of bf16 beside the tiles, as level amx has them.
    """
    if dtype is BF16 and not target.has_bf16_dots:
        act = "f32"
    graph, (n, k), rows, slots = rlx.Graph("experts"), (64, 96), 90, 2
    x, ids = graph.input("x", [SEQ, k]), graph.input("ids", [SEQ, slots], dtypes.I32)
    shapes = {"gate": (EXPERTS, n, k), "up": (EXPERTS, n, k), "down": (EXPERTS, k, n)}
    gate, up, down = (graph.weight(name, shape, dtype) for name, shape in shapes.items())
    hidden = ops.silu(ops.expert_linear(x, ids, gate, bf16=True)) * ops.expert_linear(x, ids, up, bf16=True)
    graph.output("y", ops.expert_linear(hidden, ids, down, bf16=True))
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    given = values if dtype is BF16 else {name: quantize(v, Q8) for name, v in values.items()}
    bind = {"SEQ": (least, 128), **given}
    with rlx.compile(graph, bind, target=target, precision="auto", cache=CompileCache.default("off")) as exe:
        assert all(node["tiles"] == (act == "bf16") for node in exe.graph.nodes() if node.op == "expert_linear")
        assert {node.dtype.name for node in exe.graph.nodes() if node.op == "quantize"} == {act} - {"f32"}
        inputs = {"x": rng.standard_normal((rows, k)).astype(np.float32), "ids": chosen(rows, slots)}
        found = exe(**inputs)["y"]
    known = {name: round_to(v, "bf16") if dtype is BF16 else dequantize(v, Q8) for name, v in given.items()}
    wanted = run_graph(graph, {**inputs, **known}, {"SEQ": rows}, dtype=np.float64)[0]["y"]
    assert found.shape == wanted.shape == (rows, slots, k)
    error = np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean())
    assert error < PROGRAM_ERROR[act], error
