"""Linear layers of experts against float64, and bit for bit against the linear of each expert alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from levels import BF16_TARGETS, DOT_TARGETS, LEVELS, name
from native import aligned, run
from numpy.typing import NDArray
from test_linear import ERROR, GATES, prepared, sizes, weights

from rlx.backends.cpu import layouts
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.experts.experts import expert_linear, units
from rlx.backends.cpu.kernels.experts.rows import Experts
from rlx.backends.cpu.kernels.linear import linear
from rlx.backends.cpu.target import Target
from rlx.ir import meaning
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType

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
) -> None:
    n, k = size
    (packed, w), (packed_up, up) = (stacked(dtype, n, k, seed, target=target) for seed in (0, 100))
    matrices, values = ([packed, packed_up], [w, up]) if gated else ([packed], [w])
    for rows in rows_list:
        x, x_values = inputs(act, (rows, slots, k) if x_slots else (rows, k))
        ids = chosen(rows, slots)
        operands = [x, aligned(ids), *matrices]
        options: dict[str, Any] = {"experts": EXPERTS, "slots": slots, "x_slots": x_slots, "gated": gated}
        out = call(expert_linear(dtype, n, k, act, target, **options), target, operands, (rows, slots, n), (dtype, k))
        want = meaning.expert_linear([x_values, ids, *values], {"gated": gated}, {})
        sums = [meaning.expert_linear([abs(x_values), ids, abs(v)], {"gated": None}, {}) for v in values]
        ceiling = 1e-6 * sums[0] * sums[1] + 1e-30 if gated else ERROR[act] * sums[0]
        assert (np.abs(out - want) <= ceiling).all(), (rows, (np.abs(out - want) / ceiling).max())
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


BITS = [(Q6_K, "q8a", None), (Q4_K, "q8a", "silu"), (Q4_0, "f32", None), (F32, "f32", "silu"), (BF16, "bf16", None)]


@pytest.mark.parametrize(
    ("dtype", "act", "gated", "target"),
    [*((*row, LEVELS[-1]) for row in BITS), *((*row, t) for row, t in zip(BITS, LEVELS[:-1], strict=False))],
    ids=lambda v: name(v) if isinstance(v, Target) else str(v),
)
def test_bits_are_those_of_a_linear_of_the_expert(dtype: DType, act: str, gated: str | None, target: Target) -> None:
    """Whatever rows share a tile: experts of no row, of a few, of more than a macro tile."""
    needs(act, target)
    n, k, slots, counts = 40, 512, 2, (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 51)
    matrices = [stacked(dtype, n, k, seed, len(counts), target)[0] for seed in ([0, 100] if gated else [0])]
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    rows = len(ids) // slots
    x, _ = inputs(act, (len(ids), k))
    x = x.reshape(len(ids), -1)
    kernel = expert_linear(dtype, n, k, act, target, experts=len(counts), slots=slots, x_slots=True, gated=gated)
    out = call(kernel, target, [x, aligned(ids), *matrices], (rows, slots, n), (dtype, k), len(counts)).reshape(-1, n)
    alone = linear.linear(dtype, n, k, act, target, gated=gated)
    for expert, count in enumerate(counts):
        blocks = [aligned(m.reshape(len(counts), -1)[expert]) for m in matrices]
        want = np.empty((count, n), np.float32)
        run(alone, target, aligned(x[ids == expert]), *blocks, want, end=linear.units(n), rows=count, n=n)
        np.testing.assert_array_equal(out[ids == expert], want)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("dtype", "act", "gated"), BITS, ids=str)
def test_bits_do_not_depend_on_the_split(dtype: DType, act: str, gated: str | None, rows: int) -> None:
    """Ranges that begin and end anywhere: an expert has 35 units in three stretches of 12, one of them without work."""
    n, k, slots, target = 35 * 16 - 3, 256, 3, LEVELS[-1]
    needs(act, target)
    sizes: dict[str, Any] = {"experts": EXPERTS, "slots": slots}
    matrices = [stacked(dtype, n, k, seed, target=target)[0] for seed in ([0, 100] if gated else [0])]
    x, _ = inputs(act, (rows, k))
    operands = [x, aligned(chosen(rows, slots)), *matrices]
    kernel = expert_linear(dtype, n, k, act, target, **sizes, gated=gated, single=rows == 1)
    whole = call(kernel, target, operands, (rows, slots, n), (dtype, k))
    assert (units(dtype, n, k, **sizes), units(dtype, n, k, **sizes, single=True)) == (36 * EXPERTS, 35 * slots)
    end, extents = units(dtype, n, k, **sizes, single=rows == 1), {} if rows == 1 else {"rows": rows}
    split = np.zeros_like(whole)
    borders = [0, 1, 4, 4, 11, 12, 14, 24, 26, 63, end - 1, end]
    for first, last in reversed(list(pairwise(borders))):
        run(kernel, target, *operands, split, begin=first, end=last, **extents)
    np.testing.assert_array_equal(split, whole)


def test_thin_matrices_have_long_stretches() -> None:
    """Stretches of 8 KB, as of adapters of rank 16, kept memory from reading ahead: a third slower."""
    assert [Experts(8, 4096, 1, nbytes).stretch for nbytes in (512, 4352, 1 << 20)] == [128, 16, 16]
