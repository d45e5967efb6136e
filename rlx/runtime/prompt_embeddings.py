"""Prompt embeddings: a caller's embeddings, and an optional attention bias, for the first positions of a session.

Runtime, part of a session: positions that are recomputed need them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import PromptError

Floats = npt.NDArray[np.float32]

CLOSED = -1e9  # a bias of at most this value masks a key
_MASK_HINT = "Give float32 [n, n] or [heads, n, n]: 0 opens a key, -inf closes it."


@dataclass(frozen=True, eq=False)
class PromptEmbeddings:
    """The embeddings of the first positions, and an optional attention bias.

    Attributes:
        embeds: f32 [n, hidden], the input of the first layer.
        bias: f32 [n, heads, n], or None for causal attention.
    """

    embeds: Floats
    bias: Floats | None = None

    def __len__(self) -> int:
        return len(self.embeds)

    @staticmethod
    def checked(embeds: Any, bias: Any, count: int, hidden: int, heads: int) -> PromptEmbeddings:
        """Checks a caller's values and copies them, for `count` tokens.

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
        if bias is None:
            return PromptEmbeddings(rows)
        table = _numbers("attn_bias", bias, [(count, count), (heads, count, count)], _MASK_HINT)
        _refuse("attn_bias", table, np.isnan(table) | (table == np.inf), "is neither a number nor -inf")
        table = table.reshape(-1, count, count)
        _refuse("attn_bias", table[..., 0], ~(table > CLOSED).any(axis=-1), "closes every key")
        return PromptEmbeddings(rows, np.ascontiguousarray(table.swapaxes(0, 1)))

    def first(self, count: int) -> PromptEmbeddings | None:
        """The part for a session that is cut to `count` tokens; None if nothing is left."""
        if count >= len(self):
            return self
        bias = None if self.bias is None else self.bias[:count, :, :count]
        return PromptEmbeddings(self.embeds[:count], bias) if count else None

    def check_calls(self, most: int) -> None:
        """Checks that calls of at most `most` rows can compute it; `PromptError` as `end`."""
        end = 0
        while end < len(self):
            end = self.end(end, most)

    def end(self, start: int, most: int) -> int:
        """End of a call of at most `most` rows from `start`, such that no row of it sees a key after its end.

        Raises:
            PromptError: the bias opens later keys over a longer span.
        """
        stop = min(start + most, len(self))
        if self.bias is None or stop == len(self):
            return stop
        seen = np.any(self.bias > CLOSED, axis=1)  # [n, n]
        last = seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)
        reach = np.maximum.accumulate(last)[start:stop]  # the last key that any row so far sees
        ends = np.flatnonzero(reach <= np.arange(start, stop))
        if not len(ends):
            what = f"the bias opens later keys over more than {most} tokens from position {start} on"
            raise PromptError(what, where="attn_bias", hint="Raise the largest of [buckets] seq in the profile.")
        return start + int(ends[-1]) + 1


def feed(inputs: Mapping[str, Any], ids: Sequence[int], past: int, embeddings: PromptEmbeddings | None) -> None:
    """Writes the inputs of a program, for `ids` after `past` positions.

    Args:
        inputs: name -> memory for the largest call, filled from the start.
        embeddings: prompt embeddings for a program that takes them; rows after their end are computed from tokens.
    """
    rows = len(ids)
    if "tokens" in inputs:  # absent if there is no embedding lookup
        inputs["tokens"][:rows] = ids
    if "positions" in inputs:  # absent if every layer is recurrent
        inputs["positions"][:rows] = range(past, past + rows)
    if embeddings is not None:
        given = embeddings.embeds[past : past + rows]
        inputs["rows"][: len(given)] = given
        inputs["row_index"][:rows] = [*range(len(given)), *[-1] * (rows - len(given))]
        if embeddings.bias is not None:
            bias = embeddings.bias[past : past + rows, :, : past + rows]
            inputs["bias"].reshape(-1)[: bias.size] = bias.reshape(-1)


def _numbers(where: str, value: Any, shapes: list[tuple[int, ...]], hint: str | None = None) -> Floats:
    array = np.asarray(value)
    if array.ndim == 1:  # flat, in the order of a shape
        array = next((array.reshape(shape) for shape in shapes if prod(shape) == array.size), array)
    if array.dtype.kind not in "fiu" or array.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise PromptError(f"expected numbers {wanted}, found {array.dtype} {list(array.shape)}", where=where, hint=hint)
    return np.array(array, np.float32, order="C")


def _refuse(where: str, values: Floats, wrong: Any, what: str) -> None:
    """`PromptError` for the first value at which the mask `wrong`, of the same shape, is true."""
    if wrong.any():
        at = [int(i) for i in np.argwhere(wrong)[0]]
        raise PromptError(f"{values[tuple(at)]} at {at} {what}", where=where)
