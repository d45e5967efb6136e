"""Experts on the CPU, the rest on a card: over a card on paper that computes (`paper_cards.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paper_cards
import pytest

import rlx
from rlx.backends import DeviceWarning
from rlx.backends.cuda.driver import Context
from rlx.backends.program import Observer, Program, StepLog
from rlx.engine.importance import importance
from rlx.engine.kv.pool import WORK
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.engine.programs.programs import ProgramSpec
from rlx.errors import ArgumentError, GraphError, ResourceError
from rlx.ir import ops
from rlx.passes.outline import experts_of, outline
from rlx.runners import Model
from rlx.store.cache import CompileCache
from rlx.store.store import Store
from rlx.weights import open_weights

OPTIONS: dict[str, Any] = {
    "precision": "exact", "max_seq": 64, "profile": {"buckets": {"seq": [1, 8]}}, "compile_ahead": False,
    "kv_bytes": 1 << 20, "device": "cuda",
}  # fmt: skip
IDS = [5, 9, 2, 7, 1, 30]
FAMILY = "qwen3moe"  # three layers with experts


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[paper_cards.PaperCards]:
    with paper_cards.computing(monkeypatch, 2) as found:
        yield found


def opened(goldens: Path, family: str = FAMILY, **options: Any) -> Model:
    return rlx.auto_runner(goldens / family / "hf", **{**OPTIONS, "cache": CompileCache(policy="off"), **options})


def planned(goldens: Path, **options: Any) -> Plan:
    with open_weights(goldens / FAMILY / "hf") as loader:
        return Plan.of(loader, EngineOptions(**{**OPTIONS, **options}))


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        (FAMILY, 2),
        ("gpt-oss", 99),  # biases of experts
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("deepseek-v3", "glm4-moe", "granitemoe-shared")),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("gemma4-moe", "granite-hybrid", "qwen3vl-moe")),
    ],
)
def test_a_model_computes_what_it_means(cards: paper_cards.PaperCards, goldens: Path, family: str, layers: int) -> None:
    """Prompts in several calls, tokens one by one and together, and a prefix that is known."""

    def results(**options: Any) -> list[Any]:
        with opened(goldens, family, **options) as runner:
            logits = runner.predict_logits(IDS * 2)
            alone = runner.generate(IDS[:4], 3, stop_at_eog=False)
            together = runner.generate_batch([IDS[:2], IDS[1:3]], 2, stop_at_eog=False)
            again = runner.generate([*IDS[:4], *alone], 2, stop_at_eog=False)
            return [logits, alone, together, again]

    found, expected = results(n_cpu_moe=layers), results(device="reference")
    assert np.abs(found[0] - expected[0]).max() <= 1e-4 * np.abs(expected[0]).max()
    assert found[1:] == expected[1:]
    assert cards.used == 0, "everything is freed"


@pytest.mark.slow
def test_a_call_of_many_rows(cards: paper_cards.PaperCards, goldens: Path) -> None:
    rows = {"profile": {"buckets": {"seq": [1, 128]}}, "max_seq": 128}
    ids = np.random.default_rng(0).integers(1, 60, 70).tolist()
    found = []
    for device in ({"n_cpu_moe": 1}, {"device": "reference"}):
        with opened(goldens, **rows, **device) as runner:
            found.append(runner.predict_logits(ids))
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * np.abs(found[1]).max()


def test_a_session_moves_between_devices(cards: paper_cards.PaperCards, goldens: Path) -> None:
    """It is the same model, wherever its experts are."""
    with opened(goldens, n_cpu_moe=1) as runner:
        runner.prefill_logits(IDS)
        snapshot = runner.snapshot()
    with opened(goldens, device="cpu") as runner:
        runner.restore(snapshot)
        moved = runner.decode_logits(7)
        runner.prefill_logits(IDS)
        expected = runner.decode_logits(7)
    assert np.abs(moved - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_step_is_recorded_in_pieces(cards: paper_cards.PaperCards, goldens: Path) -> None:
    """The host comes between them, in steps with clocks, too; layers share its program, and its name in the report."""
    with opened(goldens, n_cpu_moe=2) as runner:
        engine, ids = runner._engine, IDS[:3]
        sequence = engine.open_sequence()
        plain = [engine.append(sequence, [token]).copy() for token in ids]
        (program,) = [each for spec, each in engine.tables["decode"].programs.items() if spec.returns == "last"]
        assert len(program._host.pieces) in (4, 5) and "loop" not in program.manifest
        assert len({id(each.args[0]) for each in program.called}) == 1
        assert cards.calls.count("cuGraphLaunch") > len(ids)
        logs = _Logs()
        program.observe(logs)
        clocked = engine.open_sequence(shared=False)
        for token, logits in zip(ids, plain, strict=True):
            np.testing.assert_array_equal(engine.append(clocked, [token]), logits)
        assert logs.shapes == [(1, 1, len(program.manifest["regions"]) + 1)] * len(ids)
        assert all(map(cards.has_recorded, program._steps[0]._clocked[1]._events)), "each region has an end"
        shown = runner.programs["decode"]
        assert sum(name.startswith("host_") for name in shown.kernels) == 1
        assert "expert_linear" in shown.source("host_") and "in the memory of the host" in str(shown.explain())


def test_a_step_that_fails_in_its_middle(
    cards: paper_cards.PaperCards, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is done with the inputs, the sequence has what it had, and the next step computes what it means; with
    clocks, too.
    """
    with opened(goldens, n_cpu_moe=2) as runner:
        engine, events, usual_wait = runner._engine, list[str](), Context.wait_for
        first = engine.open_sequence()
        expected = [engine.append(first, [token]).copy() for token in IDS[:3]]
        program = next(iter(engine.tables["decode"].programs.values()))

        def fails(*values: object) -> None:
            events.append("error")
            raise ResourceError("no memory", where="device cpu")

        def wait_for(card: Context, event: Any) -> None:
            events.append("wait")
            usual_wait(card, event)

        monkeypatch.setattr(Context, "wait_for", wait_for)
        for clocks in (False, True):
            if clocks:
                program.observe(_Logs())
            sequence, usual = engine.open_sequence(shared=False), program.called
            np.testing.assert_array_equal(engine.append(sequence, IDS[:1]), expected[0])
            for called in ([fails, *usual[1:]], [*usual[:1], fails]):
                monkeypatch.setattr(program, "called", called)
                with pytest.raises(ResourceError, match="device cpu: no memory"):
                    engine.append(sequence, IDS[1:2])
                assert events[-2:] == ["error", "wait"] and len(sequence) == 1
            monkeypatch.setattr(program, "called", usual)
            for number in (1, 2):
                np.testing.assert_array_equal(engine.append(sequence, [IDS[number]]), expected[number])


