"""The gated delta rule for states whose dimensions are not multiples of 16: token by token, one unit per head.

This is a loop kernel, so LLVM's vectorizer handles partial vectors. Published models have dimensions of 128 and use
`serial.py`.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.loops import loop_kernel
from rlx.ir.dtypes import F32
from rlx.scalars import HOLE, SUM_FLAGS, Ptr, Scalar, exp, f32, fastmath

#: Holes: value heads, key heads, value heads per key head, whether heads are in "tiled" order and whether values are
#: corrected (see `delta.py`), the dimensions of a state, the scale.
HEADS: int = HOLE
KEY_HEADS: int = HOLE
GROUP: int = HOLE
TILED: bool = HOLE
CORRECTS: bool = HOLE
KEY_DIM: int = HOLE
VALUE_DIM: int = HOLE
SCALE: float = HOLE

BUFFERS = ("state", "q", "k", "v", "g", "beta", "out")


def plain(
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    scale: float,
    order: str,
    corrects: bool = True,
    aside: bool = False,
) -> Kernel:
    """The kernel of `delta.gated_delta` for any shape, with the extent `rows`. A unit is a head."""
    holes: dict[str, Any] = {
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "GROUP": heads // key_heads,
        "TILED": order == "tiled",
        "CORRECTS": corrects,
    }
    holes |= {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "SCALE": scale}
    template, buffers = (_delta_aside, (*BUFFERS[:-1], "after", "out")) if aside else (_gated_delta, BUFFERS)
    return loop_kernel(template, holes, [(name, F32) for name in buffers], ("rows",))


def _delta_aside(
    state: Ptr, q: Ptr, k: Ptr, v: Ptr, g: Ptr, beta: Ptr, after: Ptr, out: Ptr, rows: int, begin: int, end: int
) -> None:
    for i in range(begin * KEY_DIM * VALUE_DIM, end * KEY_DIM * VALUE_DIM):
        after[i] = state[i]
    _gated_delta(after, q, k, v, g, beta, out, rows, begin, end)


def _gated_delta(
    state: Ptr, q: Ptr, k: Ptr, v: Ptr, g: Ptr, beta: Ptr, out: Ptr, rows: int, begin: int, end: int
) -> None:
    for head in range(begin, end):
        key_head = head % KEY_HEADS if TILED else head // GROUP
        for row in range(rows):
            key = (row * KEY_HEADS + key_head) * KEY_DIM
            value = (row * HEADS + head) * VALUE_DIM
            decay = exp(g[row * HEADS + head])
            step = beta[row * HEADS + head]
            # `out` holds S^T k first, then the delta, then the result.
            clear(out, value)
            for i in range(KEY_DIM):
                read(state, (head * KEY_DIM + i) * VALUE_DIM, decay, k[key + i], out, value)
            for j in range(VALUE_DIM):
                known = out[value + j] if CORRECTS else f32(0.0)
                out[value + j] = step * (v[value + j] - known)
            for i in range(KEY_DIM):
                correct(state, (head * KEY_DIM + i) * VALUE_DIM, k[key + i], out, value)
            clear(out, value)
            for i in range(KEY_DIM):
                read(state, (head * KEY_DIM + i) * VALUE_DIM, f32(1.0), f32(SCALE) * q[key + i], out, value)


def clear(out: Ptr, at: int) -> None:
    for j in range(VALUE_DIM):
        out[at + j] = f32(0.0)


@fastmath(*SUM_FLAGS)
def read(state: Ptr, at: int, decay: Scalar, weight: Scalar, out: Ptr, to: int) -> None:
    """Multiplies a row of the state by `decay`, and adds it times `weight` to `out`."""
    for j in range(VALUE_DIM):
        kept = decay * state[at + j]
        state[at + j] = kept
        out[to + j] += weight * kept


@fastmath(*SUM_FLAGS)
def correct(state: Ptr, at: int, weight: Scalar, out: Ptr, delta: int) -> None:
    for j in range(VALUE_DIM):
        state[at + j] += weight * out[delta + j]
