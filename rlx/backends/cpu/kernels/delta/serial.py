"""The gated delta rule token by token: the form that decode uses, and the baseline for the chunked form.

A token takes two passes over a panel of the state, which is in the L1 cache:

    delta = beta (v - exp(g) S^T k)
    S = exp(g) S + k delta^T; out = scale S^T q         # in one pass

With several tokens, the first one moves the panel from the state to a packed copy, and the last one moves it back.
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu import vmath
from rlx.backends.cpu.kernels.delta.shape import Place, Rows, Shape, locate
from rlx.backends.cpu.tiles import F32X16, Emitter, Index

_AHEAD = 48  # prefetch distance in rows of the state, where the state comes from memory
_TOKENS_AHEAD = 8  # prefetch distance in tokens
_CHAINS = 8  # independent sums, to hide the latency of a multiply-add


def panel_vectors(level: str, single: bool) -> int:
    """Vectors of a panel: long reads for a single token, else few enough to keep several rows of sums in registers."""
    return 4 if single else {"avx512": 4, "avx2": 2, "generic": 1}[level]


class Serial:
    """Generates a kernel of the serial form. `single`: there is always exactly one token."""

    def __init__(self, e: Emitter, shape: Shape, single: bool) -> None:
        self.e, self.shape, self.single = e, shape, single
        wide = {"avx512": 1, "avx2": 2, "generic": 4}[e.target.vectors]  # registers of a vector
        self.together = max(1, _CHAINS // (shape.vectors * wide))  # rows of the state per loop iteration
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
        if self.packed is None:
            self._token(at, 0, before, after)
            return
        here, last = (self.packed, shape.panel), e.b.sub(e.args["rows"], e.i64(1))
        with e.loop(0, e.args["rows"]) as row:
            self._fetch(at, e.b.add(row.i, e.i64(_TOKENS_AHEAD)))
            source = self._either(e.b.icmp_signed("==", row.i, e.i64(0)), before, here)
            target = self._either(e.b.icmp_signed("==", row.i, last), after, here)
            self._token(at, row.i, source, target)

    def _either(self, condition: ir.Value, yes: Rows, no: Rows) -> Rows:
        e = self.e
        return e.b.select(condition, yes[0], no[0]), e.b.select(condition, e.i64(yes[1]), e.i64(no[1]))

    def _fetch(self, at: Place, row: ir.Value) -> None:
        """Prefetches the data of a later token, because rows are far apart in memory."""
        e, shape = self.e, self.shape
        for base in (at.q, at.k):
            e.prefetch(e.at(base, (row, shape.key_row)), 4 * shape.key_dim, level=2)
        e.prefetch(e.at(at.v, (row, shape.value_row)), shape.panel, level=2)

    def _token(self, at: Place, row: Index, source: Rows, target: Rows) -> None:
        """Computes one token for one panel of the state, read from `source` and written to `target`."""
        e, shape = self.e, self.shape
        decay = vmath.exp(e, e.splat_f32(e.at(at.g, (row, shape.gate_row))))
        beta = e.splat_f32(e.at(at.beta, (row, shape.gate_row)))
        q, k = (e.at(base, (row, shape.key_row)) for base in (at.q, at.k))
        v, out = (e.at(base, (row, shape.value_row)) for base in (at.v, at.out))
        kept, delta = e.b.fneg(decay), []
        for i, mixed in enumerate(self._mixed(k, source)):
            delta.append(e.b.fmul(beta, e.fma(kept, mixed, e.load(F32X16, e.at(v, 64 * i)))))
        for i, total in enumerate(self._update(q, k, (source, target), decay, delta)):
            e.store(e.b.fmul(total, e.f32(shape.scale)), e.at(out, 64 * i))

    def _mixed(self, k: ir.Value, state: Rows) -> list[ir.Value]:
        """S^T k, one vector per 16 columns."""
        e, vectors = self.e, self.shape.vectors
        with e.loop(0, self.shape.key_dim, self.together, self._zeros()) as d:
            sums = []
            for u in range(self.together):
                factor = e.splat_f32(e.at(k, (d.i, 4), 4 * u))
                line = e.at(state[0], (d.i, state[1]), (u, state[1]))
                if self.single:  # rows are far apart, so the hardware prefetcher is too late
                    e.prefetch(e.at(line, (_AHEAD, state[1])), self.shape.panel)
                for v in range(vectors):
                    sums.append(e.fma(factor, e.load(F32X16, e.at(line, 64 * v)), d.values[u * vectors + v]))
            d.values = sums
        return self._totals(d.results)

    def _update(
        self, q: ir.Value, k: ir.Value, states: tuple[Rows, Rows], decay: ir.Value, delta: list[ir.Value]
    ) -> list[ir.Value]:
        """Computes S = decay S + k delta^T, where source and target may be equal. Returns the new S^T q."""
        e, vectors = self.e, self.shape.vectors
        with e.loop(0, self.shape.key_dim, self.together, self._zeros()) as d:
            sums = []
            for u in range(self.together):
                key, query = (e.splat_f32(e.at(base, (d.i, 4), 4 * u)) for base in (k, q))
                source, target = (e.at(place, (d.i, stride), (u, stride)) for place, stride in states)
                for v in range(vectors):
                    new = e.fma(key, delta[v], e.b.fmul(decay, e.load(F32X16, e.at(source, 64 * v))))
                    e.store(new, e.at(target, 64 * v))
                    sums.append(e.fma(query, new, d.values[u * vectors + v]))
            d.values = sums
        return self._totals(d.results)

    def _zeros(self) -> list[ir.Value]:
        return [self.e.f32(0.0)] * (self.together * self.shape.vectors)

    def _totals(self, sums: list[ir.Value]) -> list[ir.Value]:
        """Adds up the partial sums of the rows that an iteration computes together."""
        vectors = self.shape.vectors
        totals = sums[:vectors]
        for u in range(1, self.together):
            more = sums[u * vectors :][:vectors]
            totals = [self.e.b.fadd(a, b) for a, b in zip(totals, more, strict=True)]
        return totals
