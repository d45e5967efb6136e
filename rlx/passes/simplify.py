"""Simplify: algebra that does not depend on the target. First, custom ops without a kernel become their meanings."""

from __future__ import annotations

from rlx import ir
from rlx.ir import ops
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.rules import AttrVar, Computed, Rule, var
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log, rewrite_logged

_a, _b = AttrVar("a", 0.5), AttrVar("b", 3.0)
_x = var("x", ["R", "K"])
_attention = {
    name: AttrVar(name, example)
    for name, example in {"window": None, "softcap": None, "length": 5, "mask": "causal", "any_scale": False}.items()
}


def _product(a: float, b: float) -> float:
    return a * b


def _scales() -> Rule:
    before = ops.make("scale", ops.make("scale", _x, by=_a), by=_b)
    return Rule("scale-scale", before, ops.make("scale", _x, by=Computed(_product, (_a, _b))))


def _scale_one() -> Rule:
    return Rule("scale-one", ops.scale(_x, 1.0), _x)


def _neg_neg() -> Rule:
    return Rule("neg-neg", ops.neg(ops.neg(_x)), _x)


def _silu() -> Rule:
    return Rule("silu", ops.mul(_x, ops.sigmoid(_x)), ops.silu(_x))


def _embedding_scale() -> Rule:
    table, ids = var("table", ["V", "K"]), var("ids", ["R"], I32)
    before = ops.make("scale", ops.make("embedding", table, ids, scale=_b), by=_a)
    after = ops.make("embedding", table, ids, scale=Computed(_product, (_a, _b)))
    return Rule("embedding-scale", before, after, frozenset({"table"}))


def _attention_scale() -> Rule:
    q, k, v = var("q", ["R", "H", "D"]), var("k", ["G", "T", "D"]), var("v", ["G", "T", "D"])
    before = ops.make("attention", ops.make("scale", q, by=_a), k, v, scale=_b, **_attention)
    after = ops.make("attention", q, k, v, scale=Computed(_product, (_a, _b)), **_attention)
    return Rule("attention-scale", before, after, frozenset({"k", "v"}))


RULES = (_scales(), _scale_one(), _neg_neg(), _silu(), _embedding_scale(), _attention_scale())


def would_change(graph: Graph) -> bool:
    """Whether a rule of the pass matches."""
    nodes = graph.nodes()
    present = {node.op for node in nodes}
    rules = [rule for rule in RULES if rule.needs <= present]
    return any(rule.before.op == node.op and rule.match(node) for node in nodes for rule in rules)


def simplify(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """Applies the algebraic rules until none matches, unless the options leave the pass out."""
    graph = traced(graph, log)
    if "simplify" not in options.passes:
        log.remark("left out by the options")
        return graph
    return rewrite_logged(graph, RULES, log)


def traced(graph: Graph, log: Log = SILENT) -> Graph:
    """The graph with the meanings of custom ops that have no kernel, as far as ops of rlx can compute them."""
    if not any(_is_open(node) for node in graph.nodes()):
        return graph
    names = graph.names()

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        new = ops.rebuild(old, inputs)
        if not _is_open(old):
            return new
        try:
            found = ir.tracing.meaning_of(new)
        except ir.tracing.Untraceable as error:
            log.missed("meaning", names[old], f"{old.op} has no kernel, and its meaning cannot be traced: {error}")
            return new
        log.done("meaning", names[old], f"of {old.op}, in ops that have kernels")
        return found

    return graph.map(visit)


def _is_open(node: Node) -> bool:
    custom = ops.OPS[node.op].custom
    return custom is not None and custom.kernel is None
