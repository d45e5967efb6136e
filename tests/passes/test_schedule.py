"""Schedule: independent work shares a region, equal layers have equal regions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import toy
from hypothesis import given
from ir.random_graphs import graphs

from rlx.ir import ops
from rlx.ir.dims import CTX, PAST_SEQ, SEQ
from rlx.ir.dtypes import F16, F32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities, Layouts
from rlx.passes.layout import layout
from rlx.passes.options import FUSIONS, Options
from rlx.passes.program import Program, is_work
from rlx.passes.schedule import schedule, shared_because, signature

DECODE, FEW, PREFILL, EXACT = Options(), Options(seq=(2, 16)), Options(seq=(2, 512)), Options(precision="exact")
G, HERE = Graph(), Capabilities()
X, ROW = G.input("x", [SEQ, 64]), G.input("row", [1, 64])
ALONE = tuple(f for f in FUSIONS if f != "prologue")  # everything has a region of its own


def lower(family: str, options: Options, **changes: object) -> Program:
    return pipeline.lower(toy.build(toy.FAMILIES[family].but(**changes)), options)


def check_independent(program: Program) -> None:
    """What a node reads was made in an earlier region, or by the worker itself in its prologue; no work is missing."""
    made: set[Node] = set()
    for prologue, region in zip(program.prologues, program.regions, strict=True):
        assert region
        replicated: set[Node] = set()
        for node in (*prologue, *region):
            assert {maker(i) for i in node.inputs if is_work(maker(i))} <= made | replicated
            replicated |= {node} & set(prologue)
        made |= set(region)
    work = [n for region in program.regions for n in region]
    assert len(work) == len(set(work))
    assert set(work).union(*program.prologues) == {n for n in program.graph.nodes() if is_work(n)}


def maker(node: Node) -> Node:
    return maker(node.inputs[0]) if node.op == "reshape" else node


@pytest.mark.parametrize("family", toy.FAMILIES)
@pytest.mark.parametrize("options", [DECODE, FEW, PREFILL, EXACT], ids=["decode", "few", "prefill", "exact"])
def test_the_nodes_of_a_region_are_independent(family: str, options: Options) -> None:
    check_independent(lower(family, options))


@given(graphs())
def test_the_nodes_of_a_region_are_independent_in_random_graphs(graph: Graph) -> None:
    check_independent(schedule(graph))


@pytest.mark.parametrize(
    ("family", "options", "a_layer"),
    [
        # norm, qkv, rope and writes, attention, prepare, o, norm, gate and up, prepare, down
        ("llama", PREFILL, 10),
        ("qwen3", PREFILL, 10),
        ("qwen3", replace(EXACT, fusions=ALONE), 8),
        # two post norms and two residual additions more
        ("gemma", replace(DECODE, fusions=ALONE), 14),
        ("gemma", replace(EXACT, fusions=ALONE), 12),
        ("llama", Options(seq=(2, 16), fusions=()), 17),
        # qkv, rope and writes, attention, o, gate and up, down: of a row or a few the rest goes before them
        ("llama", DECODE, 6),
        ("llama", FEW, 6),
        ("gemma", FEW, 6),
        ("qwen2", DECODE, 6),
        ("qwen3", DECODE, 6),
        ("qwen3", EXACT, 6),
        ("gemma", DECODE, 6),
        ("gemma", EXACT, 6),
    ],
)
def test_regions_of_a_layer(family: str, options: Options, a_layer: int) -> None:
    counts = [len(lower(family, options, layers=n).regions) for n in (2, 3, 6)]
    assert [b - a for a, b in itertools.pairwise(counts)] == [a_layer, 3 * a_layer]


def test_what_lies_around_the_layers() -> None:
    """Embedding and angles before, norm and head after; a prefill copies last rows in two regions, and works on one row
    from there on.
    """
    assert len(lower("llama", DECODE, layers=2).regions) == 2 * 6 + 1
    assert len(lower("llama", replace(PREFILL, fusions=ALONE), layers=2).regions) == 1 + 2 * 10 + 2 + 2
    assert len(lower("llama", PREFILL, layers=2).regions) == 1 + 10 + 2 + 6 + 1


def test_what_a_region_reads_is_its_prologue() -> None:
    """What later regions read too, here the residual, is one of its units as well."""
    program = lower("gemma", DECODE)
    assert [n.op for n in program.prologues[0]] == ["embedding", "rms_norm"]
    assert [n.op for n in program.regions[0]] == ["embedding", "linear", "rope_angles", "linear", "linear"]
    # after the first layer's attention: the norm behind o, the residual, the norm before gate and up
    assert [n.op for n in program.prologues[4]] == ["rms_norm", "elementwise", "rms_norm"]
    assert [n.op for n in program.regions[4]] == ["elementwise", "linear"]
    assert program.regions[4][0] is program.prologues[4][1]


def test_a_prologue_reads_what_is_its_own() -> None:
    program = lower("gemma", DECODE)
    first, total, second = program.prologues[4]
    gated = program.regions[4][1]
    assert program.replicated is not None and program.operand(first, 4) == program.replicated[first]
    assert program.operand(total, 4) != program.operand(total, 5) == program.buffer(total)
    assert program.operand(gated.inputs[0], 4) == program.replicated[second]
    assert str(program.replicated[second]).startswith("private+")
    with pytest.raises(KeyError):
        program.buffer(second)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (ops.softmax(ROW), True),
        (ops.quantize(ROW), True),
        (ops.softmax(X), True),  # of 16 rows at most
        (ops.softmax(G.input("wide", [SEQ, HERE.own_cost_rows // 16])), False),
        (ops.softmax(G.input("wide", [1, HERE.own_cost_rows // 16])), True),
        (ops.softmax(G.input("any", [PAST_SEQ, 64])), False),  # as many as there may be
        (ops.softmax(G.input("long", [1, HERE.own_cost])), False),
        (ops.linear(ROW, G.weight("w", [8, 64])), False),
    ],
)
def test_a_worker_computes_for_itself_what_is_small(node: Node, expected: bool) -> None:
    assert (OPS[node.op].in_prologue and not shared_because(node, {"SEQ": (2, 16)}, HERE)) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equal_layers_have_equal_signatures(family: str) -> None:
    alone = lower(family, replace(DECODE, fusions=ALONE), layers=6)
    signatures = [signature(r) for r in alone.regions]
    layers = [tuple(signatures[1 + 10 * i : 11 + 10 * i]) for i in range(6)]
    assert len(set(layers)) == 1
    # A layer's ten regions are nine functions: both norms are one. The head's norm is that one too.
    assert len(set(signatures)) == 1 + 9 + 1
    program = lower(family, DECODE, layers=6)
    pairs = [(signature(a), signature(b)) for a, b in zip(program.prologues, program.regions, strict=True)]
    assert len({tuple(pairs[6 * i : 6 * i + 6]) for i in range(1, 6)}) == 1


def test_a_signature_sees_dtypes_shapes_attributes_and_layouts() -> None:
    def linear(dtype: object = F32, n: int = 8, x: Node = X) -> tuple[Node, ...]:
        return (ops.linear(x, G.weight("w", [n, 64], dtype)),)

    base = signature(linear())
    assert base == signature((ops.linear(G.input("other", [SEQ, 64]), G.weight("another", [8, 64])),))
    assert base != signature(linear(F16)) and base != signature(linear(n=16))
    assert base != signature(linear(x=G.input("x", [1, 64])))
    assert base != signature(linear() * 2)
    packed = layout(Graph(outputs={"y": linear()[0]}), Options()).outputs["y"]
    assert signature((packed,)) != base
    q = G.input("q", [SEQ, 4, 16])
    caches = [G.state(n, [2, CTX, 16]) for n in "kv"]
    tiles = Capabilities(layouts=Layouts(keys="tiles", tile=16))
    plain = ops.attention(q, *caches, scale=1.0)
    tiled = layout(Graph(outputs={"y": plain}), Options(capabilities=tiles)).outputs["y"]

    assert signature((plain,)) != signature((tiled,))
    assert signature((plain,)) != signature((ops.attention(q, *caches, scale=2.0),))
