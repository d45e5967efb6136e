"""Caches that wrap, compiled, against their meaning: long runs through small rings, on every level; and their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import at_once, levels, through

from rlx.backends.cpu.kernels.attention.shape import CHUNK
from rlx.backends.cpu.layouts import LAYOUTS
from rlx.backends.host import HOST
from rlx.compiler.executable import compile
from rlx.compiler.state_memory import StateMemory, capacities, extents_of, largest_window, state_bytes
from rlx.ir import ops
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
