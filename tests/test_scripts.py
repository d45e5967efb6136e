"""Scripts that the documentation names run, on tiny sizes; others are loaded, and say what they need."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, text

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
    "benchmarks/vision_versus.py": ("--only nothing", "no tower is called nothing"),
    "tools/emulate.py": ("--cpu nothing", "nothing"),
}
#: The file of the test that runs a script on tiny sizes.
ELSEWHERE = {
    "benchmarks/cold_start.py": "test_benchmarks.py",
    "benchmarks/decode_limit.py": "test_benchmarks.py",
    "benchmarks/make_model.py": "test_make_model.py",
    "benchmarks/versus.py": "test_benchmarks.py",
    "examples/images.py": "test_docs.py",
    "tools/lower_loops.py": "backends/cpu/test_templates.py",
    "tools/release.py": "test_release.py",
}
#: Why no test runs a script.
NOT_HERE = {
    "tools/site/option_tables.py": "writes into the pages, which tests compare with the code",
    "tools/site/pictures.py": "needs Chromium, and writes pictures of the pages",
    "tools/site/terminal.py": "records a terminal, and writes pictures of the pages",
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


def test_every_script_of_the_pages_is_run() -> None:
    named = {
        path
        for page in PAGES
        for path in re.findall(r"(?:benchmarks|examples|tools)/(?:\w+/)*\w+\.py", text(page))
        if (ROOT / path).is_file() and re.search(r"^if __name__", (ROOT / path).read_text(encoding="utf-8"), re.M)
    }
    assert named - TINY.keys() - REFUSES.keys() - ELSEWHERE.keys() - NOT_HERE.keys() == set()
    for script, test in ELSEWHERE.items():
        assert Path(script).stem in (ROOT / "tests" / test).read_text(encoding="utf-8"), script
