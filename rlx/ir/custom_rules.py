"""The rewrite rules of custom ops: `fuses`, a formula in other ops, becomes a rule whose right side is the op.

The formula is built over variables for the operands. Each numeric attribute gets a value of its own, which is then
looked for in the formula and becomes a variable of the rule.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlx.errors import CustomOpError, RlxError
from rlx.ir import interp, ops
from rlx.ir.custom import CustomOp
from rlx.ir.dims import bind, value
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node, topological
from rlx.ir.op_table import REQUIRED
from rlx.ir.rules import AttrVar, Match, Rule, instantiate, var

_AXES = "RH"  # names of leading axes
_FLOAT, _INT = 0.0312509765, 7919  # values of attributes while the formula is built
#: Largest difference of op and formula in float64, as a share of the largest magnitude.
_CEILING = 1e-6


@lru_cache(256)
def rules_of(op: CustomOp) -> tuple[Rule, ...]:
    """The rules of an op, one for each number of leading axes: rows, and rows of heads.

    Raises:
        CustomOpError: the formula cannot be built, or computes something else than the op.
    """
    leading = op.rule is not None and any(value.leading for value in op.rule.operands)
    found = [_rule(op, axes) for axes in ((_AXES[:1], _AXES) if leading else ("",))]
    for rule in found:
        _compare(op, rule)
    return tuple(found)


@lru_cache(256)
def ops_of(op: CustomOp) -> frozenset[str]:
    """The ops of the formula."""
    nodes = topological([rule.before for rule in rules_of(op)])
    return frozenset(node.op for node in nodes if node.op not in LEAVES)


def _rule(op: CustomOp, leading: str) -> Rule:
    assert op.rule is not None and op.fuses is not None
    where = f"custom op {op.name}, fuses"
    variables = []
    for operand in op.rule.operands:
        axes = [ast.unparse(axis) for axis in operand.axes]
        shape = [*(leading if operand.leading else ""), *(int(a) if a.isdigit() else a for a in axes)]
        variables.append(var(operand.name, shape, operand.dtype))
    values = _values(op)
    try:
        before = op.fuses(*variables, **values)
        after = ops.make(op.name, *variables, **{name: _variable(op, name, v) for name, v in values.items()})
    except CustomOpError:
        raise
    except Exception as error:  # whatever a user's function raises
        what = error.what if isinstance(error, RlxError) else f"{type(error).__name__}: {error}"
        hint = "It gets nodes and attributes, and returns a node of rlx.ops."
        raise CustomOpError(f"the formula cannot be built: {what}", where=where, hint=hint) from error
    if not isinstance(before, Node) or before.op in LEAVES:  # type: ignore[redundant-expr]
        raise CustomOpError(f"it returns {before!r}, expected a node of other ops", where=where)
    before = _with_variables(before, {v: _variable(op, name, v) for name, v in values.items() if _varies(v)})
    found = {v.name for n in topological([before]) for _, v in n.attrs if isinstance(v, AttrVar)}
    lost = [name for name, v in values.items() if _varies(v) and name not in found]
    lost += [v.name for v in variables if v not in topological([before])]
    if lost:
        hint = "Each operand and each number stands in the formula as it is, not as part of a calculation in Python."
        raise CustomOpError(f"{', '.join(lost)} does not stand in the formula", where=where, hint=hint)
    return Rule(op.name, before, after)


def _values(op: CustomOp) -> dict[str, Any]:
    """A value for each attribute; numbers get ones that occur nowhere else."""
    found: dict[str, Any] = {}
    for i, (name, default) in enumerate(op.attributes.items()):
        if isinstance(default, float) or default is REQUIRED:
            found[name] = _FLOAT * (1 + i / 1024)
        else:
            found[name] = _INT + i if type(default) is int else default
    return found


def _varies(value: Any) -> bool:
    return type(value) in (int, float)


def _variable(op: CustomOp, name: str, value: Any) -> Any:
    return AttrVar(name, value) if _varies(value) else value


def _with_variables(node: Node, variables: dict[Any, AttrVar]) -> Node:
    """The formula with variables in place of the values of attributes."""
    if node.op in LEAVES:
        return node
    inputs = [_with_variables(i, variables) for i in node.inputs]
    attrs = {name: variables.get(v, v) if _varies(v) else v for name, v in node.attrs}
    return ops.make(node.op, *inputs, **attrs)


def _compare(op: CustomOp, rule: Rule) -> None:
    """Evaluates op and formula on random data; `CustomOpError` if they differ."""
    where = f"custom op {op.name}, fuses"
    leaves = {n.name: n for n in topological([rule.before, rule.after]) if n.op in LEAVES}
    sizes = {name: 2 + 2 * i for i, name in enumerate(sorted({s for n in leaves.values() for s in _symbols(n)}))}
    sized = {
        name: ops.leaf("input", name, tuple(bind(d, sizes) for d in n.shape), n.dtype) for name, n in leaves.items()
    }
    examples = {v.name: v.example for n in topological([rule.before]) for _, v in n.attrs if isinstance(v, AttrVar)}
    match = Match(nodes=sized, attrs=examples)
    try:
        graph = Graph(outputs={"op": instantiate(rule.after, match), "formula": instantiate(rule.before, match)})
        rng = np.random.default_rng(0)
        shapes = {n: [value(d, {}) for d in n.shape] for n in sized.values()}
        feeds = {n.name: rng.integers(0, 2, s) if n.dtype is I32 else rng.normal(size=s) for n, s in shapes.items()}
        found = interp.run(graph, feeds, dtype=np.float64)[0]
    except CustomOpError:
        raise
    except RlxError as error:
        raise CustomOpError(f"op and formula cannot be compared: {error}", where=where) from error
    ours, theirs = found["op"], found["formula"]
    if ours.shape != theirs.shape:
        raise CustomOpError(f"the op gives {list(ours.shape)}, the formula {list(theirs.shape)}", where=where)
    worst = np.abs(ours - theirs).max(initial=0.0)
    if not worst <= _CEILING * max(1e-300, np.abs(theirs).max(initial=0.0)):
        at = np.unravel_index(int(np.nan_to_num(np.abs(ours - theirs), nan=np.inf).argmax()), ours.shape)
        what = f"the op gives {ours[at]:.8g} at {[int(i) for i in at]}, the formula {theirs[at]:.8g}"
        raise CustomOpError(what, where=where, hint="The formula must compute the same as the meaning.")


def _symbols(node: Node) -> Sequence[str]:
    return [name for dim in node.shape if not isinstance(dim, int) for name, _ in dim.terms]
