"""Prompt embeddings: rows that take the place of token embeddings in a sequence: images, or a caller's own values.

Runtime, part of a sequence: positions that are recomputed need them again. A prompt with images has one span for each;
the caller's own embeddings are one span at 0, with an optional attention bias.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.engine.kv.prefix import Keys
from rlx.errors import PromptError

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]

CLOSED = -1e9  # a bias of at most this value masks a key
PAD = 0  # the id that is looked up where an image stands, also in embedding tables of single layers
COMPONENTS = 3  # of a position in an image: time, row and column
_MASK_HINT = "Give float32 [n, n] or [heads, n, n]: 0 opens a key, -inf closes it."
_BUCKET_HINT = "Raise the largest of [buckets] seq in the profile."


@dataclass(frozen=True, eq=False)
class EmbeddedSpan:
    """A run of positions that are computed from given rows: an image, or a caller's own embeddings.

    Attributes:
        start: its first position.
        rows: f32 [n, hidden], the input of the first layer at its positions; or wider, with parts behind it that some
            layers after it add: see `variants.with_rows`.
        digest: identity of an image and of how it was encoded: prompts with equal digests share what is computed. The
            ids at its positions are then not looked up. None for a caller's own embeddings: their values and ids are
            their identity.
        grid: (rows, columns) of an image whose positions have three components (M-RoPE); None if positions count on.
        two_way: whether its positions see each other, also later ones, in the layers that do so.
    """

    start: int
    rows: Floats
    digest: bytes | None = None
    grid: tuple[int, int] | None = None
    two_way: bool = False

    @property
    def end(self) -> int:
        """Position after its last row."""
        return self.start + len(self.rows)

    @property
    def extent(self) -> int:
        """By how much the positions of what follows it are larger than its own first one."""
        n = len(self.rows)
        return n if self.grid is None else max(-(-n // self.grid[1]), min(n, self.grid[1]))

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """A number for each row, u64 [n], from the digest and the row's index, or from its values."""
        if self.digest is None:
            found = (blake2b(np.ascontiguousarray(row).data, digest_size=8).digest() for row in self.rows)
            return np.frombuffer(b"".join(found), np.uint64)
        base = int.from_bytes(blake2b(self.digest, digest_size=8).digest(), "little")
        return _mixed(np.arange(len(self.rows), dtype=np.uint64) + np.uint64(base))

    def cut(self, length: int) -> EmbeddedSpan:
        """The part before position `length`. Rows that no longer see all of an image make another one."""
        if length >= self.end:
            return self
        digest, count = self.digest, length - self.start
        if self.two_way and digest is not None:
            digest = blake2b(digest, key=count.to_bytes(8, "little"), digest_size=16).digest()
        return replace(self, rows=self.rows[:count], digest=digest)


