"""Segments and pages: the attributes with which the rows of a call, and the caches, belong to several sequences.

By default the rows of a call are consecutive tokens of one sequence, after PAST_SEQ others. With `segments` they are
cut into segments, runs of rows of one sequence each, and the op has one more operand, `segments` i32[SEGMENTS, 4]: of
each segment the first row, the number of rows, the number of tokens before them, and the slot of the sequence.

The meaning: the op without the attribute, applied to the rows of each segment, with SEQ = rows and PAST_SEQ = past.

- States have a leading axis of slots, and the segment uses those of its slot. Caches of ops with a `page` have no
  slots, because all sequences share their pages; the page tables are then `pages` i32[SEGMENTS, PAGES], one row a
  segment.
- An op with `aside` reads the state of the segment's slot and writes the other state in a slot of its own. `segments`
  is i32[SEGMENTS, 5] then: the fifth number is the slot that is written. Other ops ignore it.
- Plain keys and values (`as_cache`) of all segments share one place of CTX positions. A segment has no slot then: that
  column is the position of its first key there.
- A segment may have no rows. Rows of no segment are not computed: their results may hold anything.
- Segments must not share rows, nor slots, nor pages that one of them writes.

The other ops work row by row, so they know nothing of segments.

By default position p of the sequence lies at place p of a cache [heads, CTX, head_dim]. With the attribute `page`,
which the device chooses, the cache is cut into pages of so many places, and the op has one more operand, the page table
of the sequence: `pages` i32[PAGES]. Position p then lies at place pages[p // page] * page + p % page. Entries of the
table after the last position of a call are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.ir import dims
from rlx.ir.dims import DimLike, Shape
from rlx.ir.dtypes import I32, DType
from rlx.ir.infer import Rule
from rlx.ir.meaning import Array, Attrs, Env
from rlx.ir.node import Node, intern
from rlx.ir.shape_rules import types

#: Columns of the operand `segments`.
FIRST_ROW, ROWS, PAST, SLOT, SLOT_WRITTEN = range(5)

#: The roles of the operands of an op over states, a letter each, and of its result: r has rows, c is a cache, s is
#: another state, w is a weight, k are plain keys or values. With attributes, see `roles`: c is a pool of pages, p is a
#: page table, s is any other state, a is the state that an op with `aside` writes.
Roles: TypeAlias = tuple[str, str]


def roles(plain: Roles, attrs: Mapping[str, Any]) -> Roles:
    """The roles of an op's operands, without `segments`, and of its result.

    Args:
        plain: those of the op without attributes, as in the op table.
    """
    operands, result = plain
    if attrs.get("norm_eps") is not None:
        operands = operands[:2] + "w" + operands[2:]
    if attrs.get("sinks"):
        operands += "w"
    if attrs.get("mask") == "visible":
        operands += "r"
    if attrs.get("aside"):
        operands += "a"
    if attrs.get("length") == dims.SEQ:  # the keys of the rows themselves: there is no past
        operands = operands.replace("c", "k")
    if attrs.get("page"):
        return f"{operands}p", result
    return operands.replace("c", "s"), result.replace("c", "s")


def is_segmented(node: Node) -> bool:
    """Whether the rows of a node belong to segments."""
    return ("segments", True) in node.attrs


def of_one(
    plain: Roles, inputs: tuple[Node, ...], attrs: Attrs, rows: DimLike
) -> tuple[tuple[Node, ...], dict[str, Any]]:
    """Operands and attributes of the op for a single segment of `rows` rows. Leaves replace computed operands.

    Args:
        plain: as in `roles`.
        inputs, attrs: those of the op with `segments`.
    """
    letters, _ = roles(plain, attrs)
    operands = tuple(_stand_in(i, n, role, rows) for i, (n, role) in enumerate(zip(inputs[:-1], letters, strict=True)))
    own = {k: dims.bind(v, {"SEQ": rows}) if isinstance(v, dims.Dim) else v for k, v in attrs.items()}
    return operands, {**own, "segments": False}


def _stand_in(i: int, node: Node, role: str, rows: DimLike) -> Node:
    if role == "w":
        return node
    if role == "r":
        return intern("input", (), (("name", f"row {i}"),), (rows, *node.shape[1:]), node.dtype)
    if role == "p":
        return intern("input", (), (("name", f"pages {i}"),), node.shape[1:], node.dtype)
    if role == "k":
        return intern("state", (), (("name", f"keys {i}"), ("layout", node["layout"])), node.shape, node.dtype)
    state = node
    while state.inputs:  # a write; its first operand is the state
        state = state.inputs[0]
    return intern("state", (), state.attrs, state.shape if role == "c" else state.shape[1:], state.dtype)


def rule(op: str, own_roles: Roles, plain: Rule) -> Rule:
    """The shape rule of an op with and without `segments`."""

    def segmented(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[Shape, DType]:
        if not attrs["segments"]:
            return plain(inputs, attrs)
        letters, result = roles(own_roles, attrs)
        _check(op, letters, inputs)
        rows = inputs[letters.index("r")].shape[0]
        operands, own = of_one(own_roles, inputs, attrs, rows)
        shape, dtype = plain(operands, own)
        return shape if result in "rk" else inputs[0].shape, dtype

    return segmented


def _check(op: str, letters: str, inputs: tuple[Node, ...]) -> None:
    if len(inputs) != len(letters) + 1 or not _fit(letters, inputs):
        special = "page tables i32[SEGMENTS, PAGES]" if "p" in letters else "slots in front of states"
        hint = f"Expected its operands without a bias, {special}, then segments i32[SEGMENTS, {4 + ('a' in letters)}]."
        raise ShapeError(f"found operands {types(inputs)}", where=f"{op} of segments", hint=hint)


def _fit(letters: str, inputs: tuple[Node, ...]) -> bool:
    *operands, segments = inputs
    first = {role: {n.shape[:1] for n, r in zip(operands, letters, strict=True) if r == role} for role in "rsap"}
    columns = (SLOT_WRITTEN + 1,) if "a" in letters else (SLOT + 1, SLOT_WRITTEN + 1)
    table = segments.dtype is I32 and len(segments.shape) == 2 and segments.shape[1] in columns
    tables = first["p"] <= {segments.shape[:1]}
    return table and tables and len(first["r"]) == 1 and len(first["s"] | first["a"]) <= 1


def meaning(own_roles: Roles, plain: Any) -> Any:
    """The meaning of an op with and without `segments`, with a signature as in `rlx.ir.meaning`."""

    def segmented(x: list[Array], a: Attrs, env: Env) -> Any:
        if not a["segments"]:
            return plain(x, a, env)
        *operands, segments = x
        letters, result = roles(own_roles, a)
        at = max(letters.find(role) for role in ("a" if "a" in letters else "s", "c"))  # the state that is written
        rows = operands[letters.index("r")]
        new = operands[at].copy() if letters[0] in "sc" else None
        found: Array | None = None
        for number, place in _places(segments, len(rows), "s" in letters):
            if new is not None:
                operands[at] = new
            own = [_own(v, role, number, place) for v, role in zip(operands, letters, strict=True)]
            count = place[ROWS]
            value = plain(own, a, {**env, "SEQ": count, "PAST_SEQ": place[PAST]})
            result_rows, state = value if isinstance(value, tuple) else (value, value)
            if new is not None:
                new[_place_of(letters[at], place)] = state
            if result == "r":
                found = np.zeros((len(rows), *result_rows.shape[1:]), result_rows.dtype) if found is None else found
                found[place[FIRST_ROW] :][:count] = result_rows
            if result == "k":
                found = np.zeros_like(result_rows) if found is None else found
                found[:, place[SLOT] :][:, :count] = result_rows[:, :count]
        if result not in "rk":
            return new
        if found is None:
            raise ValueError("no segment has rows")
        return found if new is None else (found, new)

    return segmented


def _places(segments: Array, rows: int, slotted: bool) -> Iterator[tuple[int, list[int]]]:
    """Number and columns of every segment that has rows; ValueError if two share a row, or a slot where there are."""
    taken, slots = np.zeros(rows, bool), set()
    for number, place in enumerate(segments.tolist()):
        first, count = place[FIRST_ROW], place[ROWS]
        if not 0 <= first <= first + count <= rows or place[PAST] < 0:
            raise ValueError(f"segment {number}, {place}, is not within {rows} rows")
        if not count:
            continue
        if taken[first : first + count].any() or (slotted and place[SLOT] in slots):
            raise ValueError(f"segment {number}, {place}, shares rows or its slot with an earlier one")
        taken[first : first + count] = True
        slots.add(place[SLOT])
        yield number, place


def _own(value: Array, role: str, number: int, place: list[int]) -> Array:
    """A segment's part of an operand."""
    if role == "r":
        return value[place[FIRST_ROW] :][: place[ROWS]]
    if role == "k":
        return value[:, place[SLOT] :]
    part: Array = value[number if role == "p" else _place_of(role, place)]
    return part


