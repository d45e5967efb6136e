"""The op table: each meaning against its independent formulation, and the builders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.cases import CASES, arrays, new_state, run
from ir.references import ENV, REFERENCES, SCALAR
from rlx.ir import meaning, ops
from rlx.ir.dims import value
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


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan_in_a_cache(bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert all(np.isnan(meaning.round_to(x, dtype)).all() for dtype in ("f32", "f16", "bf16"))
