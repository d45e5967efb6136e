"""Readers of KV caches for attention: products of queries with keys, and values as f32, for every cache type.

In caches of f32, f16 and bf16, a tile of keys is [head_dim][16 positions] and a row of values is [head_dim].

In caches of q8_0 and q4_0, 32 elements of a head at a position make a block of 34 or 18 bytes, with an f16 scale:

    values   rows of blocks in GGUF order: the scale, then 32 bytes of q8_0, or 16 bytes of q4_0, whose low nibbles
             are elements 0..15 and whose high nibbles are elements 16..31
    keys     for every 16 positions block after block: 16 scales; then [32 elements][16 positions] bytes of q8_0, or
             [4][16 positions] words of q4_0, whose nibble j in word i is element 8 i + j

With these layouts a load takes one element of 16 positions, or 16 elements of a head. Values are exact products of
codes and scales. Scores are sums over the codes of a block, times its scale. All results have the precision of f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llvmlite import ir

from rlx.backends.cpu.tiles import F32X16, I8, I16, I32X16, LANES, Emitter, Index, vector
from rlx.errors import CompileError
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType

NUMBERS = (F32, F16, BF16)
BLOCKS = (Q8_0, Q4_0)

_STEP = 8  # elements of a head whose codes are unpacked together
_NIBBLES = ir.Constant(F32X16, [float(code - 8) for code in range(16)])  # the number that each code of q4_0 stands for


class CacheReader(Protocol):
    """Emits the loads of one cache type.

    Attributes:
        row_bytes: bytes of a head per position, in rows and in tiles.
        vector_bytes: bytes of 16 elements of a position, or of one element of 16 positions.
        widest: the number of vectors in a call of `values` must be a multiple of this.
    """

    row_bytes: int
    vector_bytes: int
    widest: int

    def dots(self, keys: Sequence[ir.Value], queries: Sequence[ir.Value], ahead: ir.Value) -> list[ir.Value]:
        """Products of queries with tiles of 16 keys: for each query, one vector per tile.

        Args:
            keys: addresses of tiles.
            queries: addresses of f32[head_dim].
            ahead: address to prefetch from; the number of bytes is that of the tiles.
        """

    def values(self, row: ir.Value, first: Index, count: int, mask: ir.Value | None) -> list[ir.Value]:
        """`count` vectors of a row, from vector `first` on. Lanes outside the mask are 0, and are not read."""


def cache_reader(e: Emitter, dtype: DType, head_dim: int) -> CacheReader:
    """The reader for caches of a type.

    Raises:
        CompileError: caches cannot have this type, or its block size does not divide the head.
    """
    if dtype in NUMBERS:
        return _Numbers(e, dtype, head_dim)
    if dtype not in BLOCKS:
        hint = f"Caches are {', '.join(map(str, (*NUMBERS, *BLOCKS)))}."
        raise CompileError(f"no attention kernel reads {dtype} caches", hint=hint)
    if head_dim % dtype.block:
        hint = f"Take f16: heads of {head_dim} are no multiple of the blocks of {dtype.block}."
        raise CompileError(f"heads of {head_dim} do not fit {dtype} caches", where="attention", hint=hint)
    return _Blocks(e, dtype, head_dim)


def _products(
    e: Emitter, queries: Sequence[ir.Value], keys: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    """The sums plus the product of every query with every key vector."""
    pairs = [(query, key) for query in queries for key in keys]
    return [e.fma(query, key, total) for (query, key), total in zip(pairs, sums, strict=True)]


class _Numbers:
    """f32, f16 and bf16."""

    widest = 1

    def __init__(self, e: Emitter, dtype: DType, head_dim: int) -> None:
        self.e, self.dtype, self.head_dim = e, dtype, head_dim
        self.row_bytes, self.vector_bytes = dtype.row_bytes(head_dim), dtype.row_bytes(LANES)

    def dots(self, keys: Sequence[ir.Value], queries: Sequence[ir.Value], ahead: ir.Value) -> list[ir.Value]:
        e, step = self.e, len(keys) * self.vector_bytes
        with e.loop(0, self.head_dim, 1, [e.f32(0.0)] * (len(queries) * len(keys))) as d:
            e.prefetch(e.at(ahead, (d.i, step)), step, level=2)
            vectors = [e.load_as_f32(self.dtype, e.at(key, (d.i, self.vector_bytes))) for key in keys]
            d.values = _products(e, [e.splat_f32(e.at(q, (d.i, 4))) for q in queries], vectors, d.values)
        return d.results

    def values(self, row: ir.Value, first: Index, count: int, mask: ir.Value | None) -> list[ir.Value]:
        e = self.e
        start = e.at(row, (first, self.vector_bytes))
        return [e.load_as_f32(self.dtype, e.at(start, self.vector_bytes * v), mask) for v in range(count)]


class _Blocks:
    """q8_0 and q4_0."""

    def __init__(self, e: Emitter, dtype: DType, head_dim: int) -> None:
        self.e, self.dtype, self.head_dim = e, dtype, head_dim
        self.row_bytes, self.vector_bytes = dtype.row_bytes(head_dim), dtype.nbytes // 2
        self.widest = 2 if dtype is Q4_0 else 1  # a byte of q4_0 has elements of two vectors

    def dots(self, keys: Sequence[ir.Value], queries: Sequence[ir.Value], ahead: ir.Value) -> list[ir.Value]:
        e, nothing = self.e, [self.e.f32(0.0)] * (len(queries) * len(keys))
        tile, steps = LANES * self.dtype.nbytes, self.dtype.block // _STEP
        with e.loop(0, self.head_dim // self.dtype.block, 1, nothing) as block:
            blocks = [e.at(key, (block.i, tile)) for key in keys]
            with e.loop(0, steps, 1, nothing) as s:
                step = e.mul_add(block.i, steps, s.i)
                e.prefetch(e.at(ahead, (step, len(keys) * tile // steps)), len(keys) * tile // steps, level=2)
                codes = [self._codes(e.at(b, 2 * LANES), s.i) for b in blocks]
                s.values = list(s.values)
                for j in range(_STEP):
                    elements = [e.splat_f32(e.at(q, (step, 4 * _STEP), 4 * j)) for q in queries]
                    s.values = _products(e, elements, [c[j] for c in codes], s.values)
            scales = [e.half_to_f32(e.load(vector(I16), b, 2)) for b in blocks] * len(queries)
            terms = zip(s.results, scales, block.values, strict=True)
            block.values = [e.fma(part, scale, total) for part, scale, total in terms]
        return block.results

    def _codes(self, tile: ir.Value, step: ir.Value) -> list[ir.Value]:
        """The codes of 8 elements of 16 keys, as f32."""
        e = self.e
        if self.dtype is Q8_0:
            start = e.at(tile, (step, _STEP * LANES))
            return [e.to_f32(e.load(vector(I8), e.at(start, LANES * j))) for j in range(_STEP)]
        words = e.load(I32X16, e.at(tile, (step, 4 * LANES)))
        return self._nibbles(words, range(0, 4 * _STEP, 4))

    def _nibbles(self, words: ir.Value, bits: Sequence[int], scale: ir.Value | None = None) -> list[ir.Value]:
        """The q4_0 codes at these bit offsets of each word, as f32, times a scale that is equal in all lanes."""
        e = self.e
        shifted = [e.b.lshr(words, e.i32(bit)) if bit else words for bit in bits]
        if e.isa.looks_up_f32:
            table = _NIBBLES if scale is None else e.b.fmul(_NIBBLES, scale)
            return [e.isa.look_up_f32(e, table, word) for word in shifted]
        codes = [e.b.fsub(e.to_f32(e.b.and_(word, e.i32(15))), e.f32(8.0)) for word in shifted]
        return codes if scale is None else [e.b.fmul(code, scale) for code in codes]

    def values(self, row: ir.Value, first: Index, count: int, mask: ir.Value | None) -> list[ir.Value]:
        e = self.e
        if count > 1:  # whole blocks, because heads are and the sizes of calls are powers of two
            start = e.at(row, (first, self.vector_bytes))
            return [v for pair in range(0, count, 2) for v in self._block(e.at(start, self.vector_bytes * pair))]
        first = e.i64(first)
        block = e.at(row, (e.b.lshr(first, e.i64(1)), self.dtype.nbytes))
        half = e.at(block, (e.b.and_(first, e.i64(1)), LANES), 2)
        return [e.b.fmul(e.to_f32(e.load(vector(I8), half)), self._scale(block))]

    def _scale(self, block: ir.Value) -> ir.Value:
        return self.e.half_to_f32(self.e.splat(self.e.load(I16, block, 2)))

    def _block(self, block: ir.Value) -> list[ir.Value]:
        e, scale = self.e, self._scale(block)
        halves = [e.load(vector(I8), e.at(block, 2 + at)) for at in range(0, self.dtype.nbytes - 2, LANES)]
        if self.dtype is Q8_0:
            return [e.b.fmul(e.to_f32(half), scale) for half in halves]
        return self._nibbles(e.b.zext(halves[0], I32X16), (0, 4), scale)
