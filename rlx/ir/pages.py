"""Pages: the attribute `page`, with which full caches are pools of pages that many sequences share.

By default position p of the sequence lies at place p of a cache [heads, CTX, head_dim]. With a `page`, which
the device chooses, the cache is cut into pages of so many places, and the op has one more operand, the page table of
the sequence: `pages` i32[PAGES]. Position p then lies at place pages[p // page] * page + p % page. Entries of the table
after the last position of a call are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.ir import dims
from rlx.ir.dims import Shape
from rlx.ir.dtypes import I32, DType
from rlx.ir.infer import Rule
from rlx.ir.meaning import Array, Attrs, Env
from rlx.ir.node import Node


def rule(op: str, plain: Rule) -> Rule:
    """The shape rule of an op with and without `page`."""

    def paged(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[Shape, DType]:
        if not attrs["page"]:
            return plain(inputs, attrs)
        if not inputs or inputs[-1].dtype is not I32 or len(inputs[-1].shape) != 1:
            hint = "Expected its operands, then the page table i32[PAGES]."
            raise ShapeError(f"found operands {_shown(inputs)}", where=f"paged {op}", hint=hint)
        if attrs.get("wrap"):
            raise ShapeError("a ring has no pages", where=f"paged {op}", hint="Leave out `wrap` or `page`.")
        return plain(inputs[:-1], attrs)

    return paged


def _shown(inputs: tuple[Node, ...]) -> str:
    return ", ".join(f"{n.dtype}[{', '.join(map(str, n.shape))}]" for n in inputs) or "none"


def meaning(op: str, plain: Any) -> Any:
    """The meaning of an op with and without `page`: `plain` over a contiguous copy of the positions that it uses."""

    def paged(x: list[Array], a: Attrs, env: Env) -> Array:
        if not a["page"]:
            return plain(x, a, env)  # type: ignore[no-any-return]
        *operands, table = x
        if op == "attention":
            used = places(table, a["page"], 0, dims.value(a["length"], env), operands[1].shape[1])
            operands[1:3] = (cache[:, used] for cache in operands[1:3])
            return plain(operands, a, env)  # type: ignore[no-any-return]
        cache, rows = operands[:2]
        at = dims.value(a["at"], env)
        used, after = places(table, a["page"], at, at + len(rows), cache.shape[1]), cache.copy()
        after[:, used] = plain([cache[:, used], *operands[1:]], {**a, "at": 0}, env)
        return after

    return paged


def places(table: Array, page: int, start: int, stop: int, capacity: int) -> Array:
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
