"""Every op with a kernel, compiled, against its NumPy meaning in float64: odd sizes, each dtype, each target level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import EXACT_CEILING, INT8_CEILING, check, levels, quantized, weight_cases
from ir.cases import CASES, arrays
from ir.references import ENV

from rlx.backends.cpu.select import KERNELS
from rlx.backends.cpu.target import Target
from rlx.compiler.executable import compile
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, PAST_SEQ, SEQ, Dim, value
from rlx.ir.dtypes import DTYPES, F32, I32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.store.cache import CompileCache


@pytest.mark.parametrize(("level", "dtype", "precision"), weight_cases())
def test_linear_and_embedding(level: str, dtype: str, precision: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(1)
    k, kind = 256, DTYPES[dtype]
    raw, values = quantized(rng, (50, k), kind)
    table, entries = quantized(rng, (33, k), kind)
    graph = Graph("linear")
    ids = graph.input("ids", [SEQ], I32)
    x = ops.embedding(graph.weight("table", (33, k), kind), ids, scale=1.5)
    w = graph.weight("w", (50, k), kind)
    graph.output("x", x)  # of a table that lies as in the file
    graph.output("y", ops.linear(x, w))
    graph.output("tied", ops.embedding(w, ids))  # of a packed one
    for rows in (1, 5, 17):
        arrays = {"ids": rng.integers(0, 33, rows).astype(np.int32)}
        check(graph, arrays, level, cache, exact={"w": values, "table": entries}, precision=precision,
              ceiling=INT8_CEILING, w=raw, table=table)  # fmt: skip


def is_checked(node: Node) -> bool:
    """Passes choose how rows are rounded; what lies behind the rows of a cache nobody reads."""
    is_read = dict(node.attrs).get("out", "f32") == "f32" and node.op != "as_cache"
    return is_read and node.op in KERNELS and not any(operand.op == "state" for operand in node.inputs)


STATELESS: dict[str, list[Node]] = {}
for (_node,) in (case.values for case in CASES):
    if is_checked(_node):
        STATELESS.setdefault(_node.op, []).append(_node)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("op", STATELESS)
def test_every_form_of_an_op(op: str, level: str, cache: CompileCache) -> None:
    """All its cases in one program. Those of ops over states follow below."""
    graph = Graph(op, outputs={f"{i}": node for i, node in enumerate(STATELESS[op])})
    rng, feeds, raw = np.random.default_rng(3), {n: a for node in STATELESS[op] for n, a in arrays(node).items()}, {}
    for name, leaf in graph.leaves("weight").items():
        raw[name], feeds[name] = quantized(rng, tuple(value(d, ENV) for d in leaf.shape), leaf.dtype)
    kinds = {name: np.int32 if leaf.dtype is I32 else np.float32 for name, leaf in graph.leaves("input").items()}
    inputs = {name: feeds[name].astype(kind) for name, kind in kinds.items()}
    bind = {"SEQ": (1, 8), "PAST_SEQ": ENV["PAST_SEQ"], **raw}
    with compile(graph, bind, target=level, threads=2, cache=cache) as exe:
        got = exe(**inputs)
    want = interp.run(graph, {**feeds, **inputs}, ENV, dtype=np.float64)[0]
    for name, value_ in want.items():
        assert np.abs(got[name] - value_).max() <= EXACT_CEILING * np.abs(value_).max(), STATELESS[op][int(name)]


@pytest.mark.parametrize("level", levels())
def test_columns_join_a_region(level: str, cache: CompileCache) -> None:
    """A norm written out, and a gate a row: reductions, columns, and elementwise ops in one region."""
    graph = Graph("columns")
    x = graph.input("x", [SEQ, 70])
    size = ops.sqrt(ops.clamp(ops.reduce_mean(ops.mul(x, x)), 1e-3))
    gate = ops.softplus(ops.reduce_sum(x))
    graph.output("y", ops.relu(ops.sub(ops.mul(ops.div(x, size), gate), ops.reduce_mean(x))))
    rng = np.random.default_rng(14)
    for rows in (1, 4, 33):
        check(graph, {"x": rng.standard_normal((rows, 70)).astype(np.float32)}, level, cache)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_pick_sees_what_is_not_finite(bad: float, cache: CompileCache) -> None:
    graph = Graph("pick")
    graph.output("y", ops.pick(graph.input("x", [SEQ, 70])))
    x = np.zeros((3, 70), np.float32)
    x[1, 64], x[2, 5:7] = bad, 1
    with compile(graph, cache=cache) as exe:
        assert exe(x=x)["y"].tolist() == [0, -1, 5]


@pytest.mark.parametrize("level", levels())
def test_choices_get_other_numbers(level: str, cache: CompileCache) -> None:
    """One for each row, and of one row, where the choice joins the head; what is no choice keeps its -1."""
    labels = np.random.default_rng(16).permutation(1 << 18)[:70]
    graph = Graph("relabelled")
    logits = ops.linear(graph.input("x", [SEQ, 64]), graph.weight("w", [70, 64]))
    graph.output("y", ops.relabel(ops.pick(logits), graph.weight("labels", [70])))
    x = np.zeros((3, 64), np.float32)
    x[0, 3], x[1, 5], x[2, 60] = 1, np.nan, 1
    weights = {"w": np.eye(70, 64, dtype=np.float32), "labels": labels.astype(np.float32)}
    with compile(graph, weights, target=level, cache=cache) as exe:
        assert exe(x=x)["y"].tolist() == [labels[3], -1, labels[60]]
        assert [exe(x=row[None])["y"].tolist() for row in x] == [[labels[3]], [-1], [labels[60]]]


def picking(n: int, dtype: DType, cap: float | None) -> Graph:
    """The greedy choice of a head of n tokens."""
    graph = Graph("head")
    logits = ops.linear(graph.input("x", [SEQ, 64]), graph.weight("w", [n, 64], dtype))
    graph.output("y", ops.pick(logits if cap is None else ops.softcap(logits, cap)))
    return graph


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(("n", "cap"), [(5, None), (77, 30.0), (2600, None)])
@pytest.mark.parametrize("dtype", [F32, DTYPES["q8_0"]], ids=str)
def test_the_head_of_a_greedy_step(dtype: DType, n: int, cap: float | None, level: str, cache: CompileCache) -> None:
    """Of equals the lowest wins, whoever found it; what is not finite is told; nothing is left for the next."""
    rng = np.random.default_rng(n)
    raw, values = quantized(rng, (n, 64), dtype)
    twice = rng.permutation(n)[:4]  # the winner's row in several places
    with compile(picking(n, dtype, cap), {"SEQ": 1, "w": raw}, target=level, threads=3, cache=cache) as exe:
        assert [node.op for node in exe.graph.nodes()].count("linear_pick") == 1
        for trial in range(4):
            x = rng.standard_normal((1, 64)).astype(np.float32)
            best = int((values @ x[0]).argmax())
            changed = raw.copy()
            rows = changed.reshape(n, -1)
            rows[twice] = rows[best]
            token = exe(x=x, w=changed)["y"].tolist()
            assert token == [min(best, *twice)], trial
            assert exe(x=x * np.float32("nan"))["y"].tolist() == [-1]


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
    if options.get("sinks"):
        options["sinks"] = graph.constant("sinks", np.linspace(-2, 4, heads))
    graph.output("y", ops.attention(ops.rope(q, angles, style=style), keys, values, scale=width**-0.5, **options))
    return graph


# Every level and every option with each of them; the kernels are tested on every level with every option.
KEYS = (("f32", "neox"), ("f32", "interleaved"), ("f16", "neox"), ("bf16", "interleaved"))
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 5}, {"softcap": 2.0}, {"sinks": True, "window": 9})
ATTENTION = [(level, *key, OPTIONS[(i + j) % 4]) for i, level in enumerate(levels()) for j, key in enumerate(KEYS)]


@pytest.mark.parametrize(("level", "dtype", "style", "options"), ATTENTION)
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


MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 9},
    {"causal": False},
    {"around": True, "window": 9},
    {"visible": True},
    {"visible": True, "window": 50, "softcap": 3.0},
)


# Each mask on one level, with one of two head sizes; tests/backends/cpu has the kernels on every level.
PLAIN = [(mask, (64, 72)[i // 3], levels()[i % len(levels())]) for i, mask in enumerate(MASKS)]


@pytest.mark.parametrize(("options", "width", "level"), PLAIN, ids=str)
def test_attention_over_plain_values(options: dict[str, Any], width: int, level: str, cache: CompileCache) -> None:
    """Keys and values are computed; many rows and one; as many keys as rows, and more."""
    graph = Graph("plain")
    names = {"q": (SEQ, 4), "k": (Dim("KEYS"), 2), "v": (Dim("KEYS"), 2)}
    q, k, v = (ops.scale(graph.input(name, [*size, width]), 1.1) for name, size in names.items())
    marks = graph.input("visible", [SEQ], I32) if options.get("visible") else None
    graph.output("y", ops.attention(q, k, v, scale=0.2, **{**options, "visible": marks}))
    rng = np.random.default_rng(18)
    for rows, keys in ((40, 40), (17, 83), (1, 1), (1, 300)):
        sizes = {"q": (rows, 4), "k": (keys, 2), "v": (keys, 2)}
        arrays = {n: rng.standard_normal((*s, width)).astype(np.float32) for n, s in sizes.items()}
        if marks:
            last = keys - rows + np.arange(rows)
            last = np.where(last % 16 < 9, np.minimum(last // 16 * 16 + 8, keys - 1), last)
            arrays["visible"] = last.astype(np.int32)
        check(graph, arrays, level, cache, KEYS=(1, 512), SEQ=(1, 1) if rows == 1 else (1, 40),
              env={"KEYS": keys})  # fmt: skip


def test_plain_keys_in_both_orders(cache: CompileCache) -> None:
    """Rows come first, unless only heads can: [2, KEYS] of two heads are no two rows of KEYS heads."""
    rng, results = np.random.default_rng(19), []
    k, v = rng.standard_normal((2, 30, 2, 32)).astype(np.float32)
    q = rng.standard_normal((30, 4, 32)).astype(np.float32)
    for heads_first in (False, True):
        graph = Graph("order")
        shape = [2, SEQ, 32] if heads_first else [SEQ, 2, 32]
        operands = [graph.input(name, shape) for name in "kv"]
        graph.output("y", ops.attention(graph.input("q", [SEQ, 4, 32]), *operands, scale=0.2))
        arrays = {"q": q, "k": k, "v": v}
        if heads_first:
            arrays |= {n: np.ascontiguousarray(arrays[n].swapaxes(0, 1)) for n in "kv"}
        check(graph, arrays, levels()[-1], cache)
        with compile(graph, cache=cache) as exe:
            results.append(exe(**arrays)["y"])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("width", [64, 72])
def test_attention_over_plain_values_in_bf16(width: int, cache: CompileCache) -> None:
    """Where the target has products of bf16, heads of 72 take them too; elsewhere f32."""
    graph, rng, size = Graph("tower"), np.random.default_rng(20), 2 * width
    x = graph.input("x", [SEQ, size])
    names = {name: graph.weight(name, (size, size), DTYPES["bf16"]) for name in "qkv"}
    heads = [ops.reshape(ops.linear(x, w, bf16=True), [SEQ, 2, width]) for w in names.values()]
    graph.output("y", ops.attention(*heads, scale=width**-0.5, causal=False))
    stored = {name: quantized(rng, (size, size), DTYPES["bf16"]) for name in names}
    arrays = {"x": 0.15 * rng.standard_normal((150, size)).astype(np.float32)}
    raw, values = ({name: pair[i] for name, pair in stored.items()} for i in (0, 1))
    with compile(graph, {"SEQ": (16, 200), **raw}, precision="auto", cache=cache) as exe:
        got = exe(**arrays)["y"]
        (node,) = (n for n in exe.graph.nodes() if n.op == "attention")
        target = Target.host()
    assert node["bf16"] == (target.has_bf16_dots or target.has_bf16_tiles)
    assert {n.dtype.name for n in node.inputs[1:3]} == {"bf16" if node["bf16"] else "f32"}
    want = interp.run(graph, {**arrays, **values}, {"SEQ": 150}, dtype=np.float64)[0]["y"]
    assert np.abs(got - want).max() <= (0.02 if node["bf16"] else EXACT_CEILING) * np.abs(want).max()


@pytest.mark.parametrize("level", levels())
def test_rows_of_a_picture_see_each_other(level: str, cache: CompileCache) -> None:
    """Over caches, in calls of several rows and of one, as the same mask as a bias says."""
    graph, biased = Graph("pictures"), Graph("biased")
    for g in (graph, biased):
        rows = {name: g.input(name, [SEQ, 2, 32]) for name in "kv"}
        written = [ops.kv_write(g.state(f"{name} cache", (2, CTX, 32)), x) for name, x in rows.items()]
        by: dict[str, Any] = {"bias": g.input("bias", [SEQ, 1, PAST_SEQ + SEQ])}
        by = by if g is biased else {"visible": g.input("visible", [SEQ], I32)}
        g.output("y", ops.attention(g.input("q", [SEQ, 4, 32]), *written, scale=0.2, window=40, **by))
    rng, length = np.random.default_rng(21), 100
    arrays = {n: rng.standard_normal((length, h, 32)).astype(np.float32) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    last = np.arange(length)
    last[20:50], last[70:90] = 49, 89
    bias = np.where(np.arange(length) <= last[:, None], 0, -np.inf).astype(np.float32)[:, None]
    empty = {f"{n} cache": np.zeros((2, length, 32)) for n in "kv"}
    env = {"SEQ": length, "PAST_SEQ": 0, "CTX": length}
    want = interp.run(biased, {**arrays, "bias": bias, **empty}, env, dtype=np.float64)[0]["y"]
    with compile(graph, {"CTX": 128, "SEQ": (1, 64)}, target=level, threads=2, cache=cache) as exe:
        found = []
        for start, end in ((0, 10), (10, 11), (11, 60), (60, 100)):
            part = {n: a[start:end] for n, a in arrays.items()}
            found.append(exe(**part, visible=last[start:end].astype(np.int32), PAST_SEQ=start)["y"])
    assert np.abs(np.concatenate(found) - want).max() <= EXACT_CEILING * np.abs(want).max()


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_with_a_bias(level: str, heads: int, cache: CompileCache) -> None:
    """It opens later keys and closes earlier ones; in the program of one row, too, over enough keys for ranges."""
    graph = Graph("biased")
    q = graph.input("q", [SEQ, 4, 32])
    rows = {name: graph.input(name, [SEQ, 2, 32]) for name in "kv"}
    keys, values = (ops.kv_write(graph.state(f"{name} cache", (2, CTX, 32)), x) for name, x in rows.items())
    bias = graph.input("bias", [SEQ, heads, PAST_SEQ + SEQ])
    graph.output("y", ops.attention(q, keys, values, bias, scale=0.2, softcap=5.0))
    rng, length = np.random.default_rng(8), 301
    arrays = {n: rng.standard_normal((length, k, 32)).astype(np.float32) for n, k in (("q", 4), ("k", 2), ("v", 2))}
    biases = rng.standard_normal((length, heads, length)).astype(np.float32) * 2
    biases[rng.random(biases.shape) < 0.3] = -np.inf
    biases[:, :, 0] = 0.5  # open to all

    def part(at: int, count: int) -> dict[str, np.ndarray]:
        inputs = {n: a[at : at + count] for n, a in arrays.items()}
        return inputs | {"bias": np.ascontiguousarray(biases[at : at + count, :, : at + count])}

    def check(found: np.ndarray) -> None:
        assert np.abs(found - want["y"]).max() <= EXACT_CEILING * np.abs(want["y"]).max()

    caches = {f"{n} cache": np.zeros((2, 304, 32)) for n in "kv"}
    sizes = {"CTX": 304, "PAST_SEQ": (0, 1 << 10)}
    with compile(graph, sizes, target=level, threads=2, cache=cache) as exe:
        for at, count in ((0, 40), (40, 260), (300, 1)):
            env = {"SEQ": count, "PAST_SEQ": at, "CTX": 304}
            want, caches = interp.run(graph, {**part(at, count), **caches}, env, dtype=np.float64)
            check(exe(**part(at, count), PAST_SEQ=at)["y"])
    with compile(graph, {"SEQ": 1, **sizes}, target=level, threads=2, cache=cache) as exe:
        check([exe(**part(at, 1), PAST_SEQ=at)["y"] for at in range(length)][-1])


RECURRENT = [node for (node,) in (case.values for case in CASES) if node.op in ("causal_conv", "gated_delta")]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("node", RECURRENT, ids=str)
def test_recurrent_states(node: Node, level: str, cache: CompileCache) -> None:
    """Call after call, of several rows and of one: the results, and the states that the next call begins with. What
    is written aside leaves the state of the start.
    """
    graph, feeds = Graph(node.op, outputs={"y": node}), arrays(node)
    weights = {name: feeds[name].astype(np.float32) for name in graph.leaves("weight")}
    states = {name: np.zeros([value(d, ENV) for d in leaf.shape]) for name, leaf in graph.leaves("state").items()}
    with compile(graph, weights, target=level, threads=2, cache=cache) as exe:
        for rows in (3, 1, 3, 2):
            inputs = {name: feeds[name][:rows].astype(np.float32) for name in graph.leaves("input")}
            want, after = interp.run(graph, {**inputs, **weights, **states}, {"SEQ": rows}, dtype=np.float64)
            states |= after
            found = {**exe(**inputs), **{name: exe._states.copy_state(name, 0) for name in states}}
            for name, wanted in {**want, **states}.items():
                assert np.abs(found[name] - wanted).max() <= EXACT_CEILING * np.abs(wanted).max(), name


# Each type on one level and in one precision: tests/backends/cpu has every pair.
PRECISE = (("f32", "exact"), ("q8_0", "auto"), ("q4_k", "exact"), ("mxfp4", "auto"))
EXPERTS = [(levels()[i % len(levels())], *each) for i, each in enumerate(PRECISE)]


def experts_graph(dtype: str, act: str) -> Graph:
    """A gated layer whose slots share a row, a plain one with a row a slot, and the slots' weighted sum."""
    graph, kind = Graph("experts"), DTYPES[dtype]
    x, slots = graph.input("x", [SEQ, 256]), graph.input("slots", [SEQ, 2, 256])
    scores = ops.softmax(graph.input("scores", [SEQ, 6]))
    ids = ops.top_k(scores, 2)
    gate, up, down = (graph.weight(n, (6, 50, 256), kind) for n in ("gate", "up", "down"))
    gated = ops.mul(ops.make(act, ops.expert_linear(x, ids, gate)), ops.expert_linear(x, ids, up))
    shares = ops.reshape(ops.take(scores, ids), [SEQ, 1, 2])
    graph.output("gated", gated)
    graph.output("sum", ops.mix(ops.expert_linear(slots, ids, down), shares))
    return graph


@pytest.mark.parametrize(("level", "dtype", "precision"), EXPERTS)
def test_experts(level: str, dtype: str, precision: str, cache: CompileCache) -> None:
    rng = np.random.default_rng(21)
    pairs = {n: quantized(rng, (6, 50, 256), DTYPES[dtype]) for n in ("gate", "up", "down")}
    raw, values = ({n: pair[i] for n, pair in pairs.items()} for i in range(2))
    graph = experts_graph(dtype, "gelu_tanh" if dtype == "q8_0" else "silu")
    sizes = {"x": (256,), "slots": (2, 256), "scores": (6,)}
    for rows in (1, 19):
        arrays = {n: rng.standard_normal((rows, *size)).astype(np.float32) for n, size in sizes.items()}
        check(graph, arrays, level, cache, exact=values, precision=precision, ceiling=INT8_CEILING, **raw)


def test_every_kernel_is_reached_by_these_tests() -> None:
    """A new row in the kernel table needs a case in tests/ir/cases.py; over caches, here."""
    cached = {"quantize", "rope_kv_write", "kv_write", "as_cache"}
    assert {*STATELESS, *cached, *(node.op for node in RECURRENT)} == set(KERNELS)
