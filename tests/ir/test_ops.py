"""The op table: each meaning against its independent formulation, and the builders."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.cases import CASES, B, G, W, X, Y, arrays, new_state, run
from ir.references import ENV, REFERENCES, SCALAR, nearest
from rlx.errors import ShapeError
from rlx.ir import meaning, ops
from rlx.ir.dims import SEQ, value
from rlx.ir.dtypes import F16, I32, Q8A
from rlx.ir.node import LEAVES, Node


def test_every_op_has_a_reference_and_a_case() -> None:
    assert REFERENCES.keys() == ops.OPS.keys() - set(LEAVES)
    assert {c.values[0].op for c in CASES} == REFERENCES.keys()


def expectation(node: Node, feeds: dict[str, np.ndarray]) -> Any:
    """The reference of a node over leaves, or over values of leaves."""
    if node.op in LEAVES:
        return feeds[node.name]
    return REFERENCES[node.op]([expectation(i, feeds) for i in node.inputs], dict(node.attrs))


@pytest.mark.parametrize("node", CASES)
def test_the_meaning_is_that_of_the_reference(node: Node) -> None:
    feeds = arrays(node)
    expected = expectation(node, feeds)
    if ops.OPS[node.op].effect:
        expected, state = expected
        np.testing.assert_allclose(new_state(node, feeds), state, rtol=1e-12, atol=1e-14)
    found = run(node, feeds)
    assert found.shape == tuple(value(d, ENV) for d in node.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("node", CASES)
def test_float32_in_float32_out(node: Node) -> None:
    feeds = arrays(node)
    narrow, wide = run(node, feeds, np.float32), run(node, feeds)
    assert narrow.dtype == (np.int32 if node.dtype is I32 else np.float32)
    np.testing.assert_allclose(narrow, wide, rtol=1e-4, atol={"q8a": 0.04, "bf16": 0.02}.get(node.dtype.name, 1e-4))


@pytest.mark.parametrize("node", CASES)
def test_the_operands_are_left_as_they_were(node: Node) -> None:
    feeds = arrays(node)
    before = {n: a.copy() for n, a in feeds.items()}
    run(node, feeds)
    assert all(np.array_equal(feeds[n], a) for n, a in before.items())


@pytest.mark.parametrize("op", ["silu", "gelu_tanh", "gelu_erf", "sigmoid", "tanh", "softplus"])
def test_tails_neither_overflow_nor_cancel(op: str) -> None:
    x = np.array([-700.0, -80.0, -30.0, -5.0, -1e-9, 0.0, 1e-9, 5.0, 30.0, 700.0])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = meaning.UNARY[op](x)
    exact = op in ("silu", "sigmoid", "softplus")  # relative accuracy where the result is tiny
    expected = [SCALAR[op](float(v)) for v in x]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0 if exact else 1e-15)


def test_quantize_agrees_with_the_int8_rows_of_the_kernels() -> None:
    from rlx.backends.cpu import layouts

    rng = np.random.default_rng(0)
    x = (rng.standard_normal((5, 96)) * rng.uniform(0.01, 100, (5, 1))).astype(np.float32)
    x[1, 32:64] = 0
    stored = layouts.q8a_dequantize(layouts.q8a_quantize(x), 96)
    assert np.array_equal(meaning.quantize([x], {"out": "q8a"}, {}), stored)


def test_quantize_rounds_halves_to_even_and_keeps_zeros() -> None:
    x = np.zeros((1, 64))
    x[0, :5] = [127, 0.5, 1.5, 2.5, -0.5]
    assert meaning.quantize([x], {"out": "q8a"}, {})[0, :6].tolist() == [127, 0, 2, 2, 0, 0]
    assert not meaning.quantize([x], {"out": "q8a"}, {})[0, 32:].any()


@given(st.integers(0, 2**32 - 1) | st.integers(0, 2**16 - 1).map(lambda high: high << 16 | 0x8000))  # with many ties
def test_bf16_rounding_of_every_kind_of_value(bits: int) -> None:
    (x,) = np.array([bits], np.uint32).view(np.float32)
    found = float(meaning.round_to(np.array([x]), "bf16")[0])
    if np.isnan(x):
        assert math.isnan(found)
    elif np.isinf(x) or abs(float(x)) > 3.38e38:  # may round up to infinity
        assert math.copysign(1, found) == math.copysign(1, x) and abs(found) >= 3.38e38
    else:
        assert found == nearest(float(x), "bf16")


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan_in_a_cache(bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert all(np.isnan(meaning.round_to(x, dtype)).all() for dtype in ("f32", "f16", "bf16"))


def test_ties_go_to_the_lower_index() -> None:
    x = np.array([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert meaning.argmax([x], {}, {}).tolist() == [1]
    assert meaning.top_k([x], {"k": 4, "groups": 1}, {}).tolist() == [[1, 2, 4, 3]]
    many = np.arange(300.0)[None] % 3
    assert meaning.top_k([many], {"k": 200, "groups": 1}, {}).tolist() == [[*range(2, 300, 3), *range(1, 300, 3)]]


def test_q8a_leaves_are_fed_as_values() -> None:
    q = G.input("q", [SEQ, 64], Q8A)
    feeds = arrays(ops.linear(q, W))
    np.testing.assert_allclose(run(ops.linear(q, W), feeds), feeds["q"] @ feeds["w"].T)


def test_reshapes_fold() -> None:
    heads = ops.reshape(X, [SEQ, 4, 16])
    assert ops.reshape(heads, [SEQ, 64]) is X
    assert ops.reshape(heads, [SEQ, 8, 8]).inputs == (X,)


def test_rebuild_changes_operands_and_attributes() -> None:
    assert ops.rebuild(ops.silu(X), [Y]) is ops.silu(Y)
    assert ops.rebuild(ops.scale(X, 2.0), [X], by=3.0) is ops.scale(X, 3.0)
    assert ops.rebuild(ops.scale(X, 2.0), [X]) is ops.scale(X, 2.0)
    assert ops.rebuild(X, (), shape=(4, 64)) is G.input("x", [4, 64])
    assert ops.rebuild(X, (), dtype=F16).dtype is F16
    with pytest.raises(ShapeError, match="add: found operands"):
        ops.rebuild(ops.add(X, Y), [X, W])


def test_a_bias_is_an_addition() -> None:
    assert ops.linear(X, W, B) is ops.add(ops.linear(X, W), B)
