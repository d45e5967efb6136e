"""`rlx quantize` as a command: what it says, how it ends, and that the file it writes runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlx.cli.main import cli


def rlx(*args: object) -> Result:
    return CliRunner().invoke(cli, ["quantize", *map(str, args)])


def test_the_demo_model_end_to_end(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = rlx(demo_model, out, "q4_0", "--requantize", "--threads", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{out}: Q4_0, ")
    assert "bits a number" in result.stdout
    answer = CliRunner().invoke(cli, ["run", str(out), "Once upon", "--max-tokens", "4"])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("Q9", [], "'Q9' is not a file type. Choose one of F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_0."),
        ("Q8_0", ["--threads", "0"], "--threads"),
        ("Q8_0", [], "the file exists. Give another name, or --force."),
    ],
)
def test_mistakes(goldens: Path, tmp_path: Path, target: str, options: list[str], message: str) -> None:
    out = tmp_path / "out.gguf"
    out.touch()
    result = rlx(goldens / "qwen3" / "model-f16.gguf", out, target, *options)
    assert result.exit_code == 2
    assert message in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_an_interrupt_leaves_nothing_behind(goldens: Path, tmp_path: Path) -> None:
    """A signal to a process that writes; the first progress report holds it until the signal comes."""
    code = (
        "import sys, time\n"
        "from rlx.cli import output\n"
        "from rlx.cli.main import cli\n"
        "def wait(self, what, done, total):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(120)\n"
        "output.Bars.__call__ = wait\n"
        "cli(['quantize', sys.argv[1], sys.argv[2], 'Q8_0'])\n"
    )
    command = [sys.executable, "-c", code, str(goldens / "qwen3" / "model-f16.gguf"), str(tmp_path / "out.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 1
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert list(tmp_path.iterdir()) == []
