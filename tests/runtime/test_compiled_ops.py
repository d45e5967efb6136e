"""Every op with a kernel, compiled, against its NumPy meaning in float64: odd sizes, each dtype, each target level."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from rlx.codegen.layouts import PACKED_DTYPES
from rlx.codegen.select import KERNELS
from rlx.codegen.target import LEVELS, Target
from rlx.errors import ProfileError, TargetError
from rlx.ir import interp, meaning, ops
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import DTYPES, F32, I32, DType
from rlx.ir.graph import Graph
from rlx.runtime.cache import CompileCache
from rlx.runtime.executable import compile

# Largest error against float64, as a share of the largest magnitude of the result.
EXACT_CEILING = 2e-6
# The same for linears over int8 activations: both sides round the activations to the same grid.
INT8_CEILING = 4e-6
# Types that are tested on every level; the others, which share their kernels' parts, on one each.
WEIGHT_DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")


def levels() -> list[str]:
    found = []
    for level in LEVELS:
        try:
            Target.host(level)
            found.append(level)
        except TargetError:
            continue
    return found


def weight_cases() -> list[tuple[str, str]]:
    """(level, type) pairs."""
    found = levels()
    others = [t.name for t in PACKED_DTYPES if t.name not in WEIGHT_DTYPES]
    in_turn = [(found[i % len(found)], dtype) for i, dtype in enumerate(others)]
    return [(level, dtype) for level in found for dtype in WEIGHT_DTYPES] + in_turn


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(capacity=512, policy="off")


def quantized(rng: np.random.Generator, shape: tuple[int, int], dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """-> (what a file holds, the float64 values it stands for), by the gguf package."""
    values = rng.standard_normal(shape).astype(np.float32) * 0.5
    if dtype is F32:
        return values, values.astype(np.float64)
    kind = gguf.GGMLQuantizationType[dtype.name.upper()]
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        raw = random_blocks(rng, shape, dtype)
    return raw.view(np.uint8), gguf.quants.dequantize(raw, kind).astype(np.float64).reshape(shape)


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], dtype: DType) -> np.ndarray:
    """Valid blocks with small finite scales."""
    raw = rng.integers(0, 256, (shape[0], dtype.row_bytes(shape[1])), np.uint8)
    blocks = raw.reshape(-1, dtype.nbytes)
    half = rng.uniform(0.001, 0.02, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    at = {"q2_k": 80, "q3_k": 108, "q6_k": 208}.get(dtype.name, 0)
    width = 4 if dtype.name in ("q2_k", "q4_k", "q5_k") else 2
    blocks[:, at : at + width] = half[:, :width]
    return raw


def check(
    graph: Graph,
    arrays: dict[str, np.ndarray],
    level: str,
    cache: CompileCache,
    *,
    exact: dict[str, np.ndarray] | None = None,
    ceiling: float = EXACT_CEILING,
    states: dict[str, np.ndarray] | None = None,
    precision: str = "exact",
    env: dict[str, int] | None = None,
    **bind: Any,
) -> None:
    """Runs the compiled graph and the interpreter and compares every output."""
    bind.setdefault("SEQ", (1, 40))
    with compile(graph, bind, precision=precision, target=level, threads=2, cache=cache) as exe:
        got = exe(**arrays, **(env or {}))
        feeds = {**arrays, **(exact or {}), **(states or {})}
        sizes = {"SEQ": len(next(iter(arrays.values()))), "PAST_SEQ": 0, "CTX": 1024, **(env or {})}
        if precision == "auto":  # the lowered graph says which activations are rounded
            want, _ = interp.run(exe.graph, feeds, sizes, dtype=np.float64)
        else:
            want, _ = interp.run(graph, feeds, sizes, dtype=np.float64)
    for name, value in want.items():
        assert got[name].shape == value.shape
        assert np.abs(got[name] - value).max() <= ceiling * np.abs(value).max() + 1e-30, name


@pytest.mark.parametrize(("level", "dtype"), weight_cases())
@pytest.mark.parametrize("precision", ["exact", "auto"])
def test_linear_and_embedding(level: str, dtype: str, precision: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(1)
    k, kind = 256, DTYPES[dtype]
    raw, values = quantized(rng, (50, k), kind)
    table, entries = quantized(rng, (33, k), kind)
    graph = Graph("linear")
    ids = graph.input("ids", [SEQ], I32)
    x = ops.embedding(graph.weight("table", (33, k), kind), ids, scale=1.5)
    graph.output("x", x)
    graph.output("y", ops.linear(x, graph.weight("w", (50, k), kind)))
    for rows in (1, 5, 17):
        arrays = {"ids": rng.integers(0, 33, rows).astype(np.int32)}
        check(graph, arrays, level, cache, exact={"w": values, "table": entries}, precision=precision,
              ceiling=INT8_CEILING, w=raw, table=table)  # fmt: skip


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu_erf"])
def test_gated_bias_and_residual(level: str, act: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(2)
    graph = Graph("mlp")
    x = graph.input("x", [SEQ, 36])
    gate, up = (ops.linear(x, graph.weight(n, (52, 36)), graph.weight(f"{n}.b", (52,))) for n in ("gate", "up"))
    graph.output(
        "gated",
        getattr(ops, act)(ops.linear(x, graph.weight("gate", (52, 36)))) * ops.linear(x, graph.weight("up", (52, 36))),
    )
    graph.output(
        "y", x + ops.linear(getattr(ops, act)(gate) * up, graph.weight("down", (36, 52)), graph.weight("db", (36,)))
    )
    shapes = {n: leaf.shape for n, leaf in graph.leaves("weight").items()}
    weights = {n: rng.standard_normal([int(str(d)) for d in s]).astype(np.float32) for n, s in shapes.items()}
    for rows in (1, 3, 33):
        arrays = {"x": rng.standard_normal((rows, 36)).astype(np.float32)}
        check(graph, arrays, level, cache, exact=weights, ceiling=5e-6, **weights)


def unary_graph(op: str) -> Graph:
    graph = Graph(op)
    x = graph.input("x", [SEQ, 37])
    extra = {"scale": {"by": 0.37}, "softcap": {"cap": 3.0}, "rms_norm": {"eps": 1e-5}}.get(op, {})
    graph.output("y", ops.make(op, x, **extra))
    return graph


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("op", [*meaning.UNARY, "scale", "softcap", "softmax", "rms_norm", "argmax", "last_row"])
def test_rowwise(op: str, level: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(3)
    for rows in (1, 3, 16):
        arrays = {"x": (rng.standard_normal((rows, 37)) * 3).astype(np.float32)}
        check(unary_graph(op), arrays, level, cache, ceiling=4e-6)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("op", list(meaning.BINARY))
def test_binary(op: str, level: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(4)
    graph = Graph(op)
    x, y = graph.input("x", [SEQ, 19]), graph.input("y", [SEQ, 19])
    graph.output("full", ops.make(op, x, y))
    graph.output("row", ops.make(op, x, graph.weight("row", (19,))))
    row = rng.uniform(0.5, 2, 19).astype(np.float32)
    arrays = {n: rng.uniform(0.5, 2, (5, 19)).astype(np.float32) for n in "xy"}
    check(graph, arrays, level, cache, exact={"row": row}, row=row)


def test_top_k_is_sorted_and_stable(cache: CompileCache) -> None:
    graph = Graph("top_k")
    graph.output("y", ops.top_k(graph.input("x", [SEQ, 40]), 5))
    x = np.random.default_rng(5).integers(0, 9, (7, 40)).astype(np.float32)
    with compile(graph, cache=cache) as exe:
        assert (exe(x=x)["y"] == np.argsort(-x, -1, kind="stable")[:, :5]).all()


def attention_graph(style: str, dtype: DType, normed: bool, **options: Any) -> Graph:
    graph = Graph("attention")
    heads, kv_heads, width = 6, 2, 32
    angles = ops.rope_angles(
        graph.input("positions", [SEQ], I32), graph.constant("inv_freq", np.geomspace(1, 1e-3, 12))
    )
    q = graph.input("q", [SEQ, heads, width])
    k = graph.input("k", [SEQ, kv_heads, width])
    v = graph.input("v", [SEQ, kv_heads, width])
    if normed:
        q, k = (ops.rms_norm(t, graph.weight(f"norm.{i}", (width,)), eps=1e-6) for i, t in enumerate((q, k)))
    keys = ops.kv_write(graph.state("keys", (kv_heads, CTX, width), dtype), ops.rope(k, angles, style=style))
    values = ops.kv_write(graph.state("values", (kv_heads, CTX, width), dtype), v)
    graph.output("y", ops.attention(ops.rope(q, angles, style=style), keys, values, scale=width**-0.5, **options))
    return graph


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0}], ids=["plain", "window", "softcap"])
def test_attention_over_chunks(
    level: str, dtype: str, style: str, options: dict[str, Any], cache: CompileCache
) -> None:
    rng = np.random.default_rng(6)
    graph = attention_graph(style, DTYPES[dtype], normed=style == "neox", **options)
    norms = {n: rng.uniform(0.5, 1.5, 32).astype(np.float32) for n in graph.leaves("weight") if n.startswith("norm")}
    length = 37
    arrays = {
        "q": rng.standard_normal((length, 6, 32)).astype(np.float32),
        "k": rng.standard_normal((length, 2, 32)).astype(np.float32),
        "v": rng.standard_normal((length, 2, 32)).astype(np.float32),
        "positions": np.arange(length, dtype=np.int32),
    }
    empty = {n: np.zeros((2, 64, 32)) for n in ("keys", "values")}
    want, _ = interp.run(
        graph, {**arrays, **norms, **empty}, {"SEQ": length, "PAST_SEQ": 0, "CTX": 64}, dtype=np.float64
    )
    # A key rounded to 16 bits may fall to the other side of a rounding boundary in float64.
    ceiling = EXACT_CEILING if dtype == "f32" else {"f16": 2e-4, "bf16": 2e-3}[dtype]
    with compile(graph, {"CTX": 64, **norms}, target=level, threads=2, cache=cache) as exe:
        at, got = 0, []
        for count in (7, 1, 20, 1, 8):
            part = {n: a[at : at + count] for n, a in arrays.items()}
            got.append(exe(**part, PAST_SEQ=at)["y"])
            at += count
    assert np.abs(np.concatenate(got) - want["y"]).max() <= ceiling * np.abs(want["y"]).max()


def test_every_kernel_is_reached_by_these_tests() -> None:
    """A new row in the kernel table needs a case here."""
    covered = {"linear", "embedding", "rms_norm", "quantize", "rope", "rope_kv_write", "kv_write", "rope_angles"}
    covered |= {"attention", "elementwise", "softmax", "argmax", "top_k", "last_row"}
    assert covered == set(KERNELS)


def test_a_profile_s_switches_change_the_program(cache: CompileCache) -> None:
    graph = Graph("mlp")
    x = graph.input("x", [SEQ, 32])
    up, gate = (ops.linear(x, graph.weight(name, (64, 32))) for name in ("up", "gate"))
    graph.output("y", ops.silu(gate) * up)

    def linears(**fusion: bool) -> int:
        with compile(graph, profile={"fusion": fusion}, cache=cache) as exe:
            return sum(n.op == "linear" for n in exe.graph.nodes())

    assert (linears(), linears(gated=False)) == (1, 2)
    with pytest.raises(ProfileError, match="Did you mean 'gated'"):
        linears(gatted=False)
