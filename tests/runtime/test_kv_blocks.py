"""Caches of q8_0 and q4_0, compiled, against their meaning: full and ring, in chunks; their bytes, copies and sizes."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from compiled import at_once, levels, through
from state_rows import positions

from rlx.backends.cpu.layouts import LAYOUTS
from rlx.compiler.executable import compile
from rlx.compiler.state_memory import state_bytes
from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ, WINDOW_CTX
from rlx.ir.dtypes import I32, Q4_0, Q8_0, DType
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

Array = np.ndarray[Any, Any]
types = pytest.mark.parametrize("dtype", [Q8_0, Q4_0], ids=str)

LENGTH, HEADS, KV_HEADS, WIDTH = 330, 4, 1, 64
# Largest error as a share of the largest value. Turned keys are a little different in float64, so some of their codes
# are the next ones.
CEILING = 4e-6
TURNED = {Q8_0: 5e-4, Q4_0: 1e-2}
SPLITS = ([1] * LENGTH, [45, 33, 1, 7, 45, 45] + [1] * (LENGTH - 176))


def block_graph(dtype: DType, window: int | None = None, turned: bool = False) -> Graph:
    graph = Graph("blocks")
    q, k, v = (graph.input(n, [SEQ, h, WIDTH]) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
    if turned:
        positions = graph.input("positions", [SEQ], I32)
        angles = ops.rope_angles(positions, graph.constant("inv_freq", np.geomspace(1, 1e-3, WIDTH // 2)))
        q, k = (ops.rope(x, angles, style="neox") for x in (q, k))
    shape, wrap = (KV_HEADS, CTX if window is None else WINDOW_CTX, WIDTH), window is not None
    caches = [ops.kv_write(graph.state(n, shape, dtype), x, wrap=wrap) for n, x in (("keys", k), ("values", v))]
    graph.output("y", ops.attention(q, *caches, scale=WIDTH**-0.5, window=window))
    return graph


def feeds(graph: Graph) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    arrays = {n: rng.standard_normal((LENGTH, h, WIDTH)).astype(np.float32) for n, h in sizes.items()}
    arrays["positions"] = np.arange(LENGTH, dtype=np.int32)
    return {n: arrays[n] for n in graph.leaves("input")}


RUNS = ((None, False), (None, True), (84, True))  # window, whether keys are turned: each on one level, in turn
FOUND = levels()[::-1]


@pytest.mark.parametrize(("level", "window", "turned"), [(FOUND[i % len(FOUND)], *r) for i, r in enumerate(RUNS)])
@types
def test_long_runs(level: str, dtype: DType, window: int | None, turned: bool, cache: CompileCache) -> None:
    """Prompts in chunks and single rows, whose attention is cut into ranges from 129 positions on."""
    graph = block_graph(dtype, window, turned)
    arrays = feeds(graph)
    want = at_once(graph, arrays)
    ceiling = TURNED[dtype] if turned else CEILING
    with compile(graph, {"SEQ": (1, 45), "CTX": LENGTH, "WINDOW_CTX": 192}, target=level, cache=cache) as exe:
        for split in SPLITS:
            assert np.abs(through(exe, arrays, split) - want).max() <= ceiling * np.abs(want).max()


@types
def test_decoding_in_ranges_has_the_same_bits_for_any_number_of_workers(dtype: DType, cache: CompileCache) -> None:
    graph = block_graph(dtype)
    arrays, found = feeds(graph), []
    for threads in (1, 2, 5):
        bind = {"SEQ": (1, 1), "CTX": LENGTH}
        with compile(graph, bind, threads=threads, cache=cache) as exe:
            assert "acq_rel" in exe.llvm(), "ranges are counted"
            found.append(through(exe, arrays, [1] * LENGTH))
    assert all(np.array_equal(found[0], other) for other in found[1:])


@types
def test_states_hold_the_bytes_of_gguf(dtype: DType, cache: CompileCache) -> None:
    graph = block_graph(dtype)
    arrays = feeds(graph)
    kind = gguf.GGMLQuantizationType[dtype.name.upper()]
    with compile(graph, {"SEQ": (1, 45), "CTX": LENGTH}, cache=cache) as exe:
        through(exe, {name: x[:91] for name, x in arrays.items()}, [45, 1, 45])
        states = exe._states
        for name, x in (("keys", arrays["k"]), ("values", arrays["v"])):
            found = positions(states, name, 3, 91)
            want = gguf.quants.quantize(np.ascontiguousarray(x[3:91].swapaxes(0, 1)), kind)
            if name == "keys" and dtype is Q4_0:  # nibbles of neighbours share a byte
                assert np.array_equal(found.reshape(88, -1, 18)[..., :2], want.reshape(88, -1, 18)[..., :2])
            else:
                assert np.array_equal(found, want)
        size = KV_HEADS * 336 * dtype.row_bytes(WIDTH)
        assert (
            sum(buffer.nbytes for buffer in states.buffers.values())
            == 2 * size
            == state_bytes(graph, LENGTH, 45, LAYOUTS)
        )
