"""Caches that wrap, compiled, against their meaning: long runs through small rings, on every level; and their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import at_once, levels, through
from state_rows import positions, put_positions, states_of

from rlx.backends.cpu.kernels.attention.shape import CHUNK
from rlx.backends.cpu.layouts import LAYOUTS
from rlx.backends.host import HOST
from rlx.compiler.executable import compile
from rlx.compiler.kv import capacities, extents_of, largest_window, state_bytes
from rlx.compiler.state_memory import StateMemory
from rlx.errors import ArgumentError, GraphError
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ, WINDOW_CTX, DimLike
from rlx.ir.dtypes import BF16, F16, F32, I32, DType
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

Array = np.ndarray[Any, Any]

LENGTH, HEADS, KV_HEADS, WIDTH = 250, 4, 2, 24
# Largest error as a share of the largest value; a key rounded to 16 bits may fall to the other side of a boundary.
CEILINGS = {F32: 4e-6, F16: 1e-3, BF16: 8e-3}


def ring_graph(window: int | None, dtype: DType = F32, capacity: DimLike = WINDOW_CTX, wrap: bool = True) -> Graph:
    """Rotated keys go through `rope_kv_write`, values through `kv_write`."""
    graph = Graph("ring")
    positions = graph.input("positions", [SEQ], I32)
    angles = ops.rope_angles(positions, graph.constant("inv_freq", np.geomspace(1, 1e-3, WIDTH // 2)))
    q = ops.rope(graph.input("q", [SEQ, HEADS, WIDTH]), angles, style="neox")
    k = ops.rope(graph.input("k", [SEQ, KV_HEADS, WIDTH]), angles, style="neox")
    shape = (KV_HEADS, capacity, WIDTH)
    keys = ops.kv_write(graph.state("keys", shape, dtype), k, wrap=wrap)
    values = ops.kv_write(graph.state("values", shape, dtype), graph.input("v", [SEQ, KV_HEADS, WIDTH]), wrap=wrap)
    graph.output("y", ops.attention(q, keys, values, scale=WIDTH**-0.5, window=window))
    return graph


def feeds(length: int = LENGTH) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    arrays = {n: rng.standard_normal((length, h, WIDTH)).astype(np.float32) for n, h in sizes.items()}
    return arrays | {"positions": np.arange(length, dtype=np.int32)}


SPLITS = {
    "decode": [1] * LENGTH,
    "odd chunks": [7, 45, 45, 1, 3, 44, 45, 45, 15],
    "prompt, then decode": [45, 33] + [1] * (LENGTH - 78),
}


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(("window", "dtype", "ctx"), [(20, F32, 64), (20, F16, 64), (84, BF16, 128), (1, F16, 64)])
def test_long_runs_through_a_small_ring(level: str, window: int, dtype: DType, ctx: int, cache: CompileCache) -> None:
    graph, arrays = ring_graph(window, dtype), feeds()
    want = at_once(graph, arrays)
    with compile(graph, {"SEQ": (1, 45), "WINDOW_CTX": ctx}, target=level, threads=2, cache=cache) as exe:
        assert exe._states.extents["WINDOW_CTX"] == ctx
        for split in SPLITS.values():
            error = np.abs(through(exe, arrays, split) - want).max()
            assert error <= CEILINGS[dtype] * np.abs(want).max()


@pytest.mark.parametrize("fusions", [(), ("rope",)])
def test_a_ring_gives_the_bits_of_a_whole_cache(fusions: tuple[str, ...], cache: CompileCache) -> None:
    arrays, found = feeds(), []
    profile = {"fusion": {"rope": bool(fusions)}}
    for graph, bind in (
        (ring_graph(20), {"WINDOW_CTX": 64}),
        (ring_graph(20, capacity=CTX, wrap=False), {"CTX": LENGTH}),
    ):
        with compile(graph, {"SEQ": (1, 45), **bind}, profile=profile, threads=2, cache=cache) as exe:
            found.append(through(exe, arrays, SPLITS["odd chunks"]))
    assert np.array_equal(*found)


def test_the_interpreter_wraps_alike() -> None:
    """The meaning through a ring of 64 is the meaning through a whole cache."""
    graph, arrays = ring_graph(20), feeds(150)
    want = at_once(graph, arrays)
    states = {n: np.full((KV_HEADS, 64, WIDTH), np.nan) for n in ("keys", "values")}
    states = {n: np.nan_to_num(s) for n, s in states.items()}
    rows, at = [], 0
    for count in (45, 1, 45, 45, 14):
        part = {n: a[at : at + count] for n, a in arrays.items()}
        env = {"SEQ": count, "PAST_SEQ": at, "WINDOW_CTX": 64}
        out, states = interp.run(graph, {**part, **states}, env, dtype=np.float64)
        rows.append(out["y"])
        at += count
    np.testing.assert_allclose(np.concatenate(rows), want, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- sizes


def test_capacities() -> None:
    assert LAYOUTS.page == CHUNK, "a group of positions that attention reads at once must be in one piece"
    graph = ring_graph(512)
    assert largest_window(graph) == 512
    assert capacities(graph, 32768, 512, LAYOUTS) == {"CTX": 32768, "WINDOW_CTX": 1088}, "512 + 511 + 63, rounded up"
    assert capacities(graph, 32768, 514, LAYOUTS) == {"CTX": 32768, "WINDOW_CTX": 1088}
    assert capacities(graph, 32768, 515, LAYOUTS) == {"CTX": 32768, "WINDOW_CTX": 1152}
    assert capacities(graph, 700, 512, LAYOUTS) == {"CTX": 704, "WINDOW_CTX": 704}
    assert capacities(graph, 17, 512, LAYOUTS) == {"CTX": 32, "WINDOW_CTX": 64}
    assert largest_window(ring_graph(512, capacity=CTX, wrap=False)) is None
    whole = ring_graph(None)
    assert largest_window(whole) is None
    assert capacities(whole, 700, 1, LAYOUTS)["WINDOW_CTX"] == 704, "attention without a window needs every position"
    assert state_bytes(graph, 32768, 512, LAYOUTS) == 2 * 4 * KV_HEADS * WIDTH * 1088
    with_states = StateMemory(
        graph, HOST, LAYOUTS, extents_of(graph, LAYOUTS, 300, 8)
    )  # a window of 512: rings never wrap
    sizes = [buffer.nbytes for buffer in with_states.buffers.values()]
    assert (sum(sizes), with_states.rings) == (2 * 4 * KV_HEADS * WIDTH * 320, ["keys", "values"])
    assert [with_states.first_read(length) for length in (0, 511, 574, 575, 638, 639)] == [0, 0, 0, 64, 64, 128]
    with_states.close()
    for rows in (1, 64, 200):  # whatever a step of so many rows reads is there when all of them are written
        states = StateMemory(graph, HOST, LAYOUTS, extents_of(graph, LAYOUTS, 1 << 20, rows))
        assert all(states.first_read(n) >= n + rows - (states.ring_capacity or 0) for n in range(2000))
        states.close()


def test_positions_are_copied_through_tiles_and_wraps() -> None:
    """What is put at positions comes back from them, and every other place keeps what it held."""
    rng = np.random.default_rng(1)
    for dtype in (F32, F16, BF16):
        states = states_of(ring_graph(20, dtype))
        assert states.ring_capacity == 64
        before = rng.integers(0, 1000, (KV_HEADS, 64, WIDTH)).astype(dtype.numpy)
        after = rng.integers(0, 1000, (KV_HEADS, 37, WIDTH)).astype(dtype.numpy)
        for name in ("keys", "values"):
            put_positions(states, name, 0, before)
            assert np.array_equal(positions(states, name, 64, 128), before), "the same places"
            put_positions(states, name, 113, after)  # places 49 .. 64 and 0 .. 22
            assert np.array_equal(positions(states, name, 113, 150), after)
            assert np.array_equal(positions(states, name, 22, 49), before[:, 22:49])
            assert not positions(states, name, 5, 9).flags.writeable
        tiles = states.buffers["keys"].view(dtype.numpy or "", (KV_HEADS, 4, WIDTH, 16))
        assert tiles is not None
        assert np.array_equal(tiles[1, 0, 3], positions(states, "keys", 64, 80)[1, :, 3]), "keys lie in tiles"
        states.close()


# ---------------------------------------------------------------------------------------------------- refusals


def test_what_does_not_fit_a_ring_is_refused(cache: CompileCache) -> None:
    arrays = feeds(60)
    with compile(ring_graph(20), {"WINDOW_CTX": 50}, cache=cache) as exe:
        assert exe._states.extents["WINDOW_CTX"] == 64, "rounded up"
        through(exe, arrays, [45, 15])
        message = r"positions 60 to 105 do not fit a cache of 64, which wraps .* has room for 65\. .* pass fewer rows"
        with pytest.raises(ArgumentError, match=message):
            exe(**{n: a[:46] for n, a in arrays.items()}, PAST_SEQ=60)
        with pytest.raises(ArgumentError, match="WINDOW_CTX is 128, the caches have room for 64"):
            exe(**arrays, PAST_SEQ=0, WINDOW_CTX=128)
    with compile(ring_graph(None), {"WINDOW_CTX": 64}, cache=cache) as exe:
        with pytest.raises(ArgumentError, match="positions 5 to 64 do not fit a cache of 64"):
            exe(**arrays, PAST_SEQ=5)
        assert exe(**arrays, PAST_SEQ=4)["y"].shape == (60, HEADS * WIDTH)
    with pytest.raises(GraphError, match=r"state 'keys': the ring has 80 positions\. Rings are read in groups of 64"):
        compile(ring_graph(20, capacity=80), cache=cache)


def test_a_window_over_a_cache_of_odd_size_does_not_wrap(cache: CompileCache) -> None:
    """A windowed read beyond a capacity of 80 would run over its end."""
    graph = Graph("read")
    q = graph.input("q", [SEQ, HEADS, WIDTH])
    states = [graph.state(name, (KV_HEADS, 80, WIDTH)) for name in ("keys", "values")]
    graph.output("y", ops.attention(q, *states, scale=1.0, window=4))
    with compile(graph, cache=cache) as exe:
        assert np.isfinite(exe(q=feeds(4)["q"], PAST_SEQ=76)["y"]).all()
        with pytest.raises(
            ArgumentError, match="positions 77 to 80 do not fit a cache of 80, which wraps if it is a mult"
        ):
            exe(q=feeds(4)["q"], PAST_SEQ=77)


# ---------------------------------------------------------------------------------------------------- recurrent states


def test_recurrent_states_start_as_zeros_and_return_to_them(cache: CompileCache) -> None:
    graph = Graph("conv")
    x = graph.input("x", [SEQ, 8])
    graph.output("y", ops.causal_conv(graph.state("rows", (3, 8)), x, graph.weight("taps", [8, 4])))
    rng = np.random.default_rng(2)
    taps, rows = rng.standard_normal((8, 4)), rng.standard_normal((9, 8)).astype(np.float32)
    padded = np.concatenate([np.zeros((3, 8)), rows])
    want = np.stack([(padded[r : r + 4] * taps.T).sum(0) for r in range(9)])
    with compile(graph, {"taps": taps}, cache=cache) as exe:
        for _ in range(2):
            found = [exe(x=rows[:5])["y"], exe(x=rows[5:6])["y"], exe(x=rows[6:])["y"]]
            np.testing.assert_allclose(np.concatenate(found), want, rtol=1e-5, atol=1e-5)
            exe.reset()
