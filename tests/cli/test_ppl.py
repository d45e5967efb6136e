"""`rlx ppl`: the command over the demo model, its table and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import rlx
from rlx.cli.main import cli, open_missing
from rlx.cli.ppl import MAX_BYTES, text_of
from rlx.cli.prompt import STDIN

TEXT = "Once upon a time there was a brave fox. The fox lived in a forest. One day the fox found a lamp.\n"


def ppl(*words: object) -> Result:
    return CliRunner().invoke(cli, ["ppl", *map(str, words)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_it_is_the_perplexity_of_the_runners_scores(text: Path) -> None:
    """`runner.score` computes what the base does by another way, in one window."""
    done = ppl(text, "demo", "--kl", "--json", "--window", 64)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    with rlx.auto_runner(max_seq=64, precision="exact") as runner:
        ids = runner.tokenizer.encode(TEXT)
        expected = float(np.exp(-runner.score(ids).astype(np.float64).mean()))
    assert found["tokens"] == len(ids) - 1 == found["text_tokens"] - 1
    assert found["base_perplexity"] == pytest.approx(expected, rel=1e-4)
    assert found["perplexity"] == pytest.approx(expected, rel=0.1)
    assert 0 < found["kl"]["median"] <= found["kl"]["mean"] <= found["kl"]["max"] < 1
    assert found["kl"]["same_top"] > 0.8


@pytest.mark.parametrize(
    ("content", "options", "error"),
    [
        (b"", (), "no token to score"),
        (b"\xff\xfe", (), "it is no UTF-8 text (byte 0)"),
        (b"x" * (MAX_BYTES + 1), (), "more than 16 MiB"),
        (TEXT.encode(), ("--window", 16, "--stride", 17), "--stride is 17"),
        (TEXT.encode(), ("--halves", "--stride", 4), "exclude each other"),
        (TEXT.encode(), ("--base", "demo-vision"), "different tokens"),
    ],
)
def test_what_it_refuses(content: bytes, options: tuple[object, ...], error: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    done = ppl(path, *options)
    assert done.exit_code == 2 and error in done.output


def test_a_closed_stdin_has_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    open_missing()
    with sys.stdin:
        assert text_of(STDIN) == ""
