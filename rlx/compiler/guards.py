"""Checks of a caller's values before a graph's native code runs, because native code itself checks nothing.

Runtime: derived from a compiled graph once, and run by `rlx.compiler.executable` before every call. For a model's graph
the engine only checks token ids against the embedding tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError, CompileError
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.segments import FIRST_ROW, PAST, ROWS, SLOT
from rlx.ir.stored import to_bf16
from rlx.passes.program import root


@dataclass(frozen=True)
class Room:
    """A use of a cache of `capacity` positions up to `end`, by `rows` rows that start at `end - rows`.

    Attributes:
        page: of the device; capacities of rings are multiples of it.
        kept: for rings, how many positions the use needs besides the rows; None for full caches.
    """

    state: str
    end: DimLike
    rows: DimLike
    capacity: DimLike
    page: int
    kept: int | None = None

    def check(self, env: Mapping[str, int]) -> None:
        """`ArgumentError` if the positions are not inside the cache."""
        end, rows, capacity = (dims.value(dim, env) for dim in (self.end, self.rows, self.capacity))
        wraps = self.kept is not None and rows + self.kept <= capacity and capacity % self.page == 0
        if not 0 <= end - rows <= end or (end > capacity and not wraps):
            what = f"positions {end - rows} to {end - 1} do not fit a cache of {capacity}"
            symbol, less = "CTX", "a smaller PAST_SEQ"
            if self.kept is not None:
                what += f", which wraps if it is a multiple of {self.page} and has room for {rows + self.kept}"
                symbol, less = "WINDOW_CTX", "fewer rows"
            hint = f'Compile with a larger capacity, bind={{"{symbol}": ...}}, or pass {less}.'
            raise ArgumentError(what, where=f"state {self.state!r}", hint=hint)


@dataclass(frozen=True)
class Queries:
    """A use of `length` plain keys by `rows` queries, which are the last rows of the positions of the keys."""

    length: DimLike
    rows: DimLike

    def check(self, env: Mapping[str, int]) -> None:
        """`ArgumentError` if the first queries come before the first key."""
        length, rows = dims.value(self.length, env), dims.value(self.rows, env)
        if rows > length:
            hint = "Queries are the last rows of the keys. Pass causal=False if keys have no positions."
            raise ArgumentError(f"{rows} queries for {length} keys", where="attention", hint=hint)


@dataclass(frozen=True)
class Ids:
    """An input whose values are row numbers of a table with `rows` rows.

    Attributes:
        what: what has that many rows.
        negative: whether negative numbers are allowed, for no row.
    """

    name: str
    rows: DimLike
    what: str = "the table"
    negative: bool = False

    def check(self, inputs: Mapping[str, np.ndarray], env: Mapping[str, int]) -> None:
        """`ArgumentError` if a value is out of range."""
        values, rows = inputs[self.name], dims.value(self.rows, env)
        outside = values[((values < 0) & (not self.negative)) | (values >= rows)]
        if outside.size:
            what = f"{outside.flat[0]} is out of range: {self.what} has {rows} rows"
            raise ArgumentError(what, where=f"input {self.name!r}")


def check_segments(segments: np.ndarray, slots: int, env: Mapping[str, int]) -> list[dict[str, int]]:
    """The values of the symbols for each segment that has rows, from their values for the call.

    Raises:
        ArgumentError: a segment is not within the rows of the call, two share a row or a slot, or a slot is none of the
            first `slots`.
    """
    filled = segments[segments[:, ROWS] != 0]
    found, end = filled[:, SLOT].tolist(), 0
    if len(set(found)) < len(found) or not 0 <= min(found, default=0) <= max(found, default=0) < slots:
        hint = "Every segment needs a slot of its own."
        raise ArgumentError(f"slots {found} are not different numbers from 0 to {slots - 1}", hint=hint)
    for first, rows in sorted(filled[:, [FIRST_ROW, ROWS]].tolist()):
        if not end <= first < first + rows <= env["SEQ"]:
            what = f"{rows} rows from row {first} on are not free rows among the {env['SEQ']} of the call"
            raise ArgumentError(what, where="input 'segments'", hint="Every row belongs to at most one segment.")
        end = first + rows
    return [{**env, "SEQ": rows, "PAST_SEQ": past} for rows, past in filled[:, [ROWS, PAST]].tolist()]


def rooms(graph: Graph, page: int) -> list[Room | Queries]:
    """The checks for every use of keys and values, without duplicates, on a device with such pages."""
    return list(dict.fromkeys(room for node in graph.nodes() for room in _rooms(node, page)))


def _rooms(node: Node, page: int) -> Iterator[Room | Queries]:
    if OPS[node.op].writes:
        cache, x = node.inputs[:2]
        kept = 0 if node["wrap"] else None
        yield Room(root(cache).name, node["at"] + x.shape[0], x.shape[0], cache.shape[1], page, kept)
    if node.op == "attention" and node.inputs[1].op == "as_cache":
        if node["mask"] != "none":
            yield Queries(node["length"], node.inputs[0].shape[0])
    elif node.op == "attention":
        kept = node["window"] - 1 if node["window"] is not None else None
        for cache in node.inputs[1:3]:
            yield Room(root(cache).name, node["length"], node.inputs[0].shape[0], cache.shape[1], page, kept)


def row_numbers(graph: Graph) -> list[Ids]:
    """The checks for every input that selects rows of a table, experts, or elements of a row.

    Raises:
        CompileError: the numbers are computed by an op whose results are unbounded.
    """
    numbered = [node for node in graph.nodes() if node.op == "attention" or OPS[node.op].numbers]
    return list(dict.fromkeys(ids for node in numbered if (ids := _ids(node))))


def _ids(node: Node) -> Ids | None:
    if node.op == "attention" and node["mask"] == "visible" and not node["segments"]:  # any number is safe
        visible = node.inputs[3 + node["sinks"]]
        return Ids(visible.name, node["length"], "the sequence") if visible.op == "input" else None
    numbers = OPS[node.op].numbers
    if numbers is None:
        return None
    source, rows = node.inputs[numbers.operand], node.inputs[numbers.table].shape[numbers.axis]
    if source.op == "input":
        return Ids(source.name, rows, negative=numbers.negative)
    if source.op in ("argmax", "top_k") and source.inputs[0].shape[-1] == rows:
        return None
    choices = {"pick": lambda: source.inputs[0].shape[-1], "linear_pick": lambda: source.inputs[1].shape[0]}
    if numbers.negative and source.op in choices and choices[source.op]() == rows:
        return None
    hint = f"Give them as an input, or as argmax or top_k over {rows} values."
    raise CompileError(f"row numbers of a table of {rows} come from {source.op}", where=repr(source), hint=hint)


# -- arrays of the type and shape that native code expects -------------------------------------------------------------


def of_kind(where: str, value: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`value` as an array of `dtype`: numbers for a float type, whole numbers in range for an integer type.

    Raises:
        ArgumentError: it has another kind of values.
    """
    target, found = np.dtype(dtype), _array(where, value)
    allowed = "fiub" if target.kind == "f" else "iu"
    if found.dtype.kind not in allowed and found.size:
        raise ArgumentError(f"expected {_words(target)}, found {found.dtype}", where=where)
    if target.kind in "iu" and found.size:
        limits, ends = np.iinfo(target), (int(found.min()), int(found.max()))
        for end in ends:
            if not limits.min <= end <= limits.max:
                raise ArgumentError(f"{end} does not fit {target}", where=where)
    return found.astype(target)


