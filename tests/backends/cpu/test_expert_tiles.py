"""Linear layers of experts on tile registers, emulated and real: against float64, and bit for bit against a linear."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gguf.quants import GGMLQuantizationType, dequantize, quantize
from native import aligned, run
from test_experts import EXPERTS, call, chosen, inputs, stacked
from test_linear_tiles import WIDEST, ceiling, count, nearest, on
from test_linear_tiles import target as target  # a fixture

import rlx
from rlx import SEQ, dtypes, ops
from rlx.backends.cpu.kernels.experts import experts
from rlx.backends.cpu.kernels.experts.experts import units
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.target import Target
from rlx.ir import meaning
from rlx.ir.dtypes import BF16, F16, Q4_K, Q6_K, Q8_0, DType
from rlx.ir.interp import run as run_graph
from rlx.ir.meaning import round_to
from rlx.store.cache import CompileCache

expert_linear = partial(experts.expert_linear, tiles=True)

#: Root mean square of a block's error relative to its results, by what activations are rounded to.
PROGRAM_ERROR = {"bf16": 5e-3, "q8a": 2e-2, "f32": 1e-6}
Q8 = GGMLQuantizationType.Q8_0


def check(
    dtype: DType,
    target: Target,
    size: tuple[int, int],
    *,
    rows: int,
    slots: int = 3,
    x_slots: bool = False,
    gated: str | None = None,
) -> None:
    n, k = size
    matrices, values = [], []
    for seed in (0, 100)[: 2 if gated else 1]:
        packed, w = stacked(dtype, n, k, seed, target=target)
        matrices.append(packed)
        values.append(nearest(dtype, w))
    x, x_values = inputs("bf16", (rows, slots, k) if x_slots else (rows, k))
    ids = chosen(rows, slots)
    operands = [x, aligned(ids), *matrices]
    options: dict[str, Any] = {"experts": EXPERTS, "slots": slots, "x_slots": x_slots, "gated": gated}
    out = call(expert_linear(dtype, n, k, "bf16", target, **options), target, operands, (rows, slots, n), (dtype, k))
    sums = [meaning.expert_linear([abs(x_values), ids, abs(v)], {"gated": None}, {}) for v in values]
    want = meaning.expert_linear([x_values, ids, *values], {"gated": gated}, {})
    most = 2 * ceiling(dtype) * sums[0] * sums[1] + 1e-30 if gated else ceiling(dtype) * sums[0]
    assert (np.abs(out - want) <= most).all(), (np.abs(out - want) / most).max()
    if rows == 1:
        kernel = expert_linear(dtype, n, k, "bf16", target, single=True, **options)
        np.testing.assert_array_equal(call(kernel, target, operands, (rows, slots, n), (dtype, k)), out)


# Weights become bf16, and gates are computed, as in `linear/tiles.py`, which is tested for every type and gate.


@on(WIDEST)
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 1), (F16, 30), (Q4_K, 9)], ids=str)
def test_products(dtype: DType, rows: int, target: Target) -> None:
    check(dtype, target, (33, 512), rows=rows, x_slots=rows == 30)


@on(WIDEST)
def test_an_expert_of_more_rows_than_a_macro_tile(target: Target) -> None:
    check(Q8_0, target, (20, 64), rows=350, slots=4)


SPLITS = [(Q6_K, 256, None), (BF16, 1056, None), (BF16, 1056, "silu")]
BITS = [(Q6_K, 512, None), (Q4_K, 512, "silu"), (BF16, 1056, "silu")]


@on(WIDEST)
@pytest.mark.parametrize(("dtype", "k", "gated"), BITS, ids=str)
def test_bits_are_those_of_a_linear_of_the_expert(dtype: DType, k: int, gated: str | None, target: Target) -> None:
    """Of no row to more than a macro tile; in one panel, and in several with a short one."""
    n, slots, counts = 40, 2, (0, 1, 2, 15, 16, 17, 32, 33, 49, 141)
    matrices = [stacked(dtype, n, k, seed, len(counts), target)[0] for seed in ([0, 100] if gated else [0])]
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    x, _ = inputs("bf16", (len(ids), k))
    kernel = expert_linear(dtype, n, k, "bf16", target, experts=len(counts), slots=slots, x_slots=True, gated=gated)
    shape = (len(ids) // slots, slots, n)
    out = call(kernel, target, [x, aligned(ids), *matrices], shape, (dtype, k), len(counts)).reshape(-1, n)
    alone = linear(dtype, n, k, "bf16", target, gated=gated)
    for expert, rows in enumerate(counts):
        blocks = [aligned(m.reshape(len(counts), -1)[expert]) for m in matrices]
        want = np.empty((rows, n), np.float32)
        run(alone, target, aligned(x[ids == expert]), *blocks, want, end=count(n, k, rows, target), rows=rows, n=n)
        np.testing.assert_array_equal(out[ids == expert], want)


@on(WIDEST)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("dtype", "k", "gated"), SPLITS, ids=str)
def test_bits_do_not_depend_on_the_split(dtype: DType, k: int, gated: str | None, rows: int, target: Target) -> None:
    """Ranges that begin and end anywhere: an expert has 35 units in three stretches of 12, one of them without work."""
    n, slots = 35 * 16 - 3, 3
    sizes: dict[str, Any] = {"experts": EXPERTS, "slots": slots}
    matrices = [stacked(dtype, n, k, seed, target=target)[0] for seed in ([0, 100] if gated else [0])]
    x, _ = inputs("bf16", (rows, k))
    operands = [x, aligned(chosen(rows, slots)), *matrices]
    kernel = expert_linear(dtype, n, k, "bf16", target, **sizes, gated=gated, single=rows == 1)
    whole = call(kernel, target, operands, (rows, slots, n), (dtype, k))
    end, extents = units(dtype, n, k, **sizes, single=rows == 1), {} if rows == 1 else {"rows": rows}
    split = np.zeros_like(whole)
    for first, last in reversed(list(pairwise([0, 1, 4, 4, 11, 12, 14, 24, 26, 63, end - 1, end]))):
        run(kernel, target, *operands, split, begin=first, end=last, **extents)
    np.testing.assert_array_equal(split, whole)


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