class _Logs(Observer):
    """The shapes of the clocks of steps."""

    logs = True

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def after(self, program: Program, seconds: float, steps: int) -> None:
        return

    def logged(self, program: Program, log: StepLog) -> None:
        self.shapes.append(log.read().times.shape)


# -- which experts -----------------------------------------------------------------------------------------------------


def test_the_last_layers_go_to_the_cpu_as_far_as_needed(cards: paper_cards.PaperCards, goldens: Path) -> None:
    two = planned(goldens, n_cpu_moe=2)
    assert two.cpu_experts.weights == {
        f"blk.{layer}.ffn_{name}_exps.weight" for layer in (1, 2) for name in ("gate", "up", "down")
    }
    all_on_card = planned(goldens, n_cpu_moe=0).weight_bytes
    assert planned(goldens).cpu_experts.n == 0, "everything fits"
    cards.total = two.weight_bytes + (1 << 20) + WORK
    with pytest.warns(DeviceWarning, match=r"the experts of 2 of 3 layers.*n_cpu_moe=2"):
        plan = planned(goldens)
    assert plan.cpu_experts.n == 2 and plan.weight_bytes == two.weight_bytes < all_on_card
    with pytest.warns(DeviceWarning), opened(goldens) as runner:
        stats = runner.stats()
        assert stats["n_cpu_moe"] == 2 and stats["host_weights_bytes"] > 0
        assert stats["weights_bytes"] <= two.weight_bytes
    with pytest.raises(ResourceError, match=r"lacks .* of the device's memory.*Give n_cpu_moe=2"):
        opened(goldens, n_cpu_moe=1)
    with pytest.warns(DeviceWarning, match="2 of 3"), opened(goldens, device="auto") as runner:
        assert runner.device == "cuda"
    cards.total = WORK
    with pytest.warns(DeviceWarning), pytest.raises(ResourceError, match='choose device="cpu"'):
        opened(goldens)
    with pytest.warns(DeviceWarning, match="the CPU computes: "), opened(goldens, device="auto", n_cpu_moe=3) as runner:
        assert runner.device == "cpu"


