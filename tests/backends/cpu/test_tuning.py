"""Tunings: every one gives the bits of the default, and none shares a cache entry with another."""

from __future__ import annotations

from dataclasses import replace

import emulated
import numpy as np
import pytest
from levels import DOT_TARGETS, LEVELS, name
from native import aligned, run
from test_linear import activations, weights

import rlx
from rlx.backends.cpu.kernels.experts import experts
from rlx.backends.cpu.kernels.linear.linear import linear, macro_rows, units
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tuning import Tuning
from rlx.compiler.compile import Compiler
from rlx.errors import ArgumentError
from rlx.ir.dtypes import BF16, Q4_K, Q8_0, DType
from rlx.passes.options import Options
from rlx.store.cache import CompileCache

#: Far from the defaults on either side, so that the same rows fall into other tiles and other halves of the kernel.
TUNINGS = (
    Tuning(64, 2, 3, 7, 10, 2, 2, 0, 0),
    Tuning(8192, 0, 8, 96, 36, 8, 4, 48, 512),
)
ROWS = (1, 7, 24, 35, 49)
N, K = 33, 512


def check(dtype: DType, act: str, target: Target, gated: str | None = None) -> None:
    packed, _ = weights(dtype, N, K, target=target)
    matrices = [packed] * (2 if gated else 1)
    kernels = [linear(dtype, N, K, act, target, gated=gated)]
    kernels += [linear(dtype, N, K, act, replace(target, tuned=t), gated=gated) for t in TUNINGS]
    assert len({kernel.symbol for kernel in kernels}) == len(kernels), "the tuning changed nothing"
    for rows in ROWS:
        x, _ = activations(act, rows, K)
        results = []
        for kernel in kernels:
            out = np.full((rows + 1, N), 7, np.float32)
            run(kernel, target, x, *matrices, out, end=units(N), rows=rows, n=N)
            assert (out[rows] == 7).all(), f"wrote past {rows} rows"
            results.append(out)
        for out in results[1:]:
            np.testing.assert_array_equal(out.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("target", LEVELS, ids=name)
def test_results_are_the_same_bit_for_bit(target: Target) -> None:
    """The kinds of activations take turns; below, the widest level has the other one, too."""
    turn = LEVELS.index(target)
    check(*((Q8_0, "q8a"), (BF16, "f32"), (Q4_K, "q8a"))[turn % 3], target)


def test_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.use(monkeypatch)
    target, rows, results = emulated.TARGETS[-1], 150, []
    (packed, _), (x, _) = weights(Q4_K, N, K), activations("bf16", rows, K)
    for nbytes in (target.tuning.macro_bytes_tiles, 1 << 16):
        chosen = replace(target, tuned=replace(target.tuning, macro_bytes_tiles=nbytes))
        macro, out = macro_rows(K, "bf16", chosen), np.zeros((rows, N), np.float32)
        assert macro is not None
        run(linear(Q4_K, N, K, "bf16", chosen), chosen, x, packed, out, end=-(-rows // macro) * 3, rows=rows, n=N)
        results.append((macro, out))
    assert results[0][0] > rows > results[1][0]
    np.testing.assert_array_equal(results[1][1].view(np.uint32), results[0][1].view(np.uint32))


@pytest.mark.parametrize("target", [LEVELS[-1], *(t for t in DOT_TARGETS if t.isa.moves_signs)], ids=name)
def test_experts_too(target: Target) -> None:
    rows, count, results = 60, 3, []
    stack = aligned(np.concatenate([weights(Q8_0, N, K, seed, target)[0] for seed in range(count)]))
    ids = aligned(np.random.default_rng(0).integers(0, count, (rows, 2)).astype(np.int32))
    x, _ = activations("q8a", rows, K)
    for tuning in (target.tuning, TUNINGS[0]):
        chosen, out = replace(target, tuned=tuning), np.zeros((rows, 2, N), np.float32)
        kernel = experts.expert_linear(Q8_0, N, K, "q8a", chosen, experts=count, slots=2)
        run(kernel, chosen, x, ids, stack, out, end=experts.units(Q8_0, N, K, experts=count, slots=2), rows=rows)
        results.append(out)
    assert results[0].any()
    np.testing.assert_array_equal(results[1].view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("field", Tuning())
def test_a_number_out_of_range_is_refused_by_name(field: str) -> None:
    for value in (-2, 1 << 30, 4.0, True, "6", None):
        with pytest.raises(ArgumentError, match=rf"tuning: {field} = "):
            replace(Tuning(), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="steps of 2"):
        Tuning(tile_rows_int8=5)


def test_two_tunings_never_share_a_program() -> None:
    graph = rlx.Graph("tuned")
    x = graph.input("x", [rlx.SEQ, 64])
    graph.output("y", rlx.ops.silu(x))
    options = Options(precision="exact", seq=(1, 4), all_rows=True)
    target = Target.host()
    targets = [target, *(replace(target, tuned=t) for t in TUNINGS)]
    targets += [replace(target, tuned=replace(target.tuning, prefetch=target.tuning.prefetch + 64))]
    keys = [Compiler(t, CompileCache(policy="off")).program(graph, options).key for t in targets]
    assert len({key.digest for key in keys}) == len(targets)
    defaults = replace(target, tuned=target.tuning)  # the same code, said aloud
    assert Compiler(defaults, CompileCache(policy="off")).program(graph, options).key == keys[0]
    assert keys[1].as_dict()["options"]["tuning"] == dict(TUNINGS[0])


def test_a_tuning_leaves_packed_weights_alone() -> None:
    """They take minutes of disk and time, and no packing kernel reads a tuning."""
    target = Target.host()
    plain, tuned = (Compiler(t, CompileCache(policy="off")) for t in (target, replace(target, tuned=TUNINGS[0])))
    assert plain.key(kind="weights") == tuned.key(kind="weights")
