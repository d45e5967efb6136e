"""Dims: the algebra agrees with integers, text parses back, bounds hold every value."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import GraphError, IrSyntaxError
from rlx.ir.dims import CTX, PAST_SEQ, SEQ, Dim, DimLike, bind, bounds, parse_dim, symbol, symbols, value

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


@given(dims(), dims())
def test_equal_dims_have_one_form(a: DimLike, b: DimLike) -> None:
    assert a + b == b + a and hash(a + b) == hash(b + a)
    assert (a + b) - b == a
    assert isinstance(a - a, int) and a - a == 0


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


@given(dims(), dims(), ENVS)
def test_a_symbol_binds_to_a_dim(a: DimLike, b: DimLike, env: dict[str, int]) -> None:
    assert value(bind(a, {"SEQ": b}), env) == value(a, {**env, "SEQ": value(b, env)})


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


@pytest.mark.parametrize("op", [operator.mul, operator.add, operator.sub])
@pytest.mark.parametrize("other", [1.5, "SEQ", None])
def test_dims_mix_with_integers_only(op: Callable, other: object) -> None:
    with pytest.raises(TypeError):
        op(SEQ, other)


def test_a_product_of_symbols_is_refused() -> None:
    with pytest.raises(TypeError):
        SEQ * PAST_SEQ


def test_an_unbound_symbol_is_named() -> None:
    with pytest.raises(GraphError, match=r"CTX\+SEQ needs a value for CTX\. Bind CTX"):
        value(SEQ + CTX, {"SEQ": 1})
    with pytest.raises(GraphError, match="no bound for CTX"):
        bounds(SEQ + CTX, {"SEQ": (1, 2)})


def test_static_dims_are_integers() -> None:
    assert bind(SEQ * 2, {"SEQ": 3}) == 6 and isinstance(bind(SEQ * 2, {"SEQ": 3}), int)
    assert symbols(4) == frozenset() and bounds(4, {}) == (4, 4)
    assert Dim({"SEQ": 0, "CTX": 1}).terms == (("CTX", 1),)
