"""The compiler by guess: what users of NumPy and PyTorch type computes what they expect, or names the right thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import dtypes, ops
from rlx.errors import ArgumentError, GraphError, RlxError, ShapeError

RNG = np.random.default_rng(0)
X, Y = (RNG.standard_normal((5, 16)).astype(np.float32) for _ in range(2))
W, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((16, 24), (24, 16)))
ROW = RNG.standard_normal(16).astype(np.float32)

#: Expressions that mean the same over nodes and over arrays.
SAME: dict[str, Callable[..., Any]] = {
    "x @ w": lambda x, y, w, v, row: x @ w,
    "x @ v.T": lambda x, y, w, v, row: x @ v.T,
    "x * 2.0": lambda x, y, w, v, row: x * 2.0,
    "2 * x": lambda x, y, w, v, row: 2 * x,
    "x + 1.0": lambda x, y, w, v, row: x + 1.0,
    "1.5 - x": lambda x, y, w, v, row: 1.5 - x,
    "x / 3": lambda x, y, w, v, row: x / 3,
    "1.0 / x": lambda x, y, w, v, row: 1.0 / x,
    "-x": lambda x, y, w, v, row: -x,
    "x ** 2": lambda x, y, w, v, row: x**2,
    "x ** -3": lambda x, y, w, v, row: x**-3,
    "(x * x) ** 0.5": lambda x, y, w, v, row: (x * x) ** 0.5,
    "float32 * x": lambda x, y, w, v, row: np.float32(0.3) * x,
    "row - x": lambda x, y, w, v, row: row - x,
    "row / x": lambda x, y, w, v, row: row / x,
    "column - x": lambda x, y, w, v, row: x.mean(-1, keepdims=True) - x,
    "x[:, 2:7]": lambda x, y, w, v, row: x[:, 2:7],
    "x[..., -3:]": lambda x, y, w, v, row: x[..., -3:] + 1,
    "x[:, 3]": lambda x, y, w, v, row: x[:, 3],
    "x[-1]": lambda x, y, w, v, row: x[-1],
    "x[-1:]": lambda x, y, w, v, row: x[-1:] * 2.0,
    "x.sum(-1)": lambda x, y, w, v, row: x.sum(-1),
    "x.mean(1)": lambda x, y, w, v, row: x.mean(1),
    "x.reshape(5, 2, 8)": lambda x, y, w, v, row: x.reshape(x.shape[0], 2, 8)[:, 1],
}
#: Functions of `rlx.ops`, and what NumPy has for them.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "maximum": (lambda x, y: ops.maximum(x, y), np.maximum(X, Y)),
    "maximum of a number": (lambda x, y: ops.maximum(x, 0.25), np.maximum(X, np.float32(0.25))),
    "minimum": (lambda x, y: ops.minimum(x, y), np.minimum(X, Y)),
    "minimum of a number": (lambda x, y: ops.minimum(0.25, x), np.minimum(X, np.float32(0.25))),
    "sum": (lambda x, y: ops.sum(x, axis=1), X.sum(1)),
    "mean": (lambda x, y: ops.mean(x, keepdims=True), X.mean(1, keepdims=True)),
    "softmax": (lambda x, y: ops.softmax(x, axis=1), np.exp(X) / np.exp(X).sum(1, keepdims=True)),
    "matmul": (lambda x, y: ops.matmul(x.reshape("N", 4, 4), y.reshape(-1, 4, 4)),
               X.reshape(5, 4, 4) @ Y.reshape(5, 4, 4)),
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, np.ndarray]:
    """All of them in one program, over a symbol of the user's own, called by position."""
    graph = rlx.Graph("guesses")
    x, y = graph.input("x", ["N", 16], "float32"), graph.input("y", [rlx.Dim("N"), 16], np.float32)
    w, v = graph.weight("w", [16, 24], "f32"), graph.weight("v", [24, 16], np.dtype("float32"))
    row = graph.weight("row", [16])
    for name, guess in SAME.items():
        graph.output(name, guess(x, y, w, v, row))
    for name, (function, _) in FUNCTIONS.items():
        graph.output(name, function(x, y))
    graph.output("layer_norm", ops.layer_norm(x, row, row, eps=1e-3))
    with rlx.compile(graph, {"N": (1, 64), "w": W, "v": V, "row": ROW}) as exe:
        by_position = exe(X, Y)
        by_name = exe(y=Y.tolist(), x=X.astype(np.float64))
    for name, value in by_name.items():
        np.testing.assert_array_equal(value, by_position[name])
    return by_position


