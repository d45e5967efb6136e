"""The whole pipeline: a lowered model means what the model means, for every family, phase and precision."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy
from hypothesis import assume, given
from hypothesis import strategies as st
from ir.random_graphs import ENV, INDICES, feeds, graphs

from rlx.backends.cpu.layouts import LAYOUTS
from rlx.errors import GraphError
from rlx.ir import interp, ops, text
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import BF16, F16, F32, Q4_K, Q8_0
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities
from rlx.passes.options import FUSIONS, PASSES, Options
from rlx.passes.program import Program
from rlx.passes.report import Log

GOLDEN = Path(__file__).parent / "golden"
CALLS = {  # name -> (rows, rows already there, options)
    "decode first token": (1, 0, Options()),
    "decode": (1, 6, Options()),
    "prefill": (5, 0, Options(seq=(2, 16))),
    "prefill chunk": (5, 3, Options(seq=(2, 16))),
    "prefill one row": (1, 3, Options(seq=(1, 16))),
    "prefill of a fixed size": (5, 3, Options(seq=(5, 5))),
    "all rows": (5, 3, Options(seq=(2, 16), all_rows=True)),
    "all rows of a fixed size": (5, 3, Options(seq=(5, 5), all_rows=True)),
    "prefill with tiles of bf16": (16, 0, Options(seq=(16, 64))),
    "prefill without dots of bf16": (5, 3, Options(seq=(2, 16), bf16_dots=False)),
}
VARIANTS = {
    **toy.FAMILIES,
    "float16 weights": toy.Toy(dtype=F16, cache=BF16),
    "bfloat16 weights": toy.Toy(dtype=BF16),
    "float32 everywhere": toy.Toy(dtype=F32, cache=F32),
    "one kv head, gated gelu": toy.Toy(kv_heads=1, activation=ops.gelu_erf, windows=(2,)),
    "wide blocks": toy.Toy(layers=1, width=256, hidden=256, heads=8, dtype=Q4_K),
    "one layer, no bells": toy.Toy(layers=1, tied=False),
}


def results(graph: Graph, lowered: Graph, seq: int, past: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(expected, found) of the logits and of each state, in float64."""
    arrays, env = toy.feeds(graph, seq=seq, past=past)
    want, states = interp.run(graph, arrays, env, dtype=np.float64)
    have, new_states = interp.run(lowered, arrays, env, dtype=np.float64)
    assert states.keys() == new_states.keys()
    logits = want["logits"][-len(have["logits"]) :]
    return [(logits, have["logits"]), *((states[name], new_states[name]) for name in states)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_programs_compute_what_the_graph_says(variant: str, call: str) -> None:
    graph = toy.build(VARIANTS[variant])
    seq, past, options = CALLS[call]
    program = pipeline.lower(graph, replace(options, precision="exact"))
    pairs = results(graph, program.graph, seq, past)
    assert len(pairs[0][1]) == (seq if options.all_rows else 1)
    for want, have in pairs:
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_auto_programs_come_close(variant: str, call: str) -> None:
    graph = toy.build(VARIANTS[variant])
    seq, past, options = CALLS[call]
    program = pipeline.lower(graph, options)
    dtype = VARIANTS[variant].dtype
    rounded = dtype.is_quantized or (dtype in (BF16, F16) and options.bf16_dots) or options.bf16_tiles
    for want, have in results(graph, program.graph, seq, past):
        want, have = want.reshape(len(want), -1), have.reshape(len(have), -1)
        cosine = (want * have).sum(-1) / np.linalg.norm(want, axis=-1) / np.linalg.norm(have, axis=-1)
        assert cosine.min() > 0.999
        assert rounded or np.abs(want - have).max() < 1e-12 * np.abs(want).max()


@pytest.mark.parametrize("missing", PASSES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_every_pass_may_be_left_out(family: str, call: str, missing: str) -> None:
    graph = toy.build(toy.FAMILIES[family])
    seq, past, options = CALLS[call]
    program = pipeline.lower(graph, replace(options, precision="exact", passes=tuple({*PASSES} - {missing})))
    pairs = results(graph, program.graph, seq, past)
    assert len(pairs[0][1]) == (seq if options.all_rows else 1)
    for want, have in pairs:
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("fusion", [(), *((f,) for f in FUSIONS), *(tuple(set(FUSIONS) - {f}) for f in FUSIONS)])
@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_every_set_of_fusions_means_the_same(family: str, fusion: tuple[str, ...]) -> None:
    graph = toy.build(toy.FAMILIES[family])
    program = pipeline.lower(graph, Options(seq=(2, 16), precision="exact", fusions=fusion))
    for want, have in results(graph, program.graph, 4, 2):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-12 * np.abs(want).max())


@st.composite
def choices(draw: st.DrawFn) -> tuple[Options, dict[str, int]]:
    """Options, and the values of the symbols of a call that they allow."""
    seq = draw(st.sampled_from([(1, 1), (3, 3), (2, 8), (1, 64)]))
    env = {**ENV, "SEQ": min(3, seq[1])}
    fusions = tuple(f for f in FUSIONS if draw(st.booleans()))
    passes = tuple(p for p in PASSES if draw(st.booleans()))
    return Options(precision="exact", seq=seq, all_rows=draw(st.booleans()), fusions=fusions, passes=passes), env


def lowered(graph: Graph, options: Options) -> Program:
    """The program; a random graph that uses one cache for keys and values is passed over, as it cannot be laid out."""
    try:
        return pipeline.lower(graph, options)
    except GraphError as error:
        assume("serves as keys and as values" not in str(error))
        raise


@given(graphs(skip=INDICES), choices())
def test_random_graphs_keep_their_meaning(graph: Graph, choice: tuple[Options, dict[str, int]]) -> None:
    options, env = choice
    program = lowered(graph, options)
    arrays = feeds(graph, env)
    want, _ = interp.run(graph, arrays, env, dtype=np.float64)
    have, _ = interp.run(program.graph, arrays, env, dtype=np.float64)
    for name, node in graph.outputs.items():
        rows = want[name] if node.shape[:1] != (SEQ,) or options.all_rows else want[name][-1:]
        assert have[name].shape == rows.shape
        np.testing.assert_allclose(have[name], rows, rtol=1e-9, atol=1e-9 * np.abs(rows).max())


def test_lowering_twice_gives_the_same_text() -> None:
    graph = toy.build(toy.FAMILIES["gemma"])
    assert str(pipeline.lower(graph, Options())) == str(pipeline.lower(graph, Options()))
    again = text.loads(text.dumps(graph)).replace(constants=graph.constants)
    assert str(pipeline.lower(again, Options())) == str(pipeline.lower(graph, Options()))


# --- the hook ---------------------------------------------------------------------------------------------------------


def test_the_text_of_every_stage_can_be_read_back() -> None:
    graph = toy.build(toy.FAMILIES["qwen3"], name="toy ü")
    texts: list[str] = []
    program = pipeline.lower(graph, Options(seq=(2, 16)), lambda stage, result: texts.append(str(result)))
    assert text.loads(texts[0]) == graph
    assert text.loads(texts[-3]) == program.graph
    assert texts[-1] == str(program)
    assert "arena+" in str(program) and "region 0:" in str(program)


def test_a_pass_that_breaks_the_graph_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(graph: Graph, options: Options, log: Log) -> Graph:
        return graph.replace(outputs={})

    phases = tuple((name, (*group, forget) if name == "algebra" else group) for name, group in pipeline.DECODE)
    monkeypatch.setattr(pipeline, "DECODE", phases)
    with pytest.raises(GraphError, match="the graph has no outputs"):
        pipeline.lower(toy.build(toy.FAMILIES["llama"]), Options())


# --- golden text ------------------------------------------------------------------------------------------------------


CPU = Capabilities(layouts=LAYOUTS)
PROGRAMS = {
    "decode": (Q8_0, Options(capabilities=CPU)),
    "prefill": (Q8_0, Options(seq=(2, 16), capabilities=CPU)),
    "prefill-bf16": (BF16, Options(seq=(2, 16), capabilities=CPU)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_text_of_a_program(program: str) -> None:
    """Run with RLX_UPDATE_GOLDEN=1 after a change that is meant to change programs, and read the diff."""
    dtype, options = PROGRAMS[program]
    found = str(pipeline.lower(toy.build(toy.FAMILIES["qwen3"].but(layers=1, dtype=dtype)), options))
    path = GOLDEN / f"qwen3-{program}.txt"
    if os.environ.get("RLX_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
