"""`rlx list`, `rlx rm`, and the download of a model that is used for the first time, with a hub on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from click.testing import CliRunner, Result

from rlx.cli import command, downloads
from rlx.cli.main import cli
from rlx.weights.pull import downloaded, pull

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from fake_hub import COMMIT, FakeHub

BIG = bytes(range(256)) * 40
ASK = ["run", "org/repo", "Hello", "--max-tokens", "2", "--no-stdin"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with FakeHub({}) as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.endpoint)
        yield found


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (command, downloads):
        monkeypatch.setattr(each, "is_terminal", lambda stream: True)


def rlx(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli, list(words), input=input)


def names() -> set[str]:
    return {model.name for model in downloaded()}


def test_list_shows_name_size_and_quantization(hub: FakeHub, tmp_path: Path) -> None:
    assert "0 models, 0 B in " in rlx("list").stdout
    hub.files = {"m-Q8_0.gguf": BIG, "sub/m-Q4_K_M.gguf": BIG[:5000], "README.md": b"x"}
    for quantization in ("Q8_0", "Q4_K_M"):
        pull(f"org/repo:{quantization}")
    (tmp_path / "hub" / "datasets--org--data").mkdir()
    (tmp_path / "hub" / "models--org--empty" / "refs").mkdir(parents=True)
    (tmp_path / "hub" / "models--org--empty" / "refs" / "main").write_bytes(b"\xff../../..")
    out = rlx("list").stdout
    assert sorted(line.split()[:4] for line in out.splitlines() if "org/" in line) == [
        ["org/repo:Q4_K_M", "Q4_K_M", "5", "kB"], ["org/repo:Q8_0", "Q8_0", "10.2", "kB"],
    ]  # fmt: skip
    assert f"2 models, 15.2 kB in {tmp_path / 'hub'}" in out
    rows = {row["name"]: row for row in json.loads(rlx("list", "--json").stdout)["models"]}
    row = rows["org/repo:Q8_0"]
    assert (row["quantization"], row["bytes"], Path(row["path"]).read_bytes()) == ("Q8_0", len(BIG), BIG)


def test_rm_removes_what_is_named_and_its_bytes(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"m-Q8_0.gguf": BIG, "m-Q6_K.gguf": BIG[:5000], "m-Q4_K_M.gguf": BIG}  # two with the same bytes
    for quantization in ("Q8_0", "Q6_K", "Q4_K_M"):
        pull(f"org/repo:{quantization}")
    folder = tmp_path / "hub" / "models--org--repo"
    assert rlx("rm", "org/repo:Q8_0", "--yes").stdout == "removed org/repo:Q8_0 (10.2 kB)\n"
    assert names() == {"org/repo:Q6_K", "org/repo:Q4_K_M"} and len(list((folder / "blobs").iterdir())) == 2
    assert (folder / "snapshots" / COMMIT / "m-Q4_K_M.gguf").read_bytes() == BIG
    assert rlx("rm", "org/repo:q4_k_m", "--yes").exit_code == 0
    assert len(list((folder / "blobs").iterdir())) == 1
    assert rlx("rm", "org/repo", "--yes").exit_code == 0
    assert not folder.exists() and not names()


@pytest.mark.parametrize(
    ("name", "said"),
    [("org/rep", "Did you mean org/repo"), ("org/repo:Q9", "no model named 'org/repo:Q9' was downloaded"),
     ("../../nowhere", "no model named '../../nowhere'"), (".", "this is no name of a downloaded model, but a path")],
)  # fmt: skip
def test_what_is_not_there_removes_nothing(hub: FakeHub, name: str, said: str) -> None:
    hub.files = {"m-Q8_0.gguf": BIG}
    pull("org/repo")
    result = rlx("rm", "org/repo", name, "--yes")
    assert result.exit_code == 2 and said in result.stderr and names()


# ---------------------------------------------------------------------------------------------------- on first use


def test_without_a_terminal_the_error_says_pull(hub: FakeHub, demo_model: Path) -> None:
    hub.files = {"demo-Q8_0.gguf": demo_model.read_bytes()}
    result = rlx(*ASK)
    assert result.exit_code == 2 and "`rlx pull org/repo` downloads it" in result.stderr
    assert not names() and not hub.requests


def test_in_a_terminal_a_question_with_the_size(
    hub: FakeHub, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"demo-Q8_0.gguf": demo_model.read_bytes(), "demo-Q6_K.gguf": BIG}
    in_terminal(monkeypatch)
    named = [*ASK[:1], "org/repo:Q8_0", *ASK[2:]]
    said_no = rlx(*named, input="n\n")
    assert said_no.exit_code == 1 and not names()
    assert "org/repo:Q8_0 is not on this machine. Download org/repo, Q8_0 (" in said_no.stderr
    done = rlx(*named, input="\n")
    assert done.exit_code == 0, done.stderr
    assert names() == {"org/repo:Q8_0"}
    again = rlx(*named)
    assert again.exit_code == 0 and "not on this machine" not in again.stderr


def test_rm_asks(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m-Q8_0.gguf": BIG}
    pull("org/repo")
    refused = rlx("rm", "org/repo")
    assert refused.exit_code == 2 and "say --yes" in refused.stderr
    in_terminal(monkeypatch)
    said_no = rlx("rm", "org/repo", input="n\n")
    assert said_no.exit_code == 1 and "Remove org/repo:Q8_0 (10.2 kB)?" in said_no.output and names()
    assert rlx("rm", "org/repo", input="y\n").exit_code == 0 and not names()
