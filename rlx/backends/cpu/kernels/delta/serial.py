"""The gated delta rule for states of whole vectors, token by token.

A token changes the state in one pass over it, and the same pass reads it for the next token:

    delta = beta (v - exp(g) S^T k);  out = scale (exp(g) S^T q + (k . q) delta)
    S = exp(g) S + k delta^T;  S^T k, S^T q of the next token's k and q

Without the correction nobody asks for S^T k.

The first token takes one pass more, and in decode its passes are the only ones. Each column of a sum is one chain of
multiply-adds over the keys' elements. So the bits of a token do not depend on the number of tokens of a call.

With several tokens, the first one moves a panel of columns from the state to a packed copy, and the last one moves it
back. The panel and its sums stay in the L1 cache and in registers.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.delta.shape import Place, Rows, Shape, locate
from rlx.backends.cpu.tiles import F32X16, Emitter, Index

_AHEAD = 48  # prefetch distance in rows of the state, where the state comes from memory
_TOKENS_AHEAD = 8  # prefetch distance in tokens
_SINGLE_VECTORS = 4  # of a panel for a single token: long reads, because the state comes from memory


def panel_vectors(level: str, single: bool) -> int:
    """Vectors of a panel: as many as leave registers for both sums of each."""
    return _SINGLE_VECTORS if single else _held(level)


def _held(level: str) -> int:
    """Vectors of the state whose sums with k and q the registers hold."""
    return {"avx512": 4, "avx2": 2, "neon": 2, "generic": 1}[level]


class Serial:
    """Generates a kernel. `single`: there is always exactly one token."""

    def __init__(self, e: Emitter, shape: Shape, single: bool) -> None:
        self.e, self.shape, self.single = e, shape, single
        self.sums = 2 if shape.corrects else 1  # of each vector: S^T k and S^T q, or the second only
        self.held = min(shape.vectors, _held(e.target.vectors))
        # With registers to spare, gates are computed before the pass over the state for the token before, which hides
        # their latency.
        self.early = e.target.vectors == "avx512"
        self.packed = None if single else e.stack(shape.key_dim * shape.panel)

    def write(self) -> None:
        e, shape = self.e, self.shape
        with e.loop(e.args["begin"], e.args["end"]) as unit:
            strip = locate(e, shape, unit.i)
            with e.loop(0, 4 * shape.strip, shape.panel) as column:
                self._panel(strip.shifted(e, column.i))

    def _panel(self, at: Place) -> None:
        e, shape = self.e, self.shape
        before, after = (at.state, shape.state_row), (at.after, shape.state_row)
        sums = self._read(at, before)
        if self.packed is None:
            gates = self._gates(at, 0)
            self._update(at, 0, None, (before, after), (gates[0], self._result(at, 0, sums, gates)))
            return
        here, last = (self.packed, shape.panel), e.b.sub(e.args["rows"], e.i64(1))
        early = self._gates(at, 0) if self.early else []
        with e.loop(0, e.args["rows"], 1, [*sums, *early]) as row:
            self._fetch(at, e.b.add(row.i, e.i64(_TOKENS_AHEAD)))
            source = self._either(e.b.icmp_signed("==", row.i, e.i64(0)), before, here)
            target = self._either(e.b.icmp_signed("==", row.i, last), after, here)
            following = e.smin(e.b.add(row.i, e.i64(1)), last)
            sums, gates = row.values[: len(sums)], row.values[len(sums) :] or self._gates(at, row.i)
            result = gates[0], self._result(at, row.i, sums, gates)
            early = self._gates(at, following) if self.early else []
            row.values = self._update(at, row.i, following, (source, target), result) + early

    def _either(self, condition: ir.Value, yes: Rows, no: Rows) -> Rows:
        e = self.e
        return e.b.select(condition, yes[0], no[0]), e.b.select(condition, e.i64(yes[1]), e.i64(no[1]))

    def _fetch(self, at: Place, row: ir.Value) -> None:
        """Prefetches the data of a later token, because rows are far apart in memory."""
        e, shape = self.e, self.shape
        for base in (at.q, at.k):
            e.prefetch(e.at(base, (row, shape.key_row)), 4 * shape.key_dim, level=2)
        e.prefetch(e.at(at.v, (row, shape.value_row)), shape.panel, level=2)

    def _read(self, at: Place, state: Rows) -> list[ir.Value]:
        """The sums of the first token: S^T k if it corrects, then S^T q, each one vector per 16 columns."""
        e, shape = self.e, self.shape
        found: list[list[ir.Value]] = [[] for _ in range(self.sums)]
        for first in range(0, shape.vectors, self.held):
            held = range(first, min(first + self.held, shape.vectors))
            with e.loop(0, shape.key_dim, 1, [e.f32(0.0)] * (self.sums * len(held))) as d:
                line = e.at(state[0], (d.i, state[1]))
                if self.single and not first:  # rows are far apart, so the hardware prefetcher is too late
                    e.prefetch(e.at(line, (_AHEAD, state[1])), shape.panel)
                values = [e.load(F32X16, e.at(line, 64 * v)) for v in held]
                d.values = self._sums(at, 0, d.i, values, d.values)
            for i, part in enumerate(found):
                part += d.results[i * len(held) :][: len(held)]
        return [value for part in found for value in part]

    def _sums(self, at: Place, row: Index, d: ir.Value, values: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """Adds row `d` of the state, times the elements of a token's k and q, to its sums."""
        e, key_row = self.e, self.shape.key_row
        bases = (at.k, at.q)[-self.sums :]
        factors = [e.splat_f32(e.at(base, (row, key_row), (d, 4))) for base in bases]
        pairs = [(factor, value) for factor in factors for value in values]
        return [e.fma(factor, value, total) for (factor, value), total in zip(pairs, sums, strict=True)]

    def _gates(self, at: Place, row: Index) -> list[ir.Value]:
        """exp(g), beta and k . q of a token, in all lanes."""
        e, gate_row = self.e, self.shape.gate_row
        decay = vmath.exp(e, e.splat_f32(e.at(at.g, (row, gate_row))))
        return [decay, e.splat_f32(e.at(at.beta, (row, gate_row))), self._key_by_query(at, row)]

    def _result(self, at: Place, row: Index, sums: list[ir.Value], gates: list[ir.Value]) -> list[ir.Value]:
        """Writes the result of a token from its sums and gates. Returns the delta."""
        e, shape, (decay, beta, product) = self.e, self.shape, gates
        v, out = (e.at(base, (row, shape.value_row)) for base in (at.v, at.out))
        kept, deltas = e.b.fneg(decay), []
        for i, asked in enumerate(sums[-shape.vectors :]):
            value = e.load(F32X16, e.at(v, 64 * i))
            if shape.corrects:
                value = e.fma(kept, sums[i], value)
            deltas.append(e.b.fmul(beta, value))
            total = e.fma(product, deltas[-1], e.b.fmul(decay, asked))
            e.store(e.b.fmul(total, e.f32(shape.scale)), e.at(out, 64 * i))
        return deltas

    def _key_by_query(self, at: Place, row: Index) -> ir.Value:
        """k . q of a token, in all lanes."""
        e, shape = self.e, self.shape
        k, q = (e.at(base, (row, shape.key_row)) for base in (at.k, at.q))
        with e.loop(0, 4 * shape.key_dim, 64, [e.f32(0.0)]) as d:
            key, query = (e.load(F32X16, e.at(base, d.i)) for base in (k, q))
            d.values = [e.fma(key, query, d.values[0])]
        return e.reduce_add(d.results[0])

    def _update(
        self,
        at: Place,
        row: Index,
        following: ir.Value | None,
        states: tuple[Rows, Rows],
        result: tuple[ir.Value, list[ir.Value]],
    ) -> list[ir.Value]:
        """Computes S = exp(g) S + k delta^T, where source and target may be equal.

        Returns the sums of the `following` token with the new state; none if there is no such token.
        """
        e, shape, (decay, deltas) = self.e, self.shape, result
        sums = [] if following is None else [e.f32(0.0)] * (self.sums * shape.vectors)
        with e.loop(0, shape.key_dim, 1, sums) as d:
            key = e.splat_f32(e.at(at.k, (row, shape.key_row), (d.i, 4)))
            source, target = (e.at(place, (d.i, stride)) for place, stride in states)
            values = []
            for v, delta in enumerate(deltas):
                values.append(e.fma(key, delta, e.b.fmul(decay, e.load(F32X16, e.at(source, 64 * v)))))
                e.store(values[-1], e.at(target, 64 * v))
            if following is not None:
                d.values = self._sums(at, following, d.i, values, d.values)
        return d.results
