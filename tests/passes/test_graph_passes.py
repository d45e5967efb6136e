"""Simplify, specialize, quantize and layout: what each one changes, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import toy

from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import (
    BF16,
    F8_E4M3,
    F16,
    F32,
    I32,
    IQ1_S,
    MXFP4,
    NVFP4,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    TQ2_0,
    DType,
)
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.ir.verify import verify
from rlx.passes.capabilities import Capabilities, Layouts
from rlx.passes.layout import layout
from rlx.passes.options import Options
from rlx.passes.quantize import quantize
from rlx.passes.simplify import simplify
from rlx.passes.specialize import specialize

G = Graph()
X = G.input("x", [SEQ, 64])


def count(graph: Graph, op: str) -> int:
    return sum(n.op == op for n in graph.nodes())


# --- simplify ---------------------------------------------------------------------------------------------------------


def test_simplify_folds_gemmas_embedding_scale_and_silu() -> None:
    graph = simplify(toy.build(toy.FAMILIES["gemma"]), Options())
    assert count(graph, "scale") == 0
    assert [n["scale"] for n in graph.nodes() if n.op == "embedding"] == [8.0]
    by_hand = Graph(outputs={"y": ops.mul(X, ops.sigmoid(X))})
    assert simplify(by_hand, Options()).outputs["y"] is ops.silu(X)


def test_simplify_moves_a_scale_of_the_queries_into_the_scores() -> None:
    q, k, v = (
        G.input("q", [SEQ, 4, 16]),
        *(ops.kv_write(G.state(n, [2, CTX, 16]), G.input(n + "x", [SEQ, 2, 16])) for n in "kv"),
    )
    before = ops.attention(ops.scale(q, 0.25), k, v, scale=2.0, window=7, softcap=3.0)
    after = simplify(Graph(outputs={"y": before}), Options())
    assert after.outputs["y"] is ops.attention(q, k, v, scale=0.5, window=7, softcap=3.0)


# --- specialize -------------------------------------------------------------------------------------------------------


def test_a_bucket_of_several_values_keeps_the_symbol() -> None:
    before = toy.build(toy.FAMILIES["llama"])
    after = specialize(before, Options(seq=(2, 16)))
    assert after.outputs == before.outputs
    assert after.phase == "prefill" and after.bounds["SEQ"] == (2, 16)


# --- quantize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [Q8_0, Q4_0, Q4_K, Q6_K, IQ1_S, TQ2_0, MXFP4, NVFP4])
def test_linears_over_quantized_weights_take_int8_rows(dtype: DType) -> None:
    x = G.input("wide", [SEQ, 256])
    w = G.weight("w", [8, 256], dtype)
    graph = quantize(Graph(outputs={"y": ops.linear(x, w)}), Options())
    assert graph.outputs["y"] is ops.make("linear", ops.quantize(x), w)
    exact = quantize(Graph(outputs={"y": ops.linear(x, w)}), Options(precision="exact"))
    assert exact.outputs["y"] is ops.linear(x, w)


WITH_DOTS = Options(seq=(2, 16), bf16_tiles=False)
WITH_TILES = Options(seq=(16, 64))


@pytest.mark.parametrize(
    ("dtype", "bf16", "k", "options", "found"),
    [
        (BF16, True, 64, WITH_DOTS, "bf16"),
        (BF16, True, 64, Options(seq=(1, 16)), "bf16"),
        (BF16, True, 64, Options(seq=(2, 16), bf16_dots=False), "f32"),  # the target has no dots of bf16
        (BF16, True, 64, Options(), "f32"),  # one row
        (BF16, True, 64, replace(WITH_DOTS, precision="exact"), "f32"),
        (BF16, False, 64, WITH_DOTS, "f32"),  # the graph does not allow it
        (BF16, True, 63, WITH_DOTS, "f32"),
        (F16, True, 64, WITH_DOTS, "bf16"),
        (F16, False, 64, WITH_DOTS, "f32"),
        (F16, True, 64, Options(), "f32"),
        (F32, True, 64, WITH_DOTS, "f32"),
        (F8_E4M3, True, 64, WITH_DOTS, "f32"),
        (Q8_0, True, 64, WITH_DOTS, "q8a"),
        (Q8_0, True, 64, replace(WITH_DOTS, precision="exact"), "f32"),
    ],
)
def test_which_linears_take_bf16_rows(dtype: DType, bf16: bool, k: int, options: Options, found: str) -> None:
    """With experts alike; what is found is the dtype of the operand, the attribute is gone."""
    x, ids = G.input("some", [SEQ, k]), G.input("ids", [SEQ, 2], I32)
    one, many = G.weight("one", [8, k], dtype), G.weight("many", [4, 8, k], dtype)
    graph = Graph(outputs={"y": ops.linear(x, one, bf16=bf16), "z": ops.expert_linear(x, ids, many, bf16=bf16)})
    after = quantize(specialize(graph, options), options)
    for node in after.outputs.values():
        assert node.inputs[0].dtype.name == found
        assert not node["bf16"]
    assert count(after, "quantize") == (found != "f32")


@pytest.mark.parametrize(
    ("dtype", "options", "found"),
    [
        (Q8_0, WITH_TILES, "bf16"),
        (F8_E4M3, WITH_TILES, "bf16"),
        (BF16, WITH_TILES, "f32"),  # the graph does not allow it
        (F16, WITH_TILES, "f32"),
        (Q8_0, replace(WITH_TILES, precision="exact"), "f32"),
        (Q8_0, replace(WITH_TILES, seq=(15, 64)), "q8a"),  # too few rows to unpack for
        (Q8_0, replace(WITH_TILES, segments=True), "bf16"),
        (Q8_0, replace(WITH_TILES, seq=(2, 64), segments=True), "q8a"),  # each row gets the bits that it gets alone
        (F8_E4M3, replace(WITH_TILES, seq=(1, 1)), "f32"),
    ],
)
def test_which_linears_take_bf16_rows_where_there_are_tiles(dtype: DType, options: Options, found: str) -> None:
    """Over blocks without being allowed it; experts, who get half of the rows each, take what they take elsewhere."""
    x, ids = G.input("x", [SEQ, 64]), G.input("ids", [SEQ, 2], I32)
    one, many = G.weight("one", [8, 64], dtype), G.weight("many", [4, 8, 64], dtype)
    graph = specialize(Graph(outputs={"y": ops.linear(x, one), "z": ops.expert_linear(x, ids, many)}), options)
    after = quantize(graph, options)
    assert after.outputs["y"].inputs[0].dtype.name == found
    plain = quantize(graph, replace(options, bf16_dots=False, bf16_tiles=False))
    assert after.outputs["z"].inputs[0] is plain.outputs["z"].inputs[0]


@pytest.mark.parametrize(
    ("dtype", "seq", "found"),
    [(Q8_0, (2, 8), "q8a"), (Q8_0, (9, 32), "bf16"), (Q8_0, (33, 512), "bf16"), (BF16, (2, 8), "bf16")],
)
def test_steps_of_several_sequences_multiply_tiles_from_few_rows_on(
    dtype: DType, seq: tuple[int, int], found: str
) -> None:
    """In layers and head alike, whose rows are those that get logits. With `deterministic` all are as one row.

    Experts have tiles if each gets enough rows, or none if a step has few.
    """
    x = G.input("x", [SEQ, 64])
    hidden = ops.linear(x, G.weight("layer", [64, 64], dtype), bf16=True)
    graph = Graph(outputs={"logits": ops.linear(hidden, G.weight("head", [8, 64], dtype), bf16=True)})

    def chosen(options: Options) -> list[str]:
        options = options.effective(Capabilities(bf16_rows=9))
        after = quantize(specialize(graph, options), options)
        return [node.inputs[0].dtype.name for node in after.nodes() if node.op == "linear"]

    options = Options(seq=seq, segments=True)
    assert chosen(options) == [found] * 2
    ids, many = G.input("ids", [SEQ, 2], I32), G.weight("many", [4, 64, 64], dtype)
    experts = specialize(Graph(outputs={"y": ops.expert_linear(x, ids, many, bf16=True)}), options)
    after = quantize(experts, options.effective(Capabilities(bf16_rows=9))).outputs["y"]
    if seq == (2, 8):
        assert (after.inputs[0].dtype.name, after["tiles"]) == ("f32" if dtype is BF16 else "q8a", False)
    assert chosen(replace(options, deterministic=True)) == ["bf16" if dtype is BF16 else "q8a"] * 2
    assert chosen(replace(options, precision="exact")) == ["f32"] * 2
    assert chosen(replace(options, bf16_tiles=False, bf16_dots=False)) == ["f32" if dtype is BF16 else "q8a"] * 2


@pytest.mark.parametrize(
    ("dtype", "options", "found"),
    [
        (Q8_0, Options(seq=(128, 512)), "bf16"),  # 32 rows an expert and more
        (Q8_0, Options(seq=(127, 512)), "q8a"),
        (F8_E4M3, Options(seq=(128, 512)), "bf16"),
        (F8_E4M3, Options(seq=(127, 512)), "f32"),
        (Q8_0, Options(seq=(128, 512), bf16_tiles=False), "q8a"),
        (Q8_0, Options(seq=(128, 512), segments=True), "bf16"),
        (Q8_0, Options(seq=(128, 512), precision="exact"), "f32"),
        (BF16, Options(seq=(128, 512)), "f32"),  # the graph does not allow it
    ],
)
def test_experts_in_blocks_take_bf16_rows_where_each_gets_enough(dtype: DType, options: Options, found: str) -> None:
    """Two of eight experts a row, on average a quarter of the rows for each."""
    x, ids, w = G.input("x", [SEQ, 64]), G.input("ids", [SEQ, 2], I32), G.weight("w", [8, 8, 64], dtype)
    after = quantize(specialize(Graph(outputs={"y": ops.expert_linear(x, ids, w)}), options), options)
    assert after.outputs["y"].inputs[0].dtype.name == found


# --- layout -----------------------------------------------------------------------------------------------------------


TILED = Capabilities(layouts=Layouts(keys="tiles", tile=16))


def caches(graph: Graph) -> dict[str, str]:
    return {name: node["layout"] for name, node in graph.leaves("state").items()}


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_every_matrix_is_packed_and_key_caches_are_tiled(family: str) -> None:
    graph = layout(toy.build(toy.FAMILIES[family]), Options(capabilities=TILED))
    verify(graph)
    matrices = {name for name, n in graph.leaves("weight").items() if len(n.shape) == 2}
    packs = [n for n in graph.nodes() if n.op == "pack"]
    assert {n.inputs[0].name for n in packs} == matrices and len(packs) == len(matrices)
    users = graph.users()
    for pack in packs:  # what is only looked up stays in the file
        assert pack["layout"] == ("file" if {u.op for u in users[pack]} == {"embedding"} else Layouts().matrices)
    assert Layouts().matrices in {n["layout"] for n in packs}
    for node in graph.nodes():
        readers_of_leaves = [i for i in node.inputs if i.op in LEAVES and len(i.shape) == 2]
        assert node.op in ("pack", "kv_write") or not readers_of_leaves
    assert {(name.split(".")[1], kind) for name, kind in caches(graph).items()} == {
        ("keys", "tiles"),
        ("values", "rows"),
    }


def test_a_tied_embedding_is_packed_once() -> None:
    graph = layout(toy.build(toy.FAMILIES["qwen3"]), Options())
    readers = [n for n in graph.nodes() if any(i.op == "pack" and i.inputs[0].name == "embedding" for i in n.inputs)]
    assert [n.op for n in readers] == ["embedding", "linear"]
    assert len({id(i) for n in readers for i in n.inputs if i.op == "pack"}) == 1


def test_a_key_cache_that_is_only_read_is_tiled() -> None:
    """Layers that share the cache of an earlier one, and cross attention."""
    q = G.input("q", [SEQ, 4, 16])
    y = ops.attention(q, G.state("k", [2, CTX, 16]), G.state("v", [2, CTX, 16]), scale=1.0)
    assert caches(layout(Graph(outputs={"y": y}), Options(capabilities=TILED))) == {"k": "tiles", "v": "rows"}


def test_vectors_and_other_states_keep_their_rows() -> None:
    norm: Node = ops.rms_norm(X, G.weight("n", [64]), eps=1e-6)
    written = ops.kv_write(G.state("s", [2, CTX, 16]), G.input("h", [SEQ, 2, 16]))
    graph = Graph(
        outputs={"y": norm, "s": written, "e": ops.embedding(G.input("table", [8, 64]), G.input("i", [SEQ], I32))}
    )
    assert layout(graph, Options()) == graph


@pytest.mark.parametrize(
    ("cache", "width", "changes", "expected"),
    [
        (F16, 64, {}, True),
        (BF16, 32, {}, True),
        (F32, 64, {}, False),
        (F16, 80, {}, True),
        (BF16, 72, {}, True),
        (F16, 16, {}, False),
        (F16, 65, {}, False),
        (F16, 64, {"seq": (2, 32)}, False),
        (F16, 64, {"seq": (1, 1)}, False),
        (F16, 64, {"precision": "exact"}, False),
        (F16, 64, {"bf16_tiles": False}, True),
        (F16, 64, {"bf16_dots": False}, False),
    ],
)
def test_attention_over_caches_of_16_bits_multiplies_bf16(
    cache: DType, width: int, changes: dict[str, Any], expected: bool
) -> None:
    q = G.input("q", [SEQ, 4, width])
    keys, values = (G.state(name, [2, CTX, width], cache) for name in ("k", "v"))
    options = replace(Options(seq=(33, 512)), **changes)
    linears = {dtype: ops.linear(G.input("x", [SEQ, 32]), G.weight("w", [8, 32], dtype)) for dtype in (Q8_0, F32)}
    for scale, dtype, bears in ((width**-0.5, Q8_0, True), (width**-0.5, F32, False), (1.0, Q8_0, False)):
        graph = Graph(outputs={"y": ops.attention(q, keys, values, scale=scale), "z": linears[dtype]})
        (node,) = (n for n in quantize(graph, options).nodes() if n.op == "attention")
        assert node["bf16"] is (expected and bears)
    allowed = ops.attention(q, keys, values, scale=1.0, any_scale=True)
    graph = Graph(outputs={"y": allowed, "z": linears[Q8_0]})
    (node,) = (n for n in quantize(graph, options).nodes() if n.op == "attention")
    assert (node["bf16"], node["any_scale"]) == (expected, False)
