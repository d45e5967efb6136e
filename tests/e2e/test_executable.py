"""`rlx.compile` as its users meet it: what it takes, what it refuses, what it keeps between calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import pytest

import rlx
from rlx import CTX, PAST_SEQ, SEQ, dtypes, ops
from rlx.errors import ArgumentError, BusyError, CompileError, GraphError, ProfileError, RlxError
from rlx.ir.dims import symbol

Array = np.ndarray[Any, Any]

ROWS, WIDTH = 32, 64
RNG = np.random.default_rng(0)
W = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
X = RNG.standard_normal((5, WIDTH)).astype(np.float32)
Y = X.astype(np.float64) @ W.T.astype(np.float64)


def projection(dtype: dtypes.DType = dtypes.F32) -> rlx.Graph:
    graph = rlx.Graph("projection")
    graph.output("y", ops.linear(graph.input("x", [SEQ, WIDTH]), graph.weight("w", [ROWS, WIDTH], dtype)))
    return graph


def memory(capacity: Any = CTX, at: Any = PAST_SEQ) -> rlx.Graph:
    """Attention over what was seen so far."""
    graph = rlx.Graph("memory")
    x = graph.input("x", [SEQ, 2, 16])
    caches = [ops.kv_write(graph.state(name, [2, capacity, 16]), x, at=at) for name in ("keys", "values")]
    graph.output("y", ops.attention(x, *caches, scale=0.25))
    return graph


def lookup() -> rlx.Graph:
    graph = rlx.Graph("lookup")
    graph.output("y", ops.embedding(graph.weight("table", [16, 32]), graph.input("ids", [SEQ], dtypes.I32)))
    return graph


def of_size(name: str) -> rlx.Graph:
    graph = rlx.Graph("sized")
    graph.output("y", ops.silu(graph.input("x", [symbol(name), WIDTH])))
    return graph


def close_to(found: Array, expected: Array) -> bool:
    assert found.shape == expected.shape
    return bool(np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max())


@pytest.fixture(scope="module")
def plain() -> Iterator[rlx.Executable]:
    with rlx.compile(projection(), bind={"w": W}) as exe:
        yield exe


@pytest.fixture(scope="module")
def remembering() -> Iterator[rlx.Executable]:
    with rlx.compile(memory(), bind={"CTX": 32}) as exe:
        yield exe


# ---------------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("given", [X, X.astype(np.float64), X.tolist(), np.asfortranarray(X), X[:1], X[::2]])
def test_inputs_are_numbers_in_any_form(plain: rlx.Executable, given: Any) -> None:
    assert close_to(plain(x=given)["y"], np.asarray(given, np.float64) @ W.T.astype(np.float64))


def bf16_bits(values: Array) -> Array:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


ROUNDED = (bf16_bits(W).astype(np.uint32) << 16).view(np.float32)  # W on the bf16 grid: f32 -> bf16 loses nothing
HALVES = W.astype(np.float16)


@pytest.mark.parametrize(
    ("dtype", "given", "values"),
    [
        pytest.param(dtypes.F32, W, W, id="f32"),
        pytest.param(dtypes.F32, np.asfortranarray(W), W, id="f32-fortran"),
        pytest.param(dtypes.F32, HALVES, HALVES, id="f32-from-f16"),
        pytest.param(dtypes.F32, np.ones((ROWS, WIDTH), int), np.ones((ROWS, WIDTH)), id="f32-from-int"),
        pytest.param(dtypes.F16, HALVES, HALVES, id="f16"),
        pytest.param(dtypes.F16, W, HALVES, id="f16-from-f32"),
        pytest.param(dtypes.F16, HALVES.view(np.uint8), HALVES, id="f16-bytes"),
        pytest.param(dtypes.BF16, bf16_bits(ROUNDED), ROUNDED, id="bf16-bits"),
        pytest.param(dtypes.BF16, bf16_bits(ROUNDED).view(np.uint8).reshape(-1), ROUNDED, id="bf16-bytes"),
        pytest.param(dtypes.BF16, ROUNDED, ROUNDED, id="bf16-from-f32"),
    ],
)
def test_float_weights(dtype: dtypes.DType, given: Array, values: Array) -> None:
    with rlx.compile(projection(dtype), bind={"w": given}) as exe:
        assert close_to(exe(x=X)["y"], X.astype(np.float64) @ values.astype(np.float64).T)


@pytest.mark.parametrize("form", ["as_rows", "flat"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantized_weights_are_the_blocks_of_a_gguf_file(name: str, form: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quants.quantize(W, kind)
    values = gguf.quants.dequantize(blocks, kind).astype(np.float64)
    with rlx.compile(projection(dtypes.DTYPES[name.lower()])) as exe:
        exe.bind(w=blocks if form == "as_rows" else blocks.reshape(-1))
        assert close_to(exe(x=X)["y"], X.astype(np.float64) @ values.T)


def test_weights_may_come_later_with_the_call_and_again(plain: rlx.Executable) -> None:
    with rlx.compile(projection()) as exe:
        assert close_to(exe(x=X, w=2 * W)["y"], 2 * Y)
        assert close_to(exe(x=X)["y"], 2 * Y), "they stay"
        assert close_to(exe.bind(w=W)(x=X)["y"], Y)
        assert close_to(plain(x=X)["y"], Y), "the other executable has weights of its own"


# ---------------------------------------------------------------------------------------------------- states


def attended(rows: Array) -> Array:
    """What `memory` computes from the first call on, in float64."""
    heads = rows.astype(np.float64).swapaxes(0, 1)
    scores = np.einsum("hqd,hkd->hqk", heads, heads) * 0.25
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,hkd->hqd", shares / shares.sum(-1, keepdims=True), heads)
    return mixed.swapaxes(0, 1).reshape(len(rows), -1)


def test_states_persist_and_belong_to_one_executable(remembering: rlx.Executable) -> None:
    rows = RNG.standard_normal((12, 2, 16)).astype(np.float32)
    expected = attended(rows)
    with rlx.compile(memory(), bind={"CTX": 32}) as other:
        for i in range(12):
            found = remembering(x=rows[i : i + 1], PAST_SEQ=i)["y"]
            assert close_to(found, expected[i : i + 1])
            other(x=rows[::-1][i : i + 1], PAST_SEQ=i)
    assert close_to(remembering(x=rows[6:], PAST_SEQ=6)["y"], expected[6:]), "written over, the same"


@pytest.mark.parametrize("past", [29, 32, 33, 1000])
def test_a_step_beyond_the_caches_is_refused(remembering: rlx.Executable, past: int) -> None:
    rows = RNG.standard_normal((4, 2, 16)).astype(np.float32)
    before = remembering(x=rows, PAST_SEQ=28)["y"]
    message = rf"state 'keys': positions {past} to {past + 3} do not fit a cache of 32\. Compile with a larger capacity"
    with pytest.raises(ArgumentError, match=message):
        remembering(x=rows, PAST_SEQ=past)
    assert np.array_equal(remembering(x=rows, PAST_SEQ=28)["y"], before)


# ---------------------------------------------------------------------------------------------------- what it refuses

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({}, "inputs are missing: x. The graph has: x."),
    "unknown": ({"x": X, "z": X}, "inputs are unknown: z. The graph has: x."),
    "one axis": ({"x": X[0]}, "input 'x': expected shape [64, 64], found [64]. Its shape is [SEQ, 64]."),
    "width": ({"x": X[:, :3]}, "input 'x': expected shape [5, 64], found [5, 3]"),
    "no rows": ({"x": X[:0]}, "input 'x': SEQ is 0, expected a whole number from 1 to 512"),
    "too many rows": ({"x": np.ones((513, WIDTH))}, "SEQ is 513, expected a whole number from 1 to 512"),
    "other SEQ": ({"x": X, "SEQ": 2}, "input 'x': expected shape [2, 64], found [5, 64]"),
    "SEQ of text": ({"x": X, "SEQ": "2"}, "SEQ is '2', expected a whole number from 1 to 512"),
    "text": ({"x": "abc"}, "input 'x': expected numbers, found <U3"),
    "complex": ({"x": X.astype(complex)}, "input 'x': expected numbers, found complex128"),
    "ragged": ({"x": [[1.0], [1.0, 2.0]]}, "input 'x': this is no array: "),
    "weight": ({"x": X, "w": W.T}, "weight 'w': expected shape [32, 64], found [64, 32]"),
    "nothing": ({"x": X, "w": None}, "weight 'w': expected numbers, found object"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_are_refused(plain: rlx.Executable, case: str) -> None:
    values, message = CALLS[case]
    with pytest.raises(ArgumentError, match=re.escape(message)):
        plain(**values)
    assert close_to(plain(x=X)["y"], Y), "a refused call changes nothing"


BLOCKS = gguf.quants.quantize(W, gguf.GGMLQuantizationType.Q8_0)
WEIGHTS: dict[str, tuple[dtypes.DType, Any, str]] = {
    "unknown": (dtypes.F32, None, "no weight is called 'v'. Weights: w."),
    "floats for blocks": (dtypes.Q8_0, W, "expected 2176 bytes of q8_0[32, 64] as uint8, found float32[32, 64]"),
    "a row short": (dtypes.Q8_0, BLOCKS[:-1], "expected 2176 bytes of q8_0[32, 64] as uint8, found uint8[31, 68]"),
    "as many bytes": (dtypes.Q8_0, np.zeros(544, np.float32), "as uint8, found float32[544]. Quantize the values"),
    "f16 transposed": (dtypes.F16, W.T.astype(np.float16), "expected shape [32, 64], found [64, 32]"),
    "bf16 transposed": (dtypes.BF16, np.zeros((64, 32), np.uint16), "expected shape [32, 64], found [64, 32]"),
    "f16 bytes short": (dtypes.F16, np.zeros(4095, np.uint8), "expected shape [32, 64], found [4095]"),
    "text": (dtypes.F32, [["a"] * WIDTH] * ROWS, "weight 'w': expected numbers, found <U1"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_refused(case: str) -> None:
    dtype, value, message = WEIGHTS[case]
    with rlx.compile(projection(dtype)) as exe, pytest.raises(ArgumentError, match=re.escape(message)):
        exe.bind(**({"v": W} if case == "unknown" else {"w": value}))


def test_a_weight_of_any_size_is_refused() -> None:
    graph = rlx.Graph("sum")
    graph.output("y", graph.input("x", [rlx.SEQ, 8]) + graph.weight("w", [rlx.SEQ, 8]))
    with pytest.raises(ArgumentError, match=r"the size of weight 'w' is not known: its shape is \[SEQ, 8\]"):
        rlx.compile(graph, bind={"SEQ": (1, 4), "w": np.zeros((2, 8))})
    with rlx.compile(graph, bind={"SEQ": 2, "w": np.ones((2, 8))}) as exe:
        assert exe(x=np.ones((2, 8)))["y"].tolist() == [[2.0] * 8] * 2


def test_row_numbers_outside_the_table_are_refused() -> None:
    with rlx.compile(lookup(), bind={"table": np.arange(512.0).reshape(16, 32)}) as exe:
        assert exe(ids=[15, 0])["y"][:, 0].tolist() == [480.0, 0.0]
        for ids, message in (
            ([0, 16], "input 'ids': 16 is out of range: the table has 16 rows"),
            ([-1], "input 'ids': -1 is out of range: the table has 16 rows"),
            ([2**40], f"input 'ids': {2**40} does not fit int32"),
            ([1.0], "input 'ids': expected whole numbers, found float64"),
        ):
            with pytest.raises(ArgumentError, match=re.escape(message)):
                exe(ids=ids)


def argmax_of(width: int) -> rlx.Graph:
    graph = rlx.Graph("argmax")
    best = ops.argmax(graph.input("x", [SEQ, width]))
    graph.output("y", ops.embedding(graph.weight("table", [16, 32]), best))
    return graph


def unpackable(dtype: dtypes.DType) -> rlx.Graph:
    graph = rlx.Graph("unpackable")
    graph.output("y", ops.linear(graph.input("x", [SEQ, 256]), graph.weight("w", [ROWS, 256], dtype)))
    return graph


COMPILES: dict[str, tuple[Callable[[], rlx.Graph], dict[str, Any], type[RlxError], str]] = {
    "no graph": (lambda: "graph", {}, ArgumentError, "expected a Graph, found 'graph'"),  # type: ignore[dict-item,return-value]
    "no outputs": (lambda: rlx.Graph("g"), {}, GraphError, "graph 'g': the graph has no outputs"),
    "unknown name": (projection, {"bind": {"v": W}}, ArgumentError, "has no symbol and no weight 'v'. It has: SEQ, w."),
    "shape": (projection, {"bind": {"w": W.T}}, ArgumentError, "expected shape [32, 64], found [64, 32]"),
    "SEQ 0": (projection, {"bind": {"SEQ": 0}}, ArgumentError, "SEQ is 0, expected a whole number from 1 to 1048576"),
    "SEQ down": (projection, {"bind": {"SEQ": (5, 2)}}, ArgumentError, "(5, 2) is no range of row counts"),
    "SEQ text": (projection, {"bind": {"SEQ": "a"}}, ArgumentError, "SEQ is 'a', expected a whole number"),
    "SEQ float": (projection, {"bind": {"SEQ": 1.5}}, ArgumentError, "SEQ is 1.5, expected a whole number"),
    "CTX 0": (memory, {"bind": {"CTX": 0}}, ArgumentError, "CTX is 0, expected a whole number from 1"),
    "no range": (lambda: of_size("N"), {}, ArgumentError, 'symbol N has no range. Give its lowest and highest value'),
    "precision": (projection, {"precision": "fast"}, ArgumentError, "precision 'fast' is unknown"),
    "target": (projection, {"target": "sse"}, rlx.TargetError, "unknown target level 'sse'. Use native"),
    "threads": (projection, {"threads": 0}, ArgumentError, "threads is 0, expected a whole number from 1 to 1024"),
    "profile": (projection, {"profile": {"fuse": {}}}, ProfileError, "unknown key 'fuse'. Did you mean 'fusion'?"),
    "cache": (projection, {"cache": "on"}, ArgumentError, "cache is 'on', expected a CompileCache"),
    "dtype": (lambda: unpackable(dtypes.Q8_K), {}, CompileError, "no linear kernel reads q8_k weights. It reads"),
    "argmax": (lambda: argmax_of(20), {}, CompileError, "row numbers of a table of 16 come from argmax"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPILES)
def test_compiles_that_are_refused(case: str) -> None:
    make, options, kind, message = COMPILES[case]
    with pytest.raises(kind, match=re.escape(message)):
        rlx.compile(make(), **options)


# ---------------------------------------------------------------------------------------------------- the rest


def test_looking_inside(plain: rlx.Executable) -> None:
    assert repr(plain).startswith("<Executable projection/prefill, ")
    assert {"seconds", "kernels", "object_bytes", "arena_bytes", "cached"} <= plain.stats.keys()
    with rlx.compile(projection()) as again:
        assert again.stats["cached"]
    assert "linear" in plain.ir("fuse")
    assert "define" in plain.llvm()
    with pytest.raises(ArgumentError, match=r"no stage is called 'x'\. There are: graph, "):
        plain.ir("x")
    with pytest.raises(ArgumentError, match=r"no kernel is called 'x'\. There are: linear_f32"):
        plain.source("x")


def test_a_closed_executable_says_so() -> None:
    exe = rlx.compile(projection(), bind={"w": W})
    exe.close()
    exe.close()
    for use in (lambda: exe(x=X), lambda: exe.bind(w=W)):
        with pytest.raises(BusyError, match="program projection/prefill: the executable was closed"):
            use()
    assert "linear" in exe.ir("fuse"), "what was made can still be read"
