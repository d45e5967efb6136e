"""Scripts that the documentation names run, on tiny sizes; others are loaded, and say what they need."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from pages import ROOT

#: Arguments that make a script quick. MODEL is the demo model.
TINY = {
    "benchmarks/batch.py": "MODEL --batches 1,2 --prompt 8 --tokens 2 --rounds 1 --threads 1",
    "benchmarks/cache_modes.py": "MODEL --tokens 2 --prompt 4 --threads 1 --only on",
    "benchmarks/delta_rule.py": "--rows 16 --seconds 0.01",
    "benchmarks/machine.py": "--threads 1",
    "benchmarks/prefix_reuse.py": "MODEL --prompt 40 --more 4 --answer 2 --runs 1",
    "benchmarks/replicas.py": "--replicas 2 --seconds 20",
    "benchmarks/scaling.py": "--depths 64",
    "benchmarks/speculative.py": "MODEL --tokens 4 --runs 1 --threads 1",
    "tools/demo/make_corpus.py": "--text -n 2",
    "tools/feature_matrix.py": "--list",
    "examples/custom_op.py": "--rows 4 --width 32 --repeats 1",
}
#: What is said where something is missing, or asked for that there is not.
REFUSES = {
    "benchmarks/arm_cost.py": ("", "--llama-cpp"),
    "benchmarks/big_model.py": ("--help", "llama-server"),  # this and the next three measure for minutes
    "benchmarks/grammar_overhead.py": ("--help", "--answers"),
    "benchmarks/http_overhead.py": ("--help", "--clients"),
    "benchmarks/serve_versus.py": ("--help", "llama-server"),
    "benchmarks/many_requests.py": ("MODEL --only nothing", "no scenario nothing"),
    "benchmarks/quantize_versus.py": ("", "model"),
    "benchmarks/embed_versus.py": ("--only nothing", "no model is called nothing"),
    "benchmarks/versus.py": ("--help", "--decode"),
    "benchmarks/vision_versus.py": ("--only nothing", "no tower is called nothing"),
    "tools/emulate.py": ("--cpu nothing", "nothing"),
}


def run(script: str, arguments: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> str | int | None:
    """Runs a script in this process; returns what it exits with."""
    words = [str(model) if word == "MODEL" else word for word in arguments.split()]
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.usefixtures("own_custom_ops")
@pytest.mark.parametrize("script", TINY)
def test_it_runs(
    script: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not run(script, TINY[script], demo_model, monkeypatch)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("script", REFUSES)
def test_it_says_what_is_missing(
    script: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = REFUSES[script]
    code = run(script, arguments, demo_model, monkeypatch)
    found = capsys.readouterr()
    assert said in f"{code} {found.err} {found.out}" and "Traceback" not in found.err
