"""`rlx trace` and `--trace`: a valid file, its phases, errors, and what an interrupt leaves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trace_format
from click.testing import CliRunner

from rlx.cli.main import cli

QUICK = ["--no-stdin", "--max-tokens", "3", "--threads", "1"]


def test_a_prompt(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(cli, ["trace", "Hello", *QUICK, "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip(), "the answer"
    assert "Open it in https://ui.perfetto.dev" in done.stderr and "not covered" in done.stderr
    found = trace_format.read(out)
    (main,) = (track for track, names in found.tracks.items() if names[1] == "main")
    own = [each for each in found.slices if each.track == main]
    phases = ["open the model", "read the prompt", "answer", "close the model"]
    assert [each.name for each in own if each.depth == 0] == phases
    seconds = found.moments["end of the recording"]["seconds"]
    assert 0.75 * seconds < trace_format.covered(own) <= seconds  # 95% and more on a machine that is not busy
    assert len(found.of("step")) == 3 and found.of("region") and found.on("workers")
    assert found.moments["recording"]["detail"] == "kernels" and "rlx" in found.moments["recording"]


@pytest.mark.parametrize("words", [["--no-stdin"], ["a", "b", "c"], ["Hello", "--image", "absent.png"]])
def test_what_is_typed_wrong_leaves_an_earlier_trace(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    out.write_text("earlier")
    done = CliRunner().invoke(cli, ["trace", *words, "-o", str(out)])
    assert done.exit_code != 0 and out.read_text() == "earlier"
    assert "trace:" not in done.output and "phase" not in done.output


def test_an_interrupted_run_leaves_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlx.cli.run.prompt_of", interrupted)
    done = CliRunner().invoke(cli, ["trace", "Hello", *QUICK, "-o", str(tmp_path / "trace.json")])
    assert done.exit_code == 128 + signal.SIGINT
    found = trace_format.read(tmp_path / "trace.json")
    (prompt,) = (each for each in found.slices if each.name == "read the prompt")
    assert prompt.args == {"error": "KeyboardInterrupt"}
    assert any(each.name == "open the model" for each in found.slices)


@pytest.mark.parametrize("command", [["serve"], ["batch", "in.jsonl", "out.jsonl"]])
def test_a_cluster_is_not_traced(command: list[str]) -> None:
    pytest.importorskip("ray")
    done = CliRunner().invoke(cli, [*command, "--ray", "--trace", "trace.json"])
    assert done.exit_code == 2 and "--trace records this process only: leave out --ray" in done.stderr