def numbers(where: str, value: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As `of_kind`, with a check of the shape."""
    found = of_kind(where, value, dtype)
    if found.shape != shape:
        raise ArgumentError(f"expected shape {list(shape)}, found {list(found.shape)}", where=where)
    return found


def storage(where: str, value: Any, shape: tuple[int, ...], dtype: DType) -> npt.NDArray[np.uint8]:
    """The bytes of a matrix in its storage type, uint8 [nbytes]: unchanged, or converted from numbers of its shape.

    Raises:
        ArgumentError: the value is neither.
    """
    found, size = _array(where, value), dtype.size(shape)
    if found.dtype == np.uint8 and found.nbytes == size and dtype is not F32:
        return _bytes(found)
    if dtype.is_quantized:
        what = f"expected {size} bytes of {dtype}{list(shape)} as uint8, found {found.dtype}{list(found.shape)}"
        hint = "Quantize the values first, for example with gguf.quants.quantize, or declare the weight as f32."
        raise ArgumentError(what, where=where, hint=hint)
    if dtype is BF16 and found.dtype.name in ("uint16", "bfloat16"):
        if found.shape != shape:
            raise ArgumentError(f"expected shape {list(shape)}, found {list(found.shape)}", where=where)
        return _bytes(found)
    values = numbers(where, found, shape, np.float16 if dtype is F16 else np.float32)
    return _bytes(to_bf16(values) if dtype is BF16 else values)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array(where: str, value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different length
        raise ArgumentError(f"this is no array: {error}", where=where) from error


def _words(dtype: np.dtype[Any]) -> str:
    return "numbers" if dtype.kind == "f" else "whole numbers"
