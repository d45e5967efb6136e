"""The benchmark scripts: their statistics, and what they predict. `test_scripts.py` runs them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = __import__(name)
    assert isinstance(found, ModuleType)
    return found


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("report", monkeypatch)


# -- statistics -----------------------------------------------------------------------------------------------------


def test_ratios_of_medians_and_of_pairs_are_different_things(report: ModuleType) -> None:
    ours, theirs = report.Series(512, [1.0, 2.0, 4.0]), report.Series(512, [3.0, 4.0, 4.0])
    assert ours.rate == 256 and ours.spread == (128, 512)
    assert report.ratio(ours, theirs) == 2.0
    assert report.paired_ratio(ours, theirs) == 2.0
    slow_machine = report.Series(512, [3.0, 2.0, 8.0])  # of the pairs 1/1, 1/2 and 2/1
    assert report.ratio(slow_machine, theirs) == 4 / 3
    assert report.paired_ratio(slow_machine, theirs) == 1.0


# -- scaling.py, replicas.py ----------------------------------------------------------------------------------------


def test_the_model_of_a_step_predicts_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = module("scaling", monkeypatch)
    found = [predicted / measured for *_, measured, predicted in scaling.predictions()]
    assert found and all(abs(ratio - 1) < 0.15 for ratio in found)
    fewer, more = (scaling.QWEN3_30B.weights(rows) for rows in (1, 64))
    assert fewer < more < scaling.QWEN3_30B.dense + scaling.QWEN3_30B.experts


def test_simulated_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request ends, after its first token; a router that knows prefixes finds more of them in caches."""
    replicas, cached = module("replicas", monkeypatch), {}
    machine, model = replicas.ASSUMED["64 cores"], replicas.MODELS["8B"]
    for name, router in replicas.ROUTERS.items():
        requests, rng = replicas.synthetic(100, 3, seed=1), replicas.random.Random(1)
        some = [replicas.Replica(model, machine, capacity=400) for _ in range(8)]
        cached[name] = replicas.simulate(requests, some, router(some, rng))
        assert len(requests) > 100 and all(r.at < r.first < r.end for r in requests)
        assert all(len(each.cache) <= 400 and not each.load for each in some)
    assert 0 < cached["in turn"] < cached["prefix-aware"] < 1