def test_packed_weights_of_both_are_kept(
    cards: paper_cards.PaperCards, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        with opened(goldens, n_cpu_moe=1, keep_packed=True, cache=None) as runner:
            found.append(runner.generate(IDS[:1], 2, stop_at_eog=False))
            stats = runner.stats()
            assert stats["kept_bytes"] > runner._engine._tensors.kept_bytes and stats["host_weights_bytes"] == 0
    assert found[0] == found[1]
    assert len(list(tmp_path.rglob("weights.bin"))) == 2


def test_what_is_compiled_is_compiled_for_both(
    cards: paper_cards.PaperCards, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing is, and the model opens where nothing may be."""
    store = Store(tmp_path)
    with opened(goldens, n_cpu_moe=1, cache=CompileCache(store=store), load=False) as runner:
        runner._engine.compile(batch=2)
        assert len({each.title for each in runner.stats()["compiled"]}) > 5
    with opened(goldens, n_cpu_moe=1, cache=CompileCache(store=store, policy="readonly")) as runner:
        runner.generate(IDS[:2], 2, stop_at_eog=False)
        assert runner.stats()["compiled"] == []


def test_a_program_of_the_card_alone_is_not_enough(
    cards: paper_cards.PaperCards, goldens: Path, tmp_path: Path
) -> None:
    """Of a cache that lost what the CPU computes, this is compiled ahead, too."""
    store, spec = Store(tmp_path), ProgramSpec((1, 1))
    with opened(goldens, n_cpu_moe=1, cache=CompileCache(store=store), load=False) as runner:
        runner._engine.compile(phase="decode")
        lost = {each.digest for each in runner._engine._host.compiler.compiled if each.title.startswith("program")}
    for digest in lost:
        store.remove(digest)
    with opened(goldens, n_cpu_moe=1, cache=CompileCache(store=store), load=False) as runner:
        runner._engine._programs.compile_missing(spec)
        assert lost and {each.digest for each in runner.stats()["compiled"]} == lost


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "reference", "cuda:0,1"])
def test_a_device_that_computes_all_of_a_model(cards: paper_cards.PaperCards, goldens: Path, device: str) -> None:
    with pytest.raises(ArgumentError, match=f"n_cpu_moe: .* one NVIDIA card, and the device is '{device}'"):
        opened(goldens, device=device, n_cpu_moe=1)


def test_a_model_without_experts(cards: paper_cards.PaperCards, goldens: Path) -> None:
    with pytest.raises(ArgumentError, match="n_cpu_moe: the model has no experts"):
        opened(goldens, "qwen3", n_cpu_moe=1)


def test_without_a_card_auto_is_the_cpu(cards: paper_cards.PaperCards, goldens: Path) -> None:
    cards.count = 0
    with pytest.warns(DeviceWarning), opened(goldens, device="auto", n_cpu_moe=1, load=False) as runner:
        assert runner.device == "cpu" and runner.stats()["n_cpu_moe"] == 0


def test_what_does_not_work_with_it_is_named(
    cards: paper_cards.PaperCards, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(goldens, n_cpu_moe=1) as runner, pytest.raises(ArgumentError, match="not seen"):
        importance(runner._engine, IDS, 4)
    monkeypatch.setenv("RLX_VERIFY", "1")
    with pytest.raises(ArgumentError, match="RLX_VERIFY: what two devices compute"):
        opened(goldens, n_cpu_moe=1)


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_experts_that_something_else_reads_stay() -> None:
    graph = rlx.Graph("mixture")
    x, weight = graph.input("x", [rlx.SEQ, 32]), graph.weight("experts", [4, 32, 32])
    scores = ops.softmax(ops.linear(x, graph.weight("router", [4, 32])))
    ids = ops.top_k(scores, 2)
    y = ops.expert_linear(x, ids, weight)
    mixed = ops.mix(y, ops.reshape(ops.take(scores, ids), [rlx.SEQ, 1, 2]))
    graph.output("mixed", ops.reshape(mixed, [rlx.SEQ, 32]))
    (found,) = experts_of(graph)
    assert found.weights == ["experts"] and [node.op for node in found.nodes] == ["expert_linear", "mix"]
    (call,) = [node for node in outline(graph, ["experts"]).nodes() if node.op == "call"]
    assert [i.op for i in call.inputs] == ["input", "top_k", "reshape", "weight"]
    graph.output("all", y)
    assert not experts_of(graph)
    with pytest.raises(GraphError, match="experts cannot be taken out: experts"):
        outline(graph, ["experts"])
