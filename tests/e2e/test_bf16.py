"""Dot products of bf16 in a compiled graph: where they are used, what they compute, and that the key knows."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import CTX, SEQ, dtypes, ops
from rlx.backends.cpu.target import Target, supported_levels
from rlx.compiler.compile import Compiler
from rlx.ir.meaning import round_to
from rlx.passes.options import Options

N, K = 40, 96
SHAPES = {"gate": (N, K), "up": (N, K), "down": (K, N)}
RNG = np.random.default_rng(0)
W = round_to(RNG.standard_normal((N, K)), "bf16").astype(np.float32)
NORM = RNG.standard_normal(K).astype(np.float32)
LEVELS = supported_levels()


def compiled(level: str, precision: str, bf16: bool = True) -> rlx.Executable:
    graph = rlx.Graph("halves")
    x = ops.rms_norm(graph.input("x", [SEQ, K]), graph.weight("norm", [K]), eps=1e-6)
    graph.output("y", ops.linear(x, graph.weight("w", [N, K], dtypes.BF16), bf16=bf16))
    return rlx.compile(graph, bind={"SEQ": (2, 64), "w": W, "norm": NORM}, target=level, precision=precision)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_rounded_where_the_machine_gains_from_it(level: str) -> None:
    x = RNG.standard_normal((50, K)).astype(np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * NORM
    for precision, bf16 in (("auto", True), ("auto", False), ("exact", True)):
        exe = compiled(level, precision, bf16)
        rounds = precision == "auto" and bf16 and Target.host(level).has_bf16_dots
        assert ('out="bf16"' in exe.ir("fuse")) == rounds
        product = "tdpbf16ps" if Target.host(level).has_bf16_tiles else "vdpbf16ps"
        assert (product in exe.asm()) == rounds
        seen = round_to(normed, "bf16") if rounds else normed
        size = np.abs(normed) @ np.abs(W).T
        # A norm that is off by a step of f32 may be rounded to the other neighbour.
        assert (np.abs(exe(x=x)["y"] - seen @ W.T) / size).max() < (2e-4 if rounds else 1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gated_linear_writes_the_rows_of_the_next(level: str) -> None:
    """The bits are those of a program that rounds them in a step of its own."""
    graph = rlx.Graph("feed-forward")
    x, gate, up, down = graph.input("x", [SEQ, K]), *(graph.weight(n, s, dtypes.BF16) for n, s in SHAPES.items())
    hidden = ops.silu(ops.linear(x, gate, bf16=True)) * ops.linear(x, up, bf16=True)
    graph.output("y", ops.linear(hidden, down, bf16=True))
    bind = {
        "SEQ": (2, 64),
        **{n: round_to(RNG.standard_normal(s), "bf16").astype(np.float32) for n, s in SHAPES.items()},
    }
    rows, found = RNG.standard_normal((50, K)).astype(np.float32), {}
    for fused in (True, False):
        exe = rlx.compile(graph, bind=bind, target=level, precision="auto", profile={"fusion": {"norm": fused}})
        rounds = Target.host(level).has_bf16_dots
        assert exe.ir("fuse").count("quantize(") == (rounds and 2 - fused)
        found[fused] = exe(x=rows)["y"]
    np.testing.assert_array_equal(found[True], found[False])


ATTENTION = {"q": 4, "k": 2, "v": 2}  # heads of 32


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("precision", "cache", "least"),
    [("auto", dtypes.F16, 17), ("auto", dtypes.F32, 17), ("auto", dtypes.F16, 2), ("exact", dtypes.F16, 17)],
    ids=str,
)
def test_attention_rounds_where_the_machine_gains_from_it(
    level: str, precision: str, cache: dtypes.DType, least: int
) -> None:
    graph = rlx.Graph("attention")
    q, *new = (graph.input(name, [SEQ, heads, 32]) for name, heads in ATTENTION.items())
    states = (graph.state(name, [2, CTX, 32], cache) for name in ("keys", "values"))
    keys, values = (ops.kv_write(state, x) for state, x in zip(states, new, strict=True))
    graph.output("y", ops.attention(q, keys, values, scale=0.2))
    linear = ops.linear(graph.input("x", [SEQ, 8]), graph.weight("w", [4, 8], dtypes.BF16), bf16=True)
    graph.output("z", linear)  # attention rounds where linears do
    bind = {"SEQ": (least, 64), "CTX": 64, "w": np.ones((4, 8), np.float32)}
    exe = rlx.compile(graph, bind=bind, target=level, precision=precision)
    target = Target.host(level)
    least_rows = 17 if target.has_bf16_tiles else 1  # tiles need many rows; dots serve any number of them
    rounds = target.has_bf16_dots and (precision, cache) == ("auto", dtypes.F16) and least >= least_rows
    assert {node["bf16"] for node in exe.graph.nodes() if node.op == "attention"} == {rounds}
    if rounds:
        assert ("tdpbf16ps" if target.has_bf16_tiles else "vdpbf16ps") in exe.asm()

    rows = {name: RNG.standard_normal((40, heads, 32)).astype(np.float32) for name, heads in ATTENTION.items()}
    k, v = (np.repeat(round_to(rows[name], cache.name).astype(np.float64), 2, axis=1) for name in ("k", "v"))
    scores = np.einsum("rhd,thd->hrt", rows["q"], k) * 0.2
    weights = np.exp(np.where(np.tri(40, dtype=bool), scores, -np.inf))
    want = np.einsum("hrt,thd->rhd", weights / weights.sum(-1, keepdims=True), v).reshape(40, -1)
    size = np.abs(v).max() * (1 + np.abs(scores).max())
    assert np.abs(exe(**rows, x=np.ones((40, 8), np.float32))["y"] - want).max() / size < (2.0**-8 if rounds else 5e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_the_key_says_whether_rows_may_be_rounded(level: str) -> None:
    """They may if the target can and the caller does not forbid it; two reasons against it are one key."""
    graph = rlx.Graph("halves")
    graph.output("y", ops.linear(graph.input("x", [SEQ, 8]), graph.weight("w", [4, 8], dtypes.BF16), bf16=True))
    keys = set()
    for target in both(level):
        for asked in (False, True):
            program = Compiler(target).program(graph, Options(seq=(2, 4), all_rows=True, bf16_dots=asked))
            keys.add(program.key)
            rounds = asked and target.has_bf16_dots
            assert program.key.profile["bf16_dots"] == rounds
            assert ('quantize(%x) {out="bf16"}' in program.final) == rounds
    able = any(target.has_bf16_dots for target in both(level))
    assert len(keys) == len(both(level)) + able


def both(level: str) -> set[Target]:
    """The level with dot products of bf16, where this machine has them, and without."""
    host = Target.host(level)
    return {host} if host.has_bf16_tiles else {host, host.without("avx512bf16")}
