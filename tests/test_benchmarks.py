"""The benchmark scripts: arguments, statistics, tables, the page they write, the line protocol between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rlx

FOLDER = Path(__file__).parent.parent / "benchmarks"

PEER = """
import ctypes, time
from types import SimpleNamespace
__version__ = "0"
llama_token, vocab, counted = ctypes.c_int32, {vocab}, [0]
def say(text):
    with open({log!r}, "a") as file:
        file.write(text + "\\n")
def nothing(*_):
    return 0
llama_log_set = llama_backend_init = llama_synchronize = llama_memory_clear = llama_free = nothing
llama_model_is_hybrid = llama_model_is_recurrent = llama_get_memory = llama_model_get_vocab = nothing
llama_log_callback = lambda function: function
llama_model_default_params = llama_context_default_params = SimpleNamespace
llama_model_load_from_file = lambda path, params: 1
llama_vocab_n_tokens = lambda v: vocab
llama_model_n_ctx_train = lambda model: 1024
llama_print_system_info = lambda: b"x"
llama_memory_seq_rm = lambda *_: True
def llama_init_from_model(model, params):
    say(f"context threads {{params.n_threads}} flash {{params.flash_attn_type}}")
    return 1
def llama_batch_get_one(tokens, n):
    return n
def llama_decode(context, n):
    time.sleep(1e-4)
    counted[0] += n
    return 0
def llama_get_logits_ith(context, at):
    logits = (ctypes.c_float * vocab)()
    logits[counted[0] % vocab] = 1.0
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
class Llama:
    def __init__(self, n_threads, n_threads_batch, **_):
        say(f"Llama threads {{n_threads}}")
    def reset(self):
        pass
    def generate(self, ids, temp):
        while True:
            yield 7
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = __import__(name)
    assert isinstance(found, ModuleType)
    return found


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("report", monkeypatch)


@pytest.fixture
def versus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("versus", monkeypatch)


@pytest.fixture
def side() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(FOLDER / "rlx_side.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child


# -- statistics -----------------------------------------------------------------------------------------------------


def test_ratios_of_medians_and_of_pairs_are_different_things(report: ModuleType) -> None:
    ours, theirs = report.Series(512, [1.0, 2.0, 4.0]), report.Series(512, [3.0, 4.0, 4.0])
    assert ours.rate == 256 and ours.spread == (128, 512)
    assert report.ratio(ours, theirs) == 2.0
    assert report.paired_ratio(ours, theirs) == 2.0
    slow_machine = report.Series(512, [3.0, 2.0, 8.0])  # of the pairs 1/1, 1/2 and 2/1
    assert report.ratio(slow_machine, theirs) == 4 / 3
    assert report.paired_ratio(slow_machine, theirs) == 1.0


# -- tables ---------------------------------------------------------------------------------------------------------


# -- versus.py ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_whole_run_beside_a_peer(
    versus: ModuleType, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for llama_cpp that has its functions, counts instead of computing, and says how it was used."""
    (tmp_path / "llama_cpp.py").write_text(PEER.format(vocab=2048, log=str(tmp_path / "log")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(rlx.__file__).parent.parent)]))
    told, page = tmp_path / "all.json", tmp_path / "page.md"
    flags = ["--only", "prefill,decode,busy,demo", "--quick", "--repeat", "1", "--prefill", "4", "--decode", "0,16"]
    more = ["--tokens", "2", "--threads", "1", "--json", str(told), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", ["versus.py", str(demo_model), *flags, *more])
    monkeypatch.setattr(versus, "DEMO_TOKENS", 4)
    assert versus.main() == 0
    (found,) = json.loads(told.read_text())["models"]
    assert [row["name"] for row in found["measurements"]] == ["prefill 4", "decode at 0", "decode at 16"]
    for row in found["measurements"]:
        assert row["sides"].keys() == {"rlx", "llama.cpp"} and row["limit"]["rate"] > 0
        assert all(len(side["seconds"]) == 1 and side["giga_per_s"] > 0 for side in row["sides"].values())
    assert found["busy"]["beside"].keys() == {"rlx", "llama.cpp"} and "starts" not in found
    assert "llama.cpp: the same for 0, then another" in found["greedy"]
    used = set((tmp_path / "log").read_text().splitlines())
    assert used == {"context threads 1 flash 1", "context threads 1 flash 0", "Llama threads 1"}
    text = page.read_text()
    assert "| decode at 16 |" in text and "| kept | **" in text and "| 4 greedy tokens |" in text


# -- the sides ------------------------------------------------------------------------------------------------------


# -- machine.py -----------------------------------------------------------------------------------------------------


# -- scaling.py, replicas.py ----------------------------------------------------------------------------------------


def test_the_model_of_a_step_predicts_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = module("scaling", monkeypatch)
    found = [(depth, predicted / measured) for _, _, depth, measured, predicted in scaling.predictions()]
    assert all(abs(ratio - 1) < 0.15 for depth, ratio in found if depth == 80), "those of an idle machine"
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


# -- cold_start.py --------------------------------------------------------------------------------------------------
