"""Fuse: joins ops, so that values between them never reach memory and there are fewer barriers.

- Gate, activation and up of a feed-forward block become one linear. Biases and residual adds join their linear.
- A norm and the quantization of its result become one op. Gated linears, attention and elementwise ops round their own
  result to bf16.
- Rope takes the head norm before it and the cache write after it.
- A chain of elementwise ops becomes one op.
- A greedy choice joins the head, which then writes no logits.
- Before all of these, custom ops replace the formulas that they fuse.

Linears that share an input (Q, K and V) need no rule. They share one quantized activation, because equal nodes are one
node, and the schedule puts them into one parallel region.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from rlx.ir import ops
from rlx.ir.custom import custom_ops
from rlx.ir.custom_rules import rules_of
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.infer import expression_size, renumber
from rlx.ir.node import Node
from rlx.ir.rules import AttrVar, Rule, state_var, var
from rlx.passes.options import Options
from rlx.passes.report import SILENT, Log, rewrite_logged

_x, _w, _u = var("x", ["R", "K"]), var("w", ["N", "K"]), var("u", ["N", "K"])
_free = frozenset({"x", "w", "u"})
_eps, _style, _tiles = AttrVar("eps", 1e-6), AttrVar("style", "neox"), AttrVar("tiles", False)
_at, _cache, _wrap = AttrVar("at", 2), AttrVar("dtype", "f32"), AttrVar("wrap", False)


def _linear(*inputs: Node, **attrs: Any) -> Node:
    return ops.make("linear", *inputs, **attrs)


def _gated(act: str) -> Rule:
    before = ops.mul(ops.make(act, _linear(_x, _w)), _linear(_x, _u))
    return Rule(f"gated-{act}", before, _linear(_x, _w, _u, gated=act), _free)


def _gated_experts(act: str) -> Rule:
    ids, w, u = var("ids", ["R", "S"], I32), var("w", ["E", "N", "K"]), var("u", ["E", "N", "K"])
    gate, up = (ops.make("expert_linear", _x, ids, weight, tiles=_tiles) for weight in (w, u))
    after = ops.make("expert_linear", _x, ids, w, u, gated=act, tiles=_tiles)
    return Rule(f"gated-experts-{act}", ops.mul(ops.make(act, gate), up), after, _free)


def _bias() -> Rule:
    b = var("b", ["N"])
    return Rule("linear-bias", ops.add(_linear(_x, _w), b), _linear(_x, _w, b, bias=True), _free)


def _residual(bias: bool) -> Rule:
    r, b = var("r", ["R", "N"]), [var("b", ["N"])] if bias else []
    before = ops.add(r, _linear(_x, _w, *b, bias=bias))
    return Rule(f"residual{'-bias' * bias}", before, _linear(_x, _w, *b, r, bias=bias, residual=True), _free)


def _norm_quantize(norm: str, operands: tuple[str, ...], out: str) -> Rule:
    x = [var("x", ["R", "K"]), *(var(name, ["K"]) for name in operands)]
    before = ops.quantize(ops.make(norm, *x, eps=_eps), out)
    name = f"{_NORM_NAMES[norm]}-{out}{'' if operands else '-plain'}{'-bias' * ('bias' in operands)}"
    return Rule(name, before, ops.make(norm, *x, eps=_eps, out=out))


_NORM_NAMES = {"rms_norm": "norm", "layer_norm": "layer-norm"}
#: Norms, and their operands after the rows.
_NORMS = (
    *(("rms_norm", operands) for operands in ((), ("weight",))),
    *(("layer_norm", operands) for operands in ((), ("weight",), ("weight", "bias"))),
)


def _gated_rounded() -> Rule:
    gated = AttrVar("gated", "silu")
    after = _linear(_x, _w, _u, gated=gated, out="bf16")
    return Rule("gated-bf16", ops.quantize(_linear(_x, _w, _u, gated=gated), "bf16"), after, _free)


def _attention_rounded(sinks: bool, visible: bool) -> Rule:
    operands: tuple[Node, ...] = var("q", ["R", "H", "D"]), var("k", ["G", "T", "D"]), var("v", ["G", "T", "D"])
    examples = {"scale": 0.5, "window": None, "softcap": None, "length": 5, "bf16": False}
    attrs: dict[str, Any] = {name: AttrVar(name, example) for name, example in examples.items()}
    if sinks:
        operands, attrs["sinks"] = (*operands, var("sinks", ["H"])), True
    if visible:
        operands, attrs["mask"] = (*operands, var("visible", ["R"], I32)), "visible"
    else:
        attrs["mask"] = AttrVar("mask", "causal")
    before = ops.quantize(ops.make("attention", *operands, **attrs), "bf16")
    after = ops.make("attention", *operands, **attrs, out="bf16")
    return Rule(f"attention{'-sinks' * sinks}{'-visible' * visible}-bf16", before, after, frozenset({"k", "v"}))


def _norm_rope() -> Rule:
    x, w, angles = var("x", ["R", "H", "D"]), var("w", ["D"]), var("angles", ["R", "A"])
    before = ops.make("rope", ops.make("rms_norm", x, w, eps=_eps), angles, style=_style)
    return Rule("norm-rope", before, ops.make("rope", x, w, angles, style=_style, norm_eps=_eps))


def _rope_write(normed: bool) -> Rule:
    cache, x, angles = state_var("cache", ["H", "T", "D"]), var("x", ["R", "H", "D"]), var("angles", ["R", "A"])
    operands = [x, var("w", ["D"]), angles] if normed else [x, angles]
    rope: dict[str, Any] = {"style": _style, "norm_eps": _eps if normed else None}
    before = ops.make("kv_write", cache, ops.make("rope", *operands, **rope), at=_at, dtype=_cache, wrap=_wrap)
    after = ops.make("rope_kv_write", cache, *operands, **rope, at=_at, dtype=_cache, wrap=_wrap)
    return Rule(f"rope-kv-write{'-normed' * normed}", before, after, frozenset({"cache"}))


def _linear_pick(capped: bool) -> Rule:
    x, cap = var("x", [1, "K"]), AttrVar("cap", 2.0)
    before = ops.make("softcap", _linear(x, _w), cap=cap) if capped else _linear(x, _w)
    after = ops.make("linear_pick", x, _w, cap=cap if capped else None)
    return Rule(f"linear-pick{'-capped' * capped}", ops.pick(before), after, frozenset({"x", "w"}))


#: Terms of the expression of an elementwise op. An operand that an expression names twice doubles what joins it.
MAX_TERMS = 1 << 12

RULES: dict[str, tuple[Rule, ...]] = {
    "gated": tuple(rule(act) for act in ("silu", "gelu_tanh", "gelu_erf") for rule in (_gated, _gated_experts)),
    "bias": (_bias(),),
    "residual": (_residual(False), _residual(True)),
    "norm": (
        *(_norm_quantize(*norm, out) for out in ("q8a", "bf16") for norm in _NORMS),
        _gated_rounded(),
        *(_attention_rounded(sinks, visible) for sinks in (False, True) for visible in (False, True)),
    ),
    "rope": (_norm_rope(), _rope_write(False), _rope_write(True)),
    "pick": (_linear_pick(False), _linear_pick(True)),
}


def groups() -> dict[str, tuple[Rule, ...]]:
    """The rules of every group, those of custom ops first."""
    return {"custom": tuple(rule for op in custom_ops().values() if op.fuses for rule in rules_of(op)), **RULES}


def fuse(graph: Graph, options: Options, log: Log = SILENT) -> Graph:
    """Applies the chosen groups of rules, then joins chains of elementwise ops."""
    every = groups()
    custom = every["custom"]
    if "custom" in options.fusions and custom:
        graph = rewrite_logged(graph, custom, log)
    on = [rule for group, rules in RULES.items() if group in options.fusions for rule in rules]
    off = {group: rules for group, rules in every.items() if group not in options.fusions}
    graph = rewrite_logged(graph, on, log, off)
    return regions(graph, log, merge="elementwise" in options.fusions, rounds="norm" in options.fusions)


def regions(graph: Graph, log: Log = SILENT, *, merge: bool = True, rounds: bool = True) -> Graph:
    """Turns elementwise ops into `elementwise` nodes.

    With `merge`, an op joins its only reader if the shapes agree. With `rounds`, it rounds its result to bf16 if that
    is all that is read of it.
    """
    readers, names = graph.readers(), graph.names()
    sizes: dict[Node, int] = {}  # terms of the expressions, at most

    def refusal(operand: Node, node: Node) -> str | None:
        if not merge:
            return 'the group "elementwise" is off'
        if readers[operand] != 1:
            return f"%{names[operand]} is read {readers[operand]} times, by ops or as an output"
        if operand.shape != node.shape:
            return f"%{names[operand]} has another shape"
        return None if sizes[operand] * sizes[node] <= MAX_TERMS else "the expression would be too long"

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        if rounds and old.op == "quantize" and old["out"] == "bf16" and _is_region_for(old, inputs[0], readers):
            log.done("elementwise-bf16", names[old], f"with %{names[old.inputs[0]]}")
            return ops.rebuild(inputs[0], inputs[0].inputs, out="bf16")
        if not ops.OPS[old.op].elementwise:
            return ops.rebuild(old, inputs)
        sizes[old] = expression_size(old["expr"]) if old.op == "elementwise" else 2
        refusals = {o: refusal(o, old) for o in old.inputs if ops.OPS[o.op].elementwise}
        sizes[old] *= prod(sizes[o] for o, reason in refusals.items() if reason is None)
        for reason in filter(None, refusals.values()):
            log.missed("elementwise", names[old], reason)
        joined = [f"%{names[o]}" for o, reason in refusals.items() if reason is None]
        if joined:
            log.done("elementwise", names[old], f"with {', '.join(joined)}")
        return _region(old, inputs, [refusals.get(o, "no elementwise op") is None for o in old.inputs])

    return graph.map(visit)


def _is_region_for(reader: Node, operand: Node, readers: Mapping[Node, int]) -> bool:
    """Whether the operand of a node became an elementwise node that nothing else reads."""
    return operand.op == "elementwise" and readers[reader.inputs[0]] == 1


def _region(old: Node, inputs: tuple[Node, ...], inline: list[bool]) -> Node:
    operands: list[Node] = []
    arguments = [_absorb(n, inlined, operands) for n, inlined in zip(inputs, inline, strict=True)]
    if old.op == "elementwise":
        expr = renumber(old["expr"], arguments)
    else:
        expr = (old.op, *arguments, *(v for _, v in old.attrs))
    return ops.make("elementwise", *operands, expr=expr)


def _absorb(node: Node, inlined: bool, operands: list[Node]) -> Any:
    """The expression for one argument, with the operands it needs added to the region's."""
    if node.op == "elementwise" and inlined:
        numbers = [_operand(i, operands) for i in node.inputs]
        return renumber(node["expr"], numbers)
    return _operand(node, operands)


def _operand(node: Node, operands: list[Node]) -> int:
    if node not in operands:
        operands.append(node)
    return operands.index(node)
