"""Symbolic dimensions: integers and affine forms over named symbols.

`SEQ` is the number of new tokens in a call, `PAST_SEQ` the number of tokens already in the KV cache, `CTX` the capacity
of a full cache, and `WINDOW_CTX` that of a ring. `PAGES` is the length of a page table. In a batch, `SEGMENTS` is the
number of segments, `SLOTS` the number of sequences that states have room for, and `OUTS` the number of rows whose
outputs are computed. A dim without symbols is a plain `int`, so static shapes stay ordinary tuples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from rlx.errors import GraphError, IrSyntaxError

Bounds: TypeAlias = Mapping[str, tuple[int, int]]


class Dim:
    """An affine form `c0 + c1*S1 + ...` with integer coefficients; immutable and hashable.

    `Dim("N")` is the symbol N, a size that is known when the program runs.

    Raises:
        GraphError: a symbol's name is not a word of letters, digits and `_`.
    """

    __slots__ = ("const", "terms")

    def __init__(self, terms: Mapping[str, int] | str, const: int = 0) -> None:
        if not isinstance(terms, Mapping):
            name: Any = terms
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise GraphError(f"{name!r} is no name of a symbol", hint='Give a word, such as "N".')
            terms = {name: 1}
        self.terms = tuple(sorted((s, c) for s, c in terms.items() if c))
        self.const = const

    def __add__(self, other: DimLike) -> DimLike:
        if not isinstance(other, (int, Dim)):
            return NotImplemented
        terms = dict(self.terms)
        if isinstance(other, Dim):
            for symbol, coefficient in other.terms:
                terms[symbol] = terms.get(symbol, 0) + coefficient
        return _normal(terms, self.const + (other.const if isinstance(other, Dim) else other))

    def __mul__(self, factor: int) -> DimLike:
        if not isinstance(factor, int):
            return NotImplemented  # a product of symbols is not affine
        return _normal({s: c * factor for s, c in self.terms}, self.const * factor)

    def __neg__(self) -> DimLike:
        return self * -1

    def __sub__(self, other: DimLike) -> DimLike:
        return self + -other

    def __rsub__(self, other: int) -> DimLike:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and (self.terms, self.const) == (other.terms, other.const)

    def __hash__(self) -> int:
        return hash((self.terms, self.const))

    def __str__(self) -> str:
        parts = [f"{'' if c == 1 else f'{c}*'}{s}" for s, c in self.terms]
        text = "+".join(parts + ([str(self.const)] if self.const else []))
        return text.replace("+-", "-").replace("-1*", "-")

    __repr__ = __str__


DimLike: TypeAlias = int | Dim
Shape: TypeAlias = tuple[DimLike, ...]


def _normal(terms: Mapping[str, int], const: int) -> DimLike:
    return Dim(terms, const) if any(terms.values()) else const


def symbol(name: str) -> Dim:
    """The dim that consists of the symbol `name`."""
    return Dim({name: 1})


SEQ = symbol("SEQ")
"""The number of new tokens in a call."""

PAST_SEQ = symbol("PAST_SEQ")
"""The number of tokens that the KV cache holds before a call."""

CTX = symbol("CTX")
"""The capacity of a full KV cache."""

WINDOW_CTX, PAGES = symbol("WINDOW_CTX"), symbol("PAGES")
SEGMENTS, SLOTS, OUTS = symbol("SEGMENTS"), symbol("SLOTS"), symbol("OUTS")


def symbols(dim: DimLike) -> frozenset[str]:
    """Names of the symbols in a dim."""
    return frozenset([s for s, _ in dim.terms]) if isinstance(dim, Dim) else frozenset()


def bind(dim: DimLike, env: Mapping[str, DimLike]) -> DimLike:
    """Replaces the symbols in `env`; the others stay."""
    if not isinstance(dim, Dim):
        return dim
    result: DimLike = dim.const
    for name, coefficient in dim.terms:
        result = result + (env[name] if name in env else symbol(name)) * coefficient
    return result


def value(dim: DimLike, env: Mapping[str, int]) -> int:
    """The number that a dim evaluates to; `GraphError` if `env` lacks one of its symbols."""
    bound = bind(dim, env)
    if isinstance(bound, Dim):
        missing = ", ".join(sorted(symbols(bound)))
        raise GraphError(f"dim {dim} needs a value for {missing}", hint=f"Bind {missing} when compiling or calling.")
    return bound


def bounds(dim: DimLike, limits: Bounds) -> tuple[int, int]:
    """Smallest and largest value of a dim when each symbol lies within its limits (inclusive)."""
    if not isinstance(dim, Dim):
        return dim, dim
    low = high = dim.const
    for name, coefficient in dim.terms:
        if name not in limits:
            raise GraphError(f"dim {dim} has no bound for {name}", hint=f"Give {name} a range when compiling.")
        ends = [coefficient * end for end in limits[name]]
        low, high = low + min(ends), high + max(ends)
    return low, high


_TERM = re.compile(r"([+-]?)(?:(\d+)\*)?([A-Za-z_]\w*)|([+-]?\d+)")


def parse_dim(text: str) -> DimLike:
    """The inverse of `str(dim)`; raises `IrSyntaxError`."""
    text, at = text.replace(" ", ""), 0
    total: DimLike = 0
    for match in _TERM.finditer(text):
        sign, factor, name, number = match.groups()
        if match.start() != at or (at and text[at] not in "+-"):
            break
        at = match.end()
        total = total + (int(number) if number else symbol(name) * (int(factor or 1) * (-1 if sign == "-" else 1)))
    if at != len(text) or not text:
        raise IrSyntaxError(f"{text!r} is not a dim", hint="Write an integer or a form such as 2*SEQ+PAST_SEQ+1.")
    return total
