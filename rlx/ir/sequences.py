"""Batches: the attribute `sequences`, with which each row of an op over a state belongs to a separate sequence.

By default the rows of a call are consecutive tokens of one sequence, after PAST_SEQ others. With `sequences` every row
is the next token of a separate sequence. States then have a leading axis of slots, and the op has two more operands:
`slots` i32[rows], the slot of each row's sequence, all different, and `past` i32[rows], its PAST_SEQ. Row r is computed
as the op without the attribute computes one row, with SEQ 1 and PAST_SEQ past[r], on the states of slot slots[r].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.dims import Shape
from rlx.ir.dtypes import I32, DType
from rlx.ir.infer import Rule
from rlx.ir.meaning import Array, Attrs, Env
from rlx.ir.node import Node, intern

#: Operands and result of every op over a state: s is a state, r has rows, w is a weight shared by all rows.
_ROLES = {
    "kv_write": ("sr", "s"),
    "rope_kv_write": ("srr", "s"),
    "attention": ("rss", "r"),
    "causal_conv": ("srw", "r"),
    "gated_delta": ("srrrrr", "r"),
}
OPS = tuple(_ROLES)


def roles(op: str, attrs: Mapping[str, Any]) -> tuple[str, str]:
    """The roles of an op's operands, without those that `sequences` adds, and of its result: s, r or w, see above."""
    operands, result = _ROLES[op]
    return ("srwr" if attrs.get("norm_eps") is not None else operands), result


def is_by_sequence(node: Node) -> bool:
    """Whether the rows of a node belong to separate sequences."""
    return node.op in _ROLES and bool(node["sequences"])


def one_row(inputs: tuple[Node, ...], attrs: Attrs, op: str) -> tuple[Node, ...]:
    """The operands for one row: one row of each, states without slots. Leaves replace computed operands."""
    letters, _ = roles(op, attrs)
    return tuple(_stand_in(i, n, letter) for i, (n, letter) in enumerate(zip(inputs[:-2], letters, strict=True)))


def _stand_in(i: int, node: Node, role: str) -> Node:
    if role == "w":
        return node
    if role == "r":
        return intern("input", (), (("name", f"row {i}"),), (1, *node.shape[1:]), node.dtype)
    state = node
    while state.inputs:  # a write; its first operand is the state
        state = state.inputs[0]
    return intern("state", (), state.attrs, state.shape[1:], state.dtype)


def rule(op: str, plain: Rule) -> Rule:
    """The shape rule of an op with and without `sequences`."""

    def by_sequence(inputs: tuple[Node, ...], attrs: Attrs) -> tuple[Shape, DType]:
        if not attrs["sequences"]:
            return plain(inputs, attrs)
        _check(op, inputs, attrs)
        shape, dtype = plain(one_row(inputs, attrs, op), attrs)
        of_rows = roles(op, attrs)[1] == "r"
        return (inputs[-1].shape + shape[1:] if of_rows else inputs[0].shape), dtype

    return by_sequence


def _check(op: str, inputs: tuple[Node, ...], attrs: Attrs) -> None:
    letters, _ = roles(op, attrs)
    if len(inputs) != len(letters) + 2 or not _fit(letters, inputs):
        found = ", ".join(f"{n.dtype}[{', '.join(map(str, n.shape))}]" for n in inputs)
        hint = "Expected its operands without a bias, states with slots in front, then slots and past i32[rows]."
        raise ShapeError(f"found operands {found or 'none'}", where=f"{op} of sequences", hint=hint)


def _fit(letters: str, inputs: tuple[Node, ...]) -> bool:
    *operands, slots, past = inputs
    first = {role: {n.shape[:1] for n, r in zip(operands, letters, strict=True) if r == role} for role in "rs"}
    indices = slots.dtype is past.dtype is I32 and len(slots.shape) == 1 and past.shape == slots.shape
    return indices and first["r"] == {slots.shape} and len(first["s"]) == 1


def meaning(op: str, plain: Any) -> Any:
    """The meaning of an op with and without `sequences`, with a signature as in `rlx.ir.meaning`."""

    def by_sequence(x: list[Array], a: Attrs, env: Env) -> Any:
        if not a["sequences"]:
            return plain(x, a, env)
        *operands, slots, past = x
        if len(set(slots.tolist())) < len(slots):
            raise ValueError(f"two rows share a slot: {slots.tolist()}")
        letters, result = roles(op, a)
        states = operands[0].copy() if letters[0] == "s" else None
        rows: list[Array] = []
        for r, (slot, length) in enumerate(zip(slots, past, strict=True)):
            at: dict[str, Any] = {"s": int(slot), "r": slice(r, r + 1), "w": ...}
            own = [v[at[role]] for v, role in zip(operands, letters, strict=True)]
            value = plain(own, a, {**env, "SEQ": 1, "PAST_SEQ": int(length)})
            row, state = value if isinstance(value, tuple) else (value, value)
            rows.append(row)
            if states is not None:
                states[slot] = state
        if result == "s":
            return states
        y = np.concatenate(rows)
        return y if states is None else (y, states)

    return by_sequence
