"""Rewriting with a report: the rules of a pass, what they rewrote, and what they missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.ir.graph import Graph
from rlx.ir.rules import OFF, Rule, misses, rewrite
from rlx.passes.report import Log


def rewrite_logged(
    graph: Graph, rules: Sequence[Rule], log: Log, off: Mapping[str, Sequence[Rule]] | None = None
) -> Graph:
    """Applies the rules until none matches.

    Args:
        off: rules that are left out, by the name of their group: where they would match is noted as missed.
    """
    after = rewrite(graph, rules, lambda rule, name: log.done(rule.name, name))
    names = after.names()
    for rule, node, reason in misses(after, rules):
        log.missed(rule.name, names[node], reason)
    for group, left_out in (off or {}).items():
        for rule, node, reason in misses(after, left_out):
            if reason == OFF:
                log.missed(rule.name, names[node], f'the group "{group}" is off')
    return after
