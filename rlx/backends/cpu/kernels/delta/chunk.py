"""The gated delta rule in chunks of tokens: small matrix products instead of one pass over the state per token.

decay(t, i) is the product of exp(g) over the tokens after i up to t, and decay(t) that from the chunk's start up to t:

    A[t, i] = -beta_t decay(t, i) k_t . k_i for i < t;  P[t, i] = scale decay(t, i) q_t . k_i for i <= t
    D[t] = beta_t (v_t - decay(t) S^T k_t) + sum_i A[t, i] D[i]         # forward substitution: the deltas
    out[t] = scale decay(t) S^T q_t + sum_i P[t, i] D[i]
    S = decay(end) S + sum_i decay(end, i) k_i D[i]^T

(the UT transform of arXiv 2406.06484, gated as in arXiv 2412.06464). A and P do not depend on the values or the state,
and are computed once per chunk. The rest is computed panel by panel. A partial last chunk is padded: its last token is
repeated with beta 0 and g 0.

Chunks of 16 take 3.4 multiply-adds per element of the state and token. The serial form takes 3 and a multiplication. So
the gain is small, and longer chunks have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.delta.shape import Place, Shape, copy_rows, locate
from rlx.backends.cpu.tiles import F32X16, FLOAT, I32, I32X16, LANES, Emitter, Index


def panel_vectors(level: str) -> int:
    """Vectors of a panel. Together with `tile_rows` it is chosen so that the registers hold the sums."""
    return {"avx512": 2, "avx2": 2, "generic": 1}[level]


def tile_rows(level: str) -> int:
    """Tokens (or rows of a state) of a tile."""
    return {"avx512": 8, "avx2": 2, "generic": 2}[level]


@dataclass(frozen=True)
class _Matrix:
    """A matrix in memory: (row, step) is at `base` + row * `row_bytes` + step * `step_bytes`."""

    base: ir.Value
    row_bytes: int
    step_bytes: int


class Chunked:
    """Generates a kernel of the chunked form.

    Args:
        chunk: tokens of a chunk, a multiple of 16.
    """

    def __init__(self, e: Emitter, shape: Shape, chunk: int) -> None:
        self.e, self.shape, self.chunk = e, shape, chunk
        self.tile = tile_rows(e.target.vectors)
        self.line = 4 * chunk  # bytes of a row of a matrix of tokens by tokens
        self.blocks = chunk // LANES
        dim = shape.key_dim
        # Layout [block][element][16 tokens]: products have tokens as lanes, and a tile's tokens share a cache line.
        self.keys, self.queries = e.stack(4 * chunk * dim), e.stack(4 * chunk * dim)
        self.decays, self.mixing, self.reading = (e.stack(self.line * chunk) for _ in range(3))  # decay(t, i), A, P
        self.gates, self.betas, self.passed = (e.stack(self.line) for _ in range(3))  # exp(g), beta, decay(t)
        self.deltas = e.stack(chunk * shape.panel)
        self.state = e.stack(4 * dim * shape.strip)

    def write(self) -> None:
        e, rows = self.e, self.e.args["rows"]
        with e.loop(e.args["begin"], e.args["end"]) as unit:
            strip = locate(e, self.shape, unit.i)
            self._copy_state(strip, inward=True)
            with e.loop(0, rows, self.chunk) as first:
                count = e.smin(self.chunk, e.b.sub(rows, first.i))
                self._chunk(self._from(strip, first.i), count)
            self._copy_state(strip, inward=False)

    def _from(self, at: Place, row: ir.Value) -> Place:
        """The addresses of the same unit with `row` as row 0."""
        e, shape = self.e, self.shape
        q, k = (e.at(base, (row, shape.key_row)) for base in (at.q, at.k))
        v, out = (e.at(base, (row, shape.value_row)) for base in (at.v, at.out))
        g, beta = (e.at(base, (row, shape.gate_row)) for base in (at.g, at.beta))
        return Place(at.state, q, k, v, g, beta, out, at.after)

    def _copy_state(self, strip: Place, inward: bool) -> None:
        """Copies the strip of the state to the packed copy (`inward`) or back. The copy is stored panel by panel."""
        e, shape = self.e, self.shape
        with e.loop(0, shape.panels) as p:
            there = (e.at(strip.state if inward else strip.after, (p.i, shape.panel)), shape.state_row)
            here = (self._packed(p.i), shape.panel)
            copy_rows(e, shape.key_dim, shape.vectors, *((there, here) if inward else (here, there)))

    def _packed(self, panel: ir.Value) -> ir.Value:
        return self.e.at(self.state, (panel, self.shape.key_dim * self.shape.panel))

    def _chunk(self, at: Place, count: ir.Value) -> None:
        e = self.e
        self._gather(at, count)
        self._gate(at, count)
        for block in range(self.blocks):
            with e.loop(LANES * block, count, self.tile) as t:
                self._relate(t.i, block)
        with e.loop(0, self.shape.panels) as p:
            panel, state = at.shifted(e, e.mul_add(p.i, self.shape.panel)), self._packed(p.i)
            self._fetch(at, p.i)
            with e.loop(0, count, self.tile) as t:
                self._solve(panel, state, t.i, count)
            with e.loop(0, count, self.tile) as t:
                self._read(panel, state, t.i, count)
            self._advance(state, count)

    # --- once per chunk -----------------------------------------------------------------------------------------------

    def _gather(self, at: Place, count: ir.Value) -> None:
        """Copies the chunk's keys and queries, transposed so that tokens are lanes."""
        e, shape, size = self.e, self.shape, 4 * self.shape.key_dim
        last = e.b.sub(count, e.i64(1))
        for block in range(self.blocks):
            rows = [e.mul_add(e.smin(LANES * block + i, last), shape.key_row) for i in range(LANES)]
            with e.loop(0, size, 64) as column:
                keys = [e.load(F32X16, e.at(at.k, row, column.i)) for row in rows]
                queries = [e.load(F32X16, e.at(at.q, row, column.i)) for row in rows]
                for tokens, target in ((keys, self.keys), (queries, self.queries)):
                    for i, lanes in enumerate(e.transpose(tokens)):
                        e.store(lanes, e.at(target, (column.i, LANES), block * LANES * size + 64 * i))

    def _gate(self, at: Place, count: ir.Value) -> None:
        """Computes exp(g), beta, decay(t) and decay(t, i) of the chunk.

        Decays are computed as products. Exponentials of differences of sums would suffer cancellation after a large g.
        """
        e, shape = self.e, self.shape
        zero = ir.Constant(FLOAT, 0.0)
        with e.loop(0, self.chunk) as t:
            row = e.mul_add(e.smin(t.i, e.b.sub(count, e.i64(1))), shape.gate_row)
            inside = e.b.icmp_signed("<", t.i, count)
            for source, target in ((at.g, self.gates), (at.beta, self.betas)):
                value = e.b.select(inside, e.load(FLOAT, e.at(source, row)), zero)
                e.store(value, e.at(target, (t.i, 4)))
        for block in range(self.blocks):
            place = e.at(self.gates, 64 * block)
            e.store(vmath.exp(e, e.load(F32X16, place)), place)
        with e.loop(0, self.chunk, 1, [e.f32(1.0)] * (1 + self.blocks)) as t:
            gate = e.splat_f32(e.at(self.gates, (t.i, 4)))
            passed = e.b.fmul(t.values[0], gate)
            e.store(e.b.extract_element(passed, ir.Constant(I32, 0)), e.at(self.passed, (t.i, 4)))
            decays = [self._before(t.i, b, e.b.fmul(t.values[1 + b], gate), 1.0) for b in range(self.blocks)]
            for block, decay in enumerate(decays):
                e.store(decay, e.at(self.decays, (t.i, self.line), 64 * block))
            t.values = [passed, *decays]

    def _before(self, t: ir.Value, block: int, value: ir.Value, otherwise: float) -> ir.Value:
        """`value` in the lanes of tokens before t, `otherwise` in the other lanes."""
        e = self.e
        tokens = ir.Constant(I32X16, list(range(LANES * block, LANES * (block + 1))))
        earlier = e.b.icmp_signed("<", tokens, e.splat(e.b.trunc(t, I32)))
        return e.b.select(earlier, value, e.f32(otherwise))

    def _relate(self, first: ir.Value, block: int) -> None:
        """Computes the rows of A and P of a tile of tokens, in the columns of a block."""
        e = self.e
        lanes = e.at(self.keys, 64 * block * self.shape.key_dim)
        keys, queries = (self._tokens(base, first) for base in (self.keys, self.queries))
        sums = [e.f32(0.0)] * (2 * self.tile)
        products = self._multiply([keys, queries], lanes, 64, 1, 0, self.shape.key_dim, sums)
        for r in range(self.tile):
            token = e.b.add(first, e.i64(r))
            row = e.mul_add(token, self.line, 64 * block)
            decay = e.load(F32X16, e.at(self.decays, row))
            beta = e.splat_f32(e.at(self.betas, (token, 4)))
            mixing = e.b.fneg(e.b.fmul(e.b.fmul(beta, decay), products[r]))
            reading = e.b.fmul(e.b.fmul(decay, e.f32(self.shape.scale)), products[self.tile + r])
            e.store(self._before(token, block, mixing, 0.0), e.at(self.mixing, row))
            after = e.b.add(token, e.i64(1))
            e.store(self._before(after, block, reading, 0.0), e.at(self.reading, row))

    # --- once per panel -----------------------------------------------------------------------------------------------

    def _solve(self, at: Place, state: ir.Value, first: ir.Value, count: ir.Value) -> None:
        """Computes the deltas D of a tile of tokens by forward substitution."""
        e, shape, vectors = self.e, self.shape, self.shape.vectors
        sums = self._times_state(self.keys, state, first)
        for r in range(self.tile):
            token = e.b.add(first, e.i64(r))
            row = e.smin(token, e.b.sub(count, e.i64(1)))
            e.prefetch(e.at(at.v, (e.b.add(token, e.i64(self.chunk)), shape.value_row)), shape.panel, level=2)
            beta, passed = (e.splat_f32(e.at(base, (token, 4))) for base in (self.betas, self.passed))
            for v in range(vectors):
                value = e.load(F32X16, e.at(at.v, (row, shape.value_row), 64 * v))
                i = r * vectors + v
                sums[i] = e.b.fmul(beta, e.fma(e.b.fneg(passed), sums[i], value))
        mixing = e.at(self.mixing, (first, self.line))
        sums = self._multiply([_Matrix(mixing, self.line, 4)], self.deltas, shape.panel, vectors, 0, first, sums)
        for r in range(self.tile):
            for c in range(r):
                factor = e.splat_f32(e.at(mixing, r * self.line, (first, 4), 4 * c))
                for v in range(vectors):
                    sums[r * vectors + v] = e.fma(factor, sums[c * vectors + v], sums[r * vectors + v])
        self._store_tile(sums, e.at(self.deltas, (first, shape.panel)))

    def _read(self, at: Place, state: ir.Value, first: ir.Value, count: ir.Value) -> None:
        """Computes the result of a tile of tokens."""
        e, shape, vectors = self.e, self.shape, self.shape.vectors
        sums = self._times_state(self.queries, state, first)
        for r in range(self.tile):
            passed = e.splat_f32(e.at(self.passed, (first, 4), 4 * r))
            factor = e.b.fmul(passed, e.f32(shape.scale))
            for i in range(r * vectors, (r + 1) * vectors):
                sums[i] = e.b.fmul(sums[i], factor)
        reading = _Matrix(e.at(self.reading, (first, self.line)), self.line, 4)
        until = e.b.add(first, e.i64(self.tile))
        sums = self._multiply([reading], self.deltas, shape.panel, vectors, 0, until, sums)
        for r in range(self.tile):
            token = e.b.add(first, e.i64(r))
            with e.when(e.b.icmp_signed("<", token, count)):
                for v in range(vectors):
                    e.store(sums[r * vectors + v], e.at(at.out, (token, shape.value_row), 64 * v))

    def _advance(self, state: ir.Value, count: ir.Value) -> None:
        """Updates the state to the end of the chunk."""
        e, shape, vectors = self.e, self.shape, self.shape.vectors
        with e.loop(0, count) as t:
            rest = e.splat_f32(e.at(self.decays, self.line * (self.chunk - 1), (t.i, 4)))
            for v in range(vectors):
                place = e.at(self.deltas, (t.i, shape.panel), 64 * v)
                e.store(e.b.fmul(e.load(F32X16, place), rest), place)
        kept = e.splat_f32(e.at(self.passed, 4 * (self.chunk - 1)))
        with e.loop(0, shape.key_dim, self.tile) as d:
            tile = e.at(state, (d.i, shape.panel))
            old = [e.load(F32X16, e.at(tile, 64 * i)) for i in range(self.tile * vectors)]
            sums = [e.b.fmul(value, kept) for value in old]
            for block in range(self.blocks):
                first, until = LANES * block, e.smin(LANES * (block + 1), count)
                keys = _Matrix(e.at(self.keys, (d.i, 64), 64 * shape.key_dim * block - 4 * first), 64, 4)
                sums = self._multiply([keys], self.deltas, shape.panel, vectors, first, until, sums)
            self._store_tile(sums, tile)

    def _fetch(self, at: Place, panel: ir.Value) -> None:
        """Prefetches a panel's share of the next chunk's keys, queries and gates, which are scattered in memory."""
        e, shape = self.e, self.shape
        share = 64 * -(-shape.key_dim // (LANES * shape.panels))
        with e.loop(self.chunk, 2 * self.chunk) as t:
            for base in (at.k, at.q):
                e.prefetch(e.at(base, (t.i, shape.key_row), (panel, share)), share, level=2)
            for base in (at.g, at.beta):
                e.prefetch(e.at(base, (t.i, shape.gate_row)), 4, level=2)

    def _times_state(self, tokens: ir.Value, state: ir.Value, first: ir.Value) -> list[ir.Value]:
        """The product of a tile of tokens (keys or queries) with a panel of the state."""
        shape = self.shape
        zeros = [self.e.f32(0.0)] * (self.tile * shape.vectors)
        return self._multiply([self._tokens(tokens, first)], state, shape.panel, shape.vectors, 0, shape.key_dim, zeros)

    def _tokens(self, lanes: ir.Value, first: ir.Value) -> _Matrix:
        """The keys or queries of a tile of tokens, as a matrix."""
        e = self.e
        block, lane = e.b.ashr(first, e.i64(4)), e.b.and_(first, e.i64(LANES - 1))
        return _Matrix(e.at(lanes, (block, 64 * self.shape.key_dim), (lane, 4)), 4, 64)

    def _store_tile(self, values: list[ir.Value], place: ir.Value) -> None:
        for i, value in enumerate(values):
            self.e.store(value, self.e.at(place, 64 * i))

    def _multiply(
        self,
        left: list[_Matrix],
        right: ir.Value,
        stride: int,
        vectors: int,
        start: Index,
        stop: Index,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """sums[row, v] + sum over steps of left[row, step] * right[step, v], for a tile of rows of each left matrix.

        Rows of `right` are `stride` bytes apart.
        """
        e = self.e
        with e.loop(start, stop, 1, sums) as step:
            line = e.at(right, (step.i, stride))
            values = [e.load(F32X16, e.at(line, 64 * v)) for v in range(vectors)]
            done: list[ir.Value] = []
            for matrix in left:
                base = e.at(matrix.base, (step.i, matrix.step_bytes))
                for r in range(self.tile):
                    factor = e.splat_f32(e.at(base, r * matrix.row_bytes))
                    done += [e.fma(factor, value, step.values[len(done) + v]) for v, value in enumerate(values)]
            step.values = done
        return step.results