def _place_of(role: str, place: list[int]) -> Any:
    """The index of a segment's part of a state or weight."""
    return {"s": place[SLOT], "a": place[-1]}.get(role, ...)


def paged_rule(op: str, plain: Rule) -> Rule:
    """The shape rule of an op with and without `page`."""

    def paged(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[Shape, DType]:
        if not attrs["page"]:
            return plain(inputs, attrs)
        if not inputs or inputs[-1].dtype is not I32 or len(inputs[-1].shape) != 1:
            hint = "Expected its operands, then the page table i32[PAGES]."
            raise ShapeError(f"found operands {types(inputs)}", where=f"paged {op}", hint=hint)
        if attrs.get("wrap"):
            raise ShapeError("a ring has no pages", where=f"paged {op}", hint="Leave out `wrap` or `page`.")
        return plain(inputs[:-1], attrs)

    return paged


def paged_meaning(op: str, plain: Any) -> Any:
    """The meaning of an op with and without `page`: `plain` over a contiguous copy of the positions that it uses."""

    def paged(x: list[Array], a: Attrs, env: Env) -> Array:
        if not a["page"]:
            return plain(x, a, env)  # type: ignore[no-any-return]
        *operands, table = x
        if op == "attention":
            used = _on_pages(table, a["page"], 0, dims.value(a["length"], env), operands[1].shape[1])
            operands[1:3] = (cache[:, used] for cache in operands[1:3])
            return plain(operands, a, env)  # type: ignore[no-any-return]
        cache, rows = operands[:2]
        at = dims.value(a["at"], env)
        used, after = _on_pages(table, a["page"], at, at + len(rows), cache.shape[1]), cache.copy()
        after[:, used] = plain([cache[:, used], *operands[1:]], {**a, "at": 0}, env)
        return after

    return paged


def _on_pages(table: Array, page: int, start: int, stop: int, capacity: int) -> Array:
    """The places of positions [start, stop) in a cache of `capacity` places.

    Raises:
        GraphError: the table has no page for one of them, or the page is not in the cache.
    """
    positions = np.arange(start, stop)
    if stop > len(table) * page:
        raise GraphError(f"position {stop - 1} is beyond a table of {len(table)} pages of {page}")
    found = table[positions // page].astype(np.int64) * page + positions % page
    if found.size and not 0 <= found.min() <= found.max() < capacity:
        raise GraphError(f"pages {table[start // page : -(-stop // page)].tolist()} are not all in {capacity} places")
    return found
