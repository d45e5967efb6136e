"""Dims: the algebra agrees with integers, text parses back, bounds hold every value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import IrSyntaxError
from rlx.ir.dims import CTX, PAST_SEQ, SEQ, DimLike, bind, bounds, parse_dim, symbol, symbols, value

NAMES = ("SEQ", "PAST_SEQ", "CTX", "_n1")
COEFFICIENTS = st.integers(-1000, 1000)
ENVS = st.fixed_dictionaries({n: st.integers(-50, 50) for n in NAMES})


@st.composite
def dims(draw: Callable) -> DimLike:
    total: DimLike = draw(COEFFICIENTS)
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3)):
        total = total + symbol(name) * draw(COEFFICIENTS)
    return total


@given(dims(), dims(), COEFFICIENTS, ENVS)
def test_the_algebra_is_that_of_the_values(a: DimLike, b: DimLike, c: int, env: dict[str, int]) -> None:
    x, y = value(a, env), value(b, env)
    assert value(a + b, env) == x + y
    assert value(a - b, env) == x - y
    assert value(a * c, env) == value(c * a, env) == c * x
    assert value(c - a, env) == c - x
    assert value(-a, env) == -x


@given(dims())
def test_text_parses_back(a: DimLike) -> None:
    assert parse_dim(str(a)) == a
    assert str(parse_dim(f" {a} ".replace("+", " + "))) == str(a)


@given(dims(), ENVS)
def test_binding_in_two_steps_is_binding_at_once(a: DimLike, env: dict[str, int]) -> None:
    first = {n: env[n] for n in NAMES[:2]}
    rest = bind(a, first)
    assert symbols(rest) == symbols(a) - first.keys()
    assert value(rest, env) == value(a, env)


@given(dims(), st.fixed_dictionaries({n: st.tuples(st.integers(-9, 9), st.integers(0, 9)) for n in NAMES}), st.data())
def test_bounds_hold_every_value_and_are_reached(a: DimLike, ranges: dict, data: st.DataObject) -> None:
    limits = {n: (low, low + size) for n, (low, size) in ranges.items()}
    low, high = bounds(a, limits)
    inside = {n: data.draw(st.integers(*ends)) for n, ends in limits.items()}
    corners = [{n: ends[bit >> i & 1] for i, (n, ends) in enumerate(limits.items())} for bit in range(2 ** len(limits))]
    assert low <= value(a, inside) <= high
    assert (low, high) == (min(value(a, c) for c in corners), max(value(a, c) for c in corners))


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (SEQ + PAST_SEQ, "PAST_SEQ+SEQ"),
        (2 * SEQ + 1, "2*SEQ+1"),
        (CTX - SEQ - 11, "CTX-SEQ-11"),
        (-1 * SEQ, "-SEQ"),
        (-11 * SEQ + CTX, "CTX-11*SEQ"),
        (SEQ - SEQ + 7, "7"),
    ],
)
def test_what_is_printed(dim: DimLike, text: str) -> None:
    assert str(dim) == text


@pytest.mark.parametrize("text", ["", " ", "SEQ SEQ*", "2*3", "2SEQ", "+-3", "SEQ**2", "SEQ*2", "SEQ+", "1.5", "(SEQ)"])
def test_text_that_is_no_dim(text: str) -> None:
    with pytest.raises(IrSyntaxError, match="is not a dim"):
        parse_dim(text)
