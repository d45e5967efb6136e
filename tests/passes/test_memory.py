"""Memory: values that live at the same time lie apart, and the arena is much smaller than their sum."""

from __future__ import annotations

import itertools

import pytest
import toy
from hypothesis import given
from ir.random_graphs import graphs

from rlx.ir import ops
from rlx.ir.dims import SEQ, bounds
from rlx.ir.dtypes import F32, Q8A
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import pipeline
from rlx.passes.capabilities import Layouts
from rlx.passes.options import Options
from rlx.passes.program import Program, is_work

ALIGN = Layouts().align
ONE_ROW = Options(fusions=())
VIEWS = ("reshape", "kv_write", "rope_kv_write")
X = Graph().input("x", [SEQ, 64])


def home(node: Node) -> Node:
    """The node whose bytes a value has."""
    return home(node.inputs[0]) if node.op in VIEWS else node


def lifetimes(program: Program) -> dict[Node, set[int]]:
    """Value -> the moments at which its bytes must be there: -1 before the step, then one a region, then the end."""
    end = len(program.regions)
    made = {n: i for i, region in enumerate(program.regions) for n in region}
    read: dict[Node, list[int]] = {}
    for at, (prologue, region) in enumerate(zip(program.prologues, program.regions, strict=True)):
        for node in (*prologue, *region):
            for operand in map(home, node.inputs):
                if operand not in prologue:
                    read.setdefault(operand, []).append(at)
    for node in program.graph.outputs.values():
        read.setdefault(home(node), []).append(end)
    alive = {}
    for node in map(home, program.graph.nodes()):
        if node.op == "input":
            alive[node] = set(range(-1, end + 1))
        elif is_work(node) and node in made:  # what only workers themselves have has no place in the arena
            alive[node] = set(range(made[node], max(read[node]) + 1))
    return alive


def check_apart(program: Program) -> None:
    """Every pair of values, by brute force, byte ranges against lifetimes."""
    alive = list(lifetimes(program).items())
    for i, (a, when) in enumerate(alive):
        first = program.buffer(a)
        assert first.kind == "arena" and first.offset % ALIGN == 0
        assert first.nbytes == most_bytes(a, program)
        assert first.offset + first.nbytes <= program.arena
        for b, others in alive[:i]:
            second = program.buffer(b)
            apart = first.offset + first.nbytes <= second.offset or second.offset + second.nbytes <= first.offset
            assert apart or not when & others, (a, b)
    for prologue in program.prologues:
        check_replicated_apart(program, prologue)


def most_bytes(node: Node, program: Program) -> int:
    return node.dtype.size([bounds(d, program.graph.bounds)[1] for d in node.shape])


def check_replicated_apart(program: Program, prologue: tuple[Node, ...]) -> None:
    """The values of a prologue lie one after the other in a worker's memory."""
    end = 0
    for node in prologue:
        replicated = (program.replicated or {})[node]
        assert replicated.kind == "private" and replicated.offset % ALIGN == 0 and replicated.offset >= end
        assert replicated.nbytes == most_bytes(node, program)
        end = replicated.offset + replicated.nbytes
    assert end <= program.private


OPTIONS = {
    "decode": Options(),
    "prefill": Options(seq=(2, 16)),
    "exact": Options(seq=(2, 512), precision="exact"),
    "all rows": Options(seq=(2, 64), all_rows=True),
    "no fusion": Options(seq=(2, 64), fusions=()),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", toy.FAMILIES)
def test_values_that_live_together_lie_apart(family: str, options: Options) -> None:
    check_apart(pipeline.lower(toy.build(toy.FAMILIES[family].but(layers=3)), options))


def test_without_reuse_no_two_values_share_bytes() -> None:
    graph = toy.build(toy.FAMILIES["qwen3"].but(layers=3))
    program = pipeline.lower(graph, Options(seq=(2, 512), passes=("simplify", "last_row")))
    check_apart(program)
    buffers = [program.buffer(n) for n in lifetimes(program)]
    spans = sorted({(b.offset, b.offset + b.nbytes) for b in buffers})
    assert len(spans) > 20
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert program.arena > 3 * pipeline.lower(graph, Options(seq=(2, 512))).arena


@given(graphs())
def test_values_of_random_graphs_lie_apart(graph: Graph) -> None:
    check_apart(pipeline.lower(graph, Options(seq=(2, 8))))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_arena_does_not_grow_with_the_layers(options: Options) -> None:
    graphs = [toy.build(toy.FAMILIES["qwen3"].but(layers=n)) for n in (3, 12)]
    small, large = (pipeline.lower(g, options) for g in graphs)
    assert small.arena == large.arena
    total = sum(large.buffer(n).nbytes for n in lifetimes(large))
    assert large.arena < total / 8


def test_sizes_are_those_of_the_largest_call() -> None:
    graph = Graph(outputs={"y": ops.quantize(X)})
    program = pipeline.lower(graph, Options(seq=(2, 100), all_rows=True))
    found = {n.dtype: program.buffer(n).nbytes for n in program.graph.nodes()}
    assert found == {F32: 100 * 64 * 4, Q8A: 100 * 72}
    assert program.arena == 100 * 64 * 4 + 100 * 72


def test_a_place_is_used_again_when_its_value_is_dead() -> None:
    y = X
    for _ in range(20):
        y = ops.softmax(y)
    program = pipeline.lower(Graph(outputs={"y": y}), ONE_ROW)
    assert program.arena == 3 * 256  # the input, which stays, and two places in turn


def test_an_output_is_not_overwritten_in_its_step() -> None:
    first = ops.softmax(X)
    y = first
    for _ in range(5):
        y = ops.softmax(y)
    program = pipeline.lower(Graph(outputs={"first": first, "y": y}), ONE_ROW)
    kept = program.graph.outputs["first"]
    at = program.buffer(kept).offset
    assert [n for n in program.graph.nodes() if program.buffer(n).offset == at] == [kept]
