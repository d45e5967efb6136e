"""Reports of the passes: what was rewritten and where, what was missed and why, and that layers are folded."""

from __future__ import annotations

import pytest
import toy

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import BF16, F32, Q8_0
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.passes.report import Event, PassReport, fold


def reports(graph: Graph, options: Options) -> dict[str, PassReport]:
    found: list[PassReport] = []
    pipeline.lower(graph, options, reports=found)
    assert [report.name for report in found] == pipeline.names(options.phase)
    return {report.name: report for report in found}


def gated(*, shared: bool) -> Graph:
    """silu(x a) * (x b); with `shared`, x a is an output too."""
    graph = Graph("gated")
    x = graph.input("x", [SEQ, 32])
    a, b = (ops.linear(x, graph.weight(name, [32, 32])) for name in ("a.weight", "b.weight"))
    graph.output("y", ops.silu(a) * b)
    if shared:
        graph.output("again", a)
    return graph


def test_a_rewrite_is_reported_by_rule_and_value() -> None:
    fuse = reports(gated(shared=False), Options(seq=(2, 8), all_rows=True))["fuse"]
    assert fuse.done == (Event("gated-silu", "y"),) and not fuse.missed and fuse.changed


def test_a_second_reader_is_the_reason_of_a_miss() -> None:
    fuse = reports(gated(shared=True), Options(seq=(2, 8), all_rows=True))["fuse"]
    (missed,) = [event for event in fuse.missed if event.rule == "gated-silu"]
    assert missed.where == "y" and missed.detail == "%again is read 2 times, by ops or as an output"


@pytest.mark.parametrize(
    ("bias", "reason"),
    [([2, 32], "has 2 axes, the rule needs 1"), ([1], "has a dim of 1, the rule needs 32")],
)
def test_a_shape_is_the_reason_of_a_miss(bias: list[int], reason: str) -> None:
    graph = Graph("biased")
    y = ops.linear(graph.input("x", [2, 32]), graph.weight("a.weight", [32, 32]))
    graph.output("y", y + graph.input("bias", bias))
    fuse = reports(graph, Options(seq=(2, 8), all_rows=True, fusions=("bias",)))["fuse"]
    assert f"%bias {reason}" in [event.detail for event in fuse.missed if event.rule == "linear-bias"]


@pytest.mark.parametrize(
    ("dtype", "options", "rule", "reason"),
    [
        (Q8_0, Options(), "q8a activations", "q8_0 weights have integer codes"),
        (Q8_0, Options(precision="exact"), "rounded activations", "precision is exact"),
        (F32, Options(), "rounded activations", "the weights are f32"),
        (BF16, Options(), "rounded activations", "bf16 weights are read for one row: bf16 activations are no faster"),
        (BF16, Options(seq=(2, 8), all_rows=True), "bf16 activations", "bf16 weights"),
        (
            BF16,
            Options(seq=(2, 8), all_rows=True, bf16_dots=False),
            "rounded activations",
            "no bf16 dot products on the target, or turned off",
        ),
    ],
)
def test_the_choice_of_activations_has_a_reason(dtype: object, options: Options, rule: str, reason: str) -> None:
    quantize = reports(toy.build(toy.Toy(dtype=dtype)), options)["quantize"]  # type: ignore[arg-type]
    chosen = quantize.missed if rule.startswith("rounded") else quantize.done
    assert {(e.rule, e.detail) for e in chosen if e.rule.endswith("activations")} == {(rule, reason)}


def test_equal_layers_are_one_event() -> None:
    """Any number of layers makes a report of the same length."""
    texts = {n: reports(toy.build(toy.Toy(layers=n)), Options())["fuse"] for n in (2, 7)}
    assert [event.rule for event in texts[2].done] == [event.rule for event in texts[7].done]
    residual = [event for event in texts[7].done if event.rule == "residual"]
    assert [(event.where, event.count, event.layers) for event in residual] == [
        ("*.o.add", 7, tuple(range(7))),
        ("*.down.add", 7, tuple(range(7))),
    ]
    assert residual[0].place == "{0-6}.o.add"


def test_events_fold_by_the_number_of_a_layer() -> None:
    events = [Event("r", f"blk.{i}.q", f"%blk.{i}.k has 2 readers") for i in (0, 1, 3)]
    assert fold([*events, Event("r", "head"), Event("r", "blk.9.z.2")]) == (
        Event("r", "blk.*.q", "%blk.*.k has 2 readers", (0, 1, 3), 3),
        Event("r", "head"),
        Event("r", "blk.9.z.2"),
    )
    assert fold(events)[0].place == "blk.{0-1,3}.q"
    before = [Event("r", f"blk.{i}.q", f"%blk.{i - 1}.x.2 has 2 readers") for i in (1, 2)]
    assert fold(before) == (Event("r", "blk.*.q", "%blk.*-1.x.2 has 2 readers", (1, 2), 2),)
    assert fold([Event("r", "blk.1.q", "as %blk.2.q"), Event("r", "blk.2.q", "as %blk.2.q")])[0].count == 1
