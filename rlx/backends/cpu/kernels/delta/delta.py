"""The gated delta rule: a linear attention with a recurrent state that decays and is corrected towards each new value.

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q         (arXiv 2412.06464)

There are three forms. Decode uses the serial form, token by token (`delta_serial.py`). Prefill uses the chunked form if
the tokens fill a chunk (`delta_chunk.py`). Shapes that are not multiples of 16 use a plain form (`delta_plain.py`).

This module chooses the form and the strip, which is the block of columns that a unit computes. A kernel for several
rows contains both the serial and the chunked form. So verifying a few tokens together costs the same as computing them
one by one, and gives the same bits if the panels have the same width.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cpu.kernel import Kernel, once
from rlx.backends.cpu.kernels.delta import chunk as delta_chunk
from rlx.backends.cpu.kernels.delta import plain as delta_plain
from rlx.backends.cpu.kernels.delta import serial as delta_serial
from rlx.backends.cpu.kernels.delta.shape import Shape, divisor
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles import LANES, Emitter
from rlx.errors import CompileError

CHUNK = 16  # tokens of a chunk: more need more arithmetic, fewer do not fill a vector
_DECODE_STRIP, _SERIAL_STRIP, _CHUNK_STRIP = 64, 64, 128  # most columns of a unit, by form
_STATE_BYTES = 64 << 10  # most bytes of the chunked form's copy of a strip


def strip(key_dim: int, value_dim: int, *, rows_static: int | None = None, serial: bool = False) -> int:
    """Columns of a unit. There are heads * value_dim / strip units."""
    if rows_static == 1:
        most = _DECODE_STRIP
    elif serial:
        most = _SERIAL_STRIP
    else:
        most = min(_CHUNK_STRIP, _STATE_BYTES // (4 * key_dim))
    return LANES * divisor(value_dim // LANES, max(1, most // LANES))


def units(heads: int, key_dim: int, value_dim: int, *, rows_static: int | None = None, serial: bool = False) -> int:
    """Number of work units of a call."""
    if _is_odd(key_dim, value_dim):
        return heads
    return heads * (value_dim // strip(key_dim, value_dim, rows_static=rows_static, serial=serial))


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
    rows_static: int | None = None,
    serial: bool = False,
    chunk: int = CHUNK,
    aside: bool = False,
) -> Kernel:
    """A kernel for the gated delta rule over the rows of a call.

    Buffers: `state` f32[heads, key_dim, value_dim], updated in place; `q`, `k` f32[rows, key_heads, key_dim]; `v`
    f32[rows, heads, value_dim]; `g` (at most 0), `beta` f32[rows, heads]; `out` f32[rows, heads, value_dim], which must
    not overlap the others. Extents: `rows`. There is no extent if `rows_static` is 1 and key_dim and value_dim are
    multiples of 16. Units: see `units`. NaN and infinity propagate to later rows of the head. In the chunked form they
    may also reach earlier rows of the chunk.

    Args:
        order: "tiled": head h uses key head h % key_heads. "grouped": it uses key head h // (heads / key_heads).
        rows_static: the value of `rows`, if it is known at compile time and the state is updated in place.
        serial: use the serial form where the default is the chunked form.
        chunk: tokens of a chunk, a multiple of 16.
        aside: leave `state` unchanged and write the new state to the buffer `after`, which precedes `out`.

    Raises:
        CompileError: the shape, the chunk or the order is not supported.
    """
    if key_heads < 1 or heads < 1 or heads % key_heads:
        raise CompileError(f"{heads} heads are no multiple of {key_heads} key heads", where="gated_delta")
    if key_dim < 1 or value_dim < 1:
        raise CompileError(f"a state of {key_dim} by {value_dim}", where="gated_delta")
    if chunk < 1 or chunk % LANES:
        raise CompileError(f"chunks of {chunk} tokens", where="gated_delta", hint=f"Take a multiple of {LANES}.")
    if order not in ("tiled", "grouped"):
        raise CompileError(f"heads in order {order!r}", where="gated_delta", hint="Orders are tiled and grouped.")
    if _is_odd(key_dim, value_dim):
        return delta_plain.plain(heads, key_heads, key_dim, value_dim, scale=scale, order=order, aside=aside)
    single = rows_static == 1
    columns = strip(key_dim, value_dim, rows_static=rows_static, serial=serial)
    vectors = divisor(columns // LANES, delta_serial.panel_vectors(target.vectors, single))
    shape = Shape(heads, key_heads, key_dim, value_dim, scale, order, columns, vectors)
    names = ["state", "q", "k", "v", "g", "beta", *["after"] * aside, "out"]
    e = Emitter(target, names, [] if single else ["rows"])
    if serial or single:
        delta_serial.Serial(e, shape, single).write()
        return e.finish("gated_delta", _outline(shape, None))
    panels = replace(shape, vectors=divisor(columns // LANES, delta_chunk.panel_vectors(target.vectors)))
    few = e.b.icmp_signed("<", e.args["rows"], e.i64(chunk))
    with e.when(few):
        delta_serial.Serial(e, shape, single).write()
    with e.when(e.b.not_(few)):
        delta_chunk.Chunked(e, panels, chunk).write()
    return e.finish("gated_delta", _outline(shape, chunk))


def _is_odd(key_dim: int, value_dim: int) -> bool:
    return key_dim % LANES > 0 or value_dim % LANES > 0


def _outline(shape: Shape, chunk: int | None) -> str:
    """The readable outline of the kernel. `chunk` is None for the serial form."""
    key_head = f"h % {shape.key_heads}" if shape.order == "tiled" else f"h // {shape.heads // shape.key_heads}"
    how = f"in chunks of {chunk} tokens, fewer token by token" if chunk else "token by token"
    return (
        f"# {shape.heads} heads of {shape.key_dim} by {shape.value_dim} on {shape.key_heads} key heads, {how}\n"
        f"for unit in range(begin, end):  # {shape.strip} columns of head h\n"
        f"    S = state[h, :, columns]\n"
        f"    for row in rows:\n"
        f"        S = exp(g[row, h]) * S\n"
        f"        d = beta[row, h] * (v[row, h, columns] - S.T @ k[row, {key_head}])\n"
        f"        S = S + outer(k[row, {key_head}], d)\n"
        f"        out[row, h, columns] = {shape.scale!r} * S.T @ q[row, {key_head}]\n"
    )
