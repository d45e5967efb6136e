"""The gated delta rule: a linear attention with a recurrent state that decays and is corrected towards each new value.

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q         (arXiv 2412.06464)

Without the correction, d = beta v, it is the recurrence of Mamba-2 (arXiv 2405.21060).

A token needs the state after the token before it. So the kernel goes through the tokens one by one, with the state in
the caches (`serial.py`), in a prompt as in decode, and a token has the same bits in both. Shapes that are not multiples
of 16 use a plain form (`plain.py`).

The columns of a state are independent. This module chooses the strip, which is the block of columns that a unit
computes. Matrix products over chunks of 16 tokens (arXiv 2406.06484) would take 3.4 multiply-adds per element of the
state and token, where this form takes 4. But they add in another order, so that a token's bits would depend on its
place in the call.
"""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel, once
from rlx.backends.cpu.kernels.delta import plain as delta_plain
from rlx.backends.cpu.kernels.delta.serial import Serial, panel_vectors
from rlx.backends.cpu.kernels.delta.shape import Shape, divisor
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import LANES, Emitter
from rlx.errors import CompileError

_STRIP = 64  # most columns of a unit


def strip(value_dim: int) -> int:
    """Columns of a unit. There are heads * value_dim / strip units."""
    return LANES * divisor(value_dim // LANES, _STRIP // LANES)


def units(heads: int, key_dim: int, value_dim: int) -> int:
    """Number of work units of a call."""
    return heads if _is_odd(key_dim, value_dim) else heads * (value_dim // strip(value_dim))


@once
def gated_delta(
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    target: Target,
    *,
    scale: float,
    order: str = "tiled",
    corrects: bool = True,
    rows_static: int | None = None,
    aside: bool = False,
) -> Kernel:
    """A kernel for the gated delta rule over the rows of a call.

    Buffers: `state` f32[heads, key_dim, value_dim], updated in place; `q`, `k` f32[rows, key_heads, key_dim]; `v`
    f32[rows, heads, value_dim]; `g` (at most 0), `beta` f32[rows, heads]; `out` f32[rows, heads, value_dim], which must
    not overlap the others. Extents: `rows`. There is no extent if `rows_static` is 1 and key_dim and value_dim are
    multiples of 16. Units: see `units`. NaN and infinity propagate to later rows of the head. The bits of
    a row depend neither on the rows after it nor on the split of rows into calls.

    Args:
        order: "tiled": head h uses key head h % key_heads. "grouped": it uses key head h // (heads / key_heads).
        corrects: whether d is beta (v - S^T k), or beta v.
        rows_static: the value of `rows`, if it is known at compile time and the state is updated in place.
        aside: leave `state` unchanged and write the new state to the buffer `after`, which precedes `out`.

    Raises:
        CompileError: the shape or the order is not supported.
    """
    if key_heads < 1 or heads < 1 or heads % key_heads:
        raise CompileError(f"{heads} heads are no multiple of {key_heads} key heads", where="gated_delta")
    if key_dim < 1 or value_dim < 1:
        raise CompileError(f"a state of {key_dim} by {value_dim}", where="gated_delta")
    if order not in ("tiled", "grouped"):
        raise CompileError(f"heads in order {order!r}", where="gated_delta", hint="Orders are tiled and grouped.")
    if _is_odd(key_dim, value_dim):
        sizes = heads, key_heads, key_dim, value_dim
        return delta_plain.plain(*sizes, scale=scale, order=order, corrects=corrects, aside=aside)
    single = rows_static == 1
    columns = strip(value_dim)
    vectors = divisor(columns // LANES, panel_vectors(target.vectors, single))
    shape = Shape(heads, key_heads, key_dim, value_dim, scale, order, corrects, columns, vectors)
    e = Emitter(target, ["state", "q", "k", "v", "g", "beta", *["after"] * aside, "out"], [] if single else ["rows"])
    Serial(e, shape, single).write()
    return e.finish("gated_delta", _outline(shape))


def _is_odd(key_dim: int, value_dim: int) -> bool:
    return key_dim % LANES > 0 or value_dim % LANES > 0


def _outline(shape: Shape) -> str:
    """The readable outline of the kernel."""
    key_head = f"h % {shape.key_heads}" if shape.order == "tiled" else f"h // {shape.heads // shape.key_heads}"
    value = "v[row, h, columns]"
    if shape.corrects:
        value = f"({value} - S.T @ k[row, {key_head}])"
    return (
        f"# {shape.heads} heads of {shape.key_dim} by {shape.value_dim} on {shape.key_heads} key heads\n"
        f"for unit in range(begin, end):  # {shape.strip} columns of head h\n"
        f"    S = state[h, :, columns]\n"
        f"    for row in rows:\n"
        f"        S = exp(g[row, h]) * S\n"
        f"        d = beta[row, h] * {value}\n"
        f"        S = S + outer(k[row, {key_head}], d)\n"
        f"        out[row, h, columns] = {shape.scale!r} * S.T @ q[row, {key_head}]\n"
    )
