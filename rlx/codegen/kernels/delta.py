"""The gated delta rule: a linear attention whose state is corrected towards each new value, and decays.

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q         (arXiv 2412.06464)

Two forms: token by token (`delta_serial.py`), which decoding runs, and in chunks of tokens (`delta_chunk.py`), which
prefill runs where the tokens fill a chunk; and a plain one for odd shapes (`delta_plain.py`). Here is the choice
between them, and of the strips of columns that units are. A kernel for several rows holds both forms, so a few tokens
that are verified together cost what they would one by one, and give the same bits where panels are equally wide.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.codegen.kernel import Kernel, once
from rlx.codegen.kernels import delta_chunk, delta_plain, delta_serial
from rlx.codegen.kernels.delta_shape import Shape, divisor
from rlx.codegen.target import Target
from rlx.codegen.tiles import LANES, Emitter
from rlx.errors import CompileError

CHUNK = 16  # tokens of a chunk: more are more arithmetic, fewer do not fill a vector
_DECODE_STRIP, _SERIAL_STRIP, _CHUNK_STRIP = 64, 64, 128  # columns of a unit, at most
_STATE_BYTES = 64 << 10  # of the copy of a strip that the chunked form keeps, at most


def strip(key_dim: int, value_dim: int, *, rows_static: int | None = None, serial: bool = False) -> int:
    """Columns of a unit: there are heads * value_dim / strip units."""
    if rows_static == 1:
        most = _DECODE_STRIP
    elif serial:
        most = _SERIAL_STRIP
    else:
        most = min(_CHUNK_STRIP, _STATE_BYTES // (4 * key_dim))
    return LANES * divisor(value_dim // LANES, max(1, most // LANES))


def units(heads: int, key_dim: int, value_dim: int, *, rows_static: int | None = None, serial: bool = False) -> int:
    """Work units of a call."""
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
    not overlap the others. Extents: `rows`; none where `rows_static` is 1, but for sides that are no multiples of 16.
    Units: see `units`. A number that is not finite reaches the later rows of its head, and in the chunked form possibly
    earlier ones of its chunk.

    Args:
        order: "tiled", head h uses key head h % key_heads, or "grouped", h // (heads / key_heads).
        rows_static: `rows`, where it is known and the state is updated in place.
        serial: token by token where the default would be in chunks.
        chunk: tokens of a chunk, a multiple of 16.
        aside: leave the state as it is, and write what it would become to the buffer `after`, in front of `out`.

    Raises:
        CompileError: a shape that no code is written for.
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
    """What a person reads instead of the vector code; `chunk` is None for token by token."""
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