@dataclass(frozen=True, eq=False)
class PromptEmbeddings:
    """The embedded spans of a sequence, and an optional attention bias for its first positions.

    Args:
        spans: in order, without overlaps.
        bias: f32 [n, heads or 1, n] in place of the causal mask of the first n positions, which one span covers.

    Raises:
        PromptError: spans overlap, are empty or not in order; or rows are not float32 [n, hidden].
    """

    spans: tuple[EmbeddedSpan, ...]
    bias: Floats | None = None

    def __post_init__(self) -> None:
        end = 0
        for i, span in enumerate(self.spans):
            if span.rows.ndim != 2 or not len(span.rows) or span.rows.dtype != np.float32:
                found = f"{span.rows.dtype} {list(span.rows.shape)}"
                raise PromptError(f"expected rows float32 [n, hidden], found {found}", where=f"span {i}")
            if span.start < end:
                raise PromptError(f"it starts at {span.start}, before position {end}", where=f"span {i}")
            end = span.end
        if self.bias is not None and not (self.spans and self.bias.shape[::2] == (len(self.spans[0].rows),) * 2):
            raise PromptError(f"a bias {list(self.bias.shape)} does not fit the rows", where="attn_bias")

    # -- a caller's own -----------------------------------------------------------------------------------------------

    @staticmethod
    def checked(embeds: Any, bias: Any, count: int, hidden: int, heads: int) -> PromptEmbeddings:
        """Checks a caller's own embeddings for `count` tokens, and copies them.

        Args:
            embeds: numbers [count, hidden], or flat in that order.
            bias: None, or numbers [count, count] or [heads, count, count], or flat in that order; added to the scaled
                scores and replaces the causal mask: 0 opens a key, -inf masks it, including later keys. Windows still
                apply.

        Raises:
            PromptError: another shape, a value that is not a number, NaN, or a row whose bias masks every key.
        """
        rows = _numbers("embeds", embeds, [(count, hidden)])
        _refuse("embeds", rows, ~np.isfinite(rows), "is not finite")
        spans = (EmbeddedSpan(0, rows),)
        if bias is None:
            return PromptEmbeddings(spans)
        table = _numbers("attn_bias", bias, [(count, count), (heads, count, count)], _MASK_HINT)
        _refuse("attn_bias", table, np.isnan(table) | (table == np.inf), "is neither a number nor -inf")
        table = table.reshape(-1, count, count)
        _refuse("attn_bias", table[..., 0], ~(table > CLOSED).any(axis=-1), "closes every key")
        return PromptEmbeddings(spans, np.ascontiguousarray(table.swapaxes(0, 1)))

    # -- spans ----------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """Position after the last span."""
        return self.spans[-1].end if self.spans else 0

    @property
    def image_ends(self) -> list[int]:
        """The positions after the images: another prompt may have the same image and go on with other tokens."""
        return [span.end for span in self.spans if span.digest is not None]

    def is_biased(self, position: int) -> bool:
        """Whether a position is computed with the bias."""
        return self.bias is not None and position < len(self.bias)

    def within(self, start: int, stop: int) -> Iterable[tuple[EmbeddedSpan, int, int]]:
        """The spans with positions in start .. stop, each with its first one and the one after its last there."""
        for span in self.spans if start < self.end else ():
            if span.start < stop and start < span.end:
                yield span, max(start, span.start), min(stop, span.end)

    def check_width(self, widths: Sequence[int]) -> None:
        """`PromptError` if rows have none of the widths of the model's rows."""
        for i, span in enumerate(self.spans):
            if span.rows.shape[1] not in widths:
                what = f"its rows have {span.rows.shape[1]} elements, those of the model {widths[0]}"
                raise PromptError(what, where=f"span {i}", hint="Encode the image with the tower of this model.")

    def fitting(self, components: bool, two_way: bool) -> PromptEmbeddings:
        """The spans for a model: without grids or two-way attention if it has none.

        Raises:
            PromptError: a grid of another number of rows.
        """
        spans = []
        for i, span in enumerate(self.spans):
            grid = span.grid if components else None
            if grid is not None and prod(grid) != len(span.rows):
                what = f"a grid of {grid[0]} x {grid[1]} has {prod(grid)} rows, found {len(span.rows)}"
                raise PromptError(what, where=f"span {i}")
            spans.append(replace(span, grid=grid, two_way=span.two_way and two_way))
        return replace(self, spans=tuple(spans))

    def cut(self, length: int) -> PromptEmbeddings | None:
        """The part for a sequence that is cut to `length` positions; None if nothing is left."""
        if length >= self.end:
            return self
        spans = tuple(span.cut(length) for span in self.spans if span.start < length)
        bias = None if self.bias is None else self.bias[:length, :, :length]
        return PromptEmbeddings(spans, bias) if spans else None

    def independent(self, length: int) -> int:
        """How many of the first `length` positions surely see nothing behind it."""
        cut = self.two_way_at(length)
        return 0 if self.is_biased(length) else length if cut is None else cut.start

    def two_way_at(self, position: int) -> EmbeddedSpan | None:
        """The two-way span with rows before and from a position on, or None."""
        return next((span for span in self.spans if span.two_way and span.start < position < span.end), None)

    @cached_property
    def ahead(self) -> PromptEmbeddings:
        """The spans one position earlier: for what computes each position from the token after it."""
        first = (replace(span, start=span.start - 1) for span in self.spans if span.start)
        rest = (replace(span, rows=span.rows[1:]) for span in self.spans if not span.start and len(span.rows) > 1)
        return PromptEmbeddings((*rest, *first))

    # -- calls ----------------------------------------------------------------------------------------------------

    def check_calls(self, most: int) -> None:
        """`PromptError` if calls of at most `most` rows cannot compute them."""
        for i, span in enumerate(self.spans):
            if span.two_way and len(span.rows) > most:
                what = f"image {i} has {len(span.rows)} rows, which see each other, and a call holds {most}"
                hint = f"{_BUCKET_HINT[:-1]}, or encode the image in fewer rows."
                raise PromptError(what, where=f"image {i}", hint=hint)
        end = 0
        while self.is_biased(end):
            end = self.call_end(end, end + most)

    def call_end(self, start: int, stop: int) -> int:
        """End of a call from `start`, such that no row of it sees a key after its end: `stop`, or before it.

        It is after `stop` if a two-way span starts at `start`, or before it, and is longer than that.

        Raises:
            PromptError: the bias opens later keys over a longer span.
        """
        if self.bias is not None and self.is_biased(start):
            return self._biased_end(self.bias, start, min(stop, len(self.bias)))
        cut = self.two_way_at(stop)
        return stop if cut is None else cut.start if cut.start > start else cut.end

    @staticmethod
    def _biased_end(bias: Floats, start: int, stop: int) -> int:
        if stop == len(bias):
            return stop
        seen = np.any(bias > CLOSED, axis=1)  # [n, n]
        last = seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)
        reach = np.maximum.accumulate(last)[start:stop]  # the last key that any row so far sees
        ends = np.flatnonzero(reach <= np.arange(start, stop))
        if not len(ends):
            what = f"the bias opens later keys over more than {stop - start} tokens from position {start} on"
            raise PromptError(what, where="attn_bias", hint=_BUCKET_HINT)
        return start + int(ends[-1]) + 1

    # -- positions ------------------------------------------------------------------------------------------------

    @cached_property
    def _shifts(self) -> tuple[list[int], list[int]]:
        """The ends of spans with a grid, and what to add to an index after each of them."""
        ends, shifts, shift = list[int](), [0], 0
        for span in self.spans:
            if span.grid is not None:
                shift += span.extent - len(span.rows)
                ends.append(span.end)
                shifts.append(shift)
        return ends, shifts

    def shift(self, index: int) -> int:
        """The difference between a token's position and its index: below 0 after an image with a grid."""
        ends, shifts = self._shifts
        return shifts[bisect_right(ends, index)]

    def components(self, start: int, stop: int) -> Positions:
        """The positions of start .. stop as i32 [stop - start, 3]: time, row, column; all equal outside of images.

        In an image of grid (rows, columns) after which text goes on at the largest of its positions plus 1, row i has
        the position of its start, plus 0, plus i // columns, plus i % columns. Source: arXiv 2409.12191.
        """
        index = np.arange(start, stop)
        ends, shifts = self._shifts
        places = index + np.array(shifts)[np.searchsorted(ends, index, side="right")]
        found = np.repeat(places[:, None], COMPONENTS, axis=1)
        for span, first, last in self.within(start, stop):
            if span.grid is not None:
                own = np.arange(first - span.start, last - span.start)
                base = span.start + self.shift(span.start)
                place = np.stack([np.zeros_like(own), own // span.grid[1], own % span.grid[1]], axis=1)
                found[first - start : last - start] = base + place
        return found.astype(np.int32)

    # -- identity -------------------------------------------------------------------------------------------------

    def identify(self, keys: Keys) -> None:
        """Replaces ids, i64 [positions], by the keys of the rows that stand there, which are below 0."""
        for span, first, last in self.within(0, len(keys)):
            part = slice(first, last)
            found = span.hashes[: last - first]
            if span.digest is None:  # the ids count, too: layers may look them up
                found = _mixed(found ^ keys[part].astype(np.uint64))
            keys[part] = -1 - (found >> np.uint64(1)).astype(np.int64)

    def looked_up(self, ids: Sequence[int], past: int) -> Sequence[int]:
        """The ids after `past` positions, with `PAD` where an image stands."""
        found = ids
        for span, first, last in self.within(past, past + len(ids)):
            if span.digest is not None:
                found = list(found) if found is ids else found
                found[first - past : last - past] = [PAD] * (last - first)  # type: ignore[index]
        return found


def shift_at(embeddings: PromptEmbeddings | None, index: int) -> int:
    """The difference between a token's position and its index, 0 if no image with its own positions is before it."""
    return 0 if embeddings is None else embeddings.shift(index)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A permutation of 64-bit numbers in which each bit depends on all: the finalizer of SplitMix64 (Steele 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _numbers(where: str, value: Any, shapes: list[tuple[int, ...]], hint: str | None = None) -> Floats:
    array = np.asarray(value)
    if array.ndim == 1:  # flat, in the order of a shape
        array = next((array.reshape(shape) for shape in shapes if prod(shape) == array.size), array)
    if array.dtype.kind not in "fiu" or array.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise PromptError(
            f"expected numbers {expected}, found {array.dtype} {list(array.shape)}", where=where, hint=hint
        )
    return np.array(array, np.float32, order="C")


def _refuse(where: str, values: Floats, wrong: Any, what: str) -> None:
    """`PromptError` for the first value at which the mask `wrong`, of the same shape, is true."""
    if wrong.any():
        at = [int(i) for i in np.argwhere(wrong)[0]]
        raise PromptError(f"{values[tuple(at)]} at {at} {what}", where=where)