@pytest.mark.parametrize("name", SAME)
def test_arithmetic_is_that_of_numpy(results: dict[str, np.ndarray], name: str) -> None:
    want = SAME[name](*(array.astype(np.float64) for array in (X, Y, W, V, ROW)))
    assert results[name].shape == want.shape
    np.testing.assert_allclose(results[name], want, rtol=3e-6, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_numpy(results: dict[str, np.ndarray], name: str) -> None:
    want = FUNCTIONS[name][1]
    assert results[name].shape == want.shape
    np.testing.assert_allclose(results[name], want, rtol=3e-6, atol=3e-6 * np.abs(want).max())


def test_a_weight_in_both_directions_and_in_blocks() -> None:
    from gguf.quants import GGMLQuantizationType, dequantize, quantize

    blocks = quantize(RNG.standard_normal((24, 32)).astype(np.float32), GGMLQuantizationType.Q8_0)
    graph = rlx.Graph()
    x, w = graph.input("x", [rlx.SEQ, 16]), graph.weight("w", [16, 16], "bf16")
    graph.output("both", x @ w + x @ w.T)
    q = graph.input("q", [rlx.SEQ, 32])
    graph.output("blocks", q @ graph.weight("b", [24, 32], "q8_0").T)
    square = np.round(RNG.standard_normal((16, 16)) * 4).astype(np.float32)
    rows = RNG.standard_normal((5, 32)).astype(np.float32)
    with rlx.compile(graph, {"w": square, "b": blocks}) as exe:
        found = exe(X, rows)
        np.testing.assert_allclose(found["both"], X @ square + X @ square.T, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(found["blocks"], rows @ dequantize(blocks, GGMLQuantizationType.Q8_0).T, atol=1e-4)
        exe.bind(w=np.zeros((16, 16)))
        assert not exe(X, rows)["both"].any()


G = rlx.Graph()
A, T = G.input("a", [rlx.SEQ, 16]), G.input("t", [rlx.SEQ, 4, 4])
M, B = G.weight("m", [24, 16]), G.weight("b", [16, 32], "q8_0")

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: A @ M, r"16 and 24 differ\. Write x @ w\.T for a weight w \[n, k\]"),
    (lambda: A @ B, r"matmul: .*cannot be transposed\. Its blocks lie along its rows: declare it as \[n, k\]"),
    (lambda: A @ A, r"matmul: .*It multiplies x \[rows, k\] by a weight"),
    (lambda: A @ W, r"matmul: expected nodes of a graph, found ndarray\. Graph\.weight and Graph\.constant"),
    (lambda: W @ A, r"matmul: expected nodes of a graph, found ndarray"),
    (lambda: A.T, r"transpose: .*Only weights \[n, k\] can be transposed"),
    (lambda: A + "1", r"add: expected nodes of a graph, found str"),
    (lambda: A * float("inf"), r"mul: inf is no finite number"),
    (lambda: A**1.5, r"power: no op computes the power 1\.5\. Give a whole number from 1 to 8"),
    (lambda: A.sum(0), r"sum: axis 0 is not the last one of .*Axis 0 is that of the rows"),
    (lambda: ops.softmax(T, axis=1), r"softmax: axis 1 is not the last one"),
    (lambda: A[0], r"index: rows cannot be chosen by 0: .*x\[-1:\] is the last row"),
    (lambda: A[2:4], r"index: rows cannot be chosen by slice\(2, 4, None\)"),
    (lambda: list(A), r"index: rows cannot be chosen by 0"),
    (lambda: A[:, 16], r"index: 16 is no part of axis 1"),
    (lambda: A[:, ::2], r"index: slice\(None, None, 2\) is no part of axis 1 .*step of 1"),
    (lambda: A[:, [1, 2]], r"index: axis 1 of .* cannot be cut by \[1, 2\]"),
    (lambda: A[:, 1, 2], r"index: 3 indices for"),
    (lambda: G.input("n", "N"), r"input 'n': 'N' is no shape\. Give a list"),
    (lambda: G.input("n", ["2N", 3]), r"input 'n': '2N' is not a dim\."),
    (lambda: G.input("n", [3], "float8"), r"input 'n': 'float8' is not a dtype\. Give one of rlx\.dtypes"),
    (lambda: A.reshape(-1, 5), r"reshape: .*Expected a shape that \[5\] and -1 can be"),
    (lambda: rlx.Dim("a b"), r"'a b' is no name of a symbol"),
]


@pytest.mark.parametrize(("guess", "message"), REFUSED, ids=[message[:28] for _, message in REFUSED])
def test_what_cannot_be_is_named(guess: Callable[[], Any], message: str) -> None:
    with pytest.raises((ShapeError, GraphError), match=message):
        guess()


def test_calls_that_do_not_fit_are_named() -> None:
    graph = rlx.Graph()
    a, b = graph.input("a", ["N", 4]), graph.input("b", ["N", 4])
    graph.output("y", b - a)
    with pytest.raises(RlxError, match=r"the symbol N has no range\. Give its lowest and highest value: bind="):
        rlx.compile(graph)
    ones = np.ones((2, 4))
    with rlx.compile(graph, {"N": (1, 8)}) as exe:
        np.testing.assert_array_equal(exe(ones, ones * 3)["y"], ones * 2)  # as declared, not as used
        for call, message in [
            (lambda: exe(ones, ones, ones), r"3 arrays for 2 inputs\. The graph declares a, b;"),
            (lambda: exe(ones, a=ones), r"inputs are given twice: a"),
            (lambda: exe(ones), r"inputs are missing: b"),
            (lambda: exe(ones, "text"), r"input 'b': expected numbers, found"),
            (lambda: exe(ones, [[1, 2], [3]]), r"input 'b': this is no array"),
            (lambda: exe(ones, np.ones((3, 4))), r"input 'a': expected shape \[3, 4\], found \[2, 4\]"),
        ]:
            with pytest.raises(ArgumentError, match=message):
                call()


def test_bf16_weights_come_in_pairs_and_others_do_not() -> None:
    for dtype in (dtypes.F16, dtypes.F32, dtypes.BF16):
        graph = rlx.Graph("odd")
        graph.output("y", graph.input("x", [rlx.SEQ, 33]) @ graph.weight("w", [16, 33], dtype).T)
        if dtype is dtypes.BF16:
            with pytest.raises(ShapeError, match=r"bf16 weight has rows of 33 numbers.*Take F16 or F32"):
                rlx.compile(graph)
        else:
            rlx.compile(graph)
