"""Downloads from a hub on this machine: what is chosen, what broken connections and wrong bytes come to."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from click.testing import CliRunner
from fake_hub import COMMIT, FakeHub

import rlx
from rlx.cli.main import cli
from rlx.env import size
from rlx.errors import AmbiguousModelError, DownloadError
from rlx.weights import pull as download
from rlx.weights import resolve_model_path
from rlx.weights.hub import look_up
from rlx.weights.pull import pull

BIG = bytes(range(256)) * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has nothing yet, and an empty folder for downloads."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(download, "CHUNK", 512)
    with FakeHub({}) as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.endpoint)
        yield found


def folder(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--org--repo"


# ---------------------------------------------------------------------------------------------------- what is taken


def test_one_file_lies_where_the_hubs_tools_look(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"m-Q8_0.gguf": BIG, "README.md": b"no"}
    path = pull("org/repo")
    assert path == folder(tmp_path) / "snapshots" / COMMIT / "m-Q8_0.gguf"
    assert path.read_bytes() == BIG
    assert huggingface_hub.hf_hub_download("org/repo", "m-Q8_0.gguf", local_files_only=True,
                                           cache_dir=tmp_path / "hub") == str(path)  # fmt: skip
    assert resolve_model_path("org/repo") == resolve_model_path("org/repo:q8_0") == path
    assert [name for name, _ in hub.requests] == ["m-Q8_0.gguf"]
    pull("org/repo")
    assert len(hub.requests) == 1, "what is there is not fetched again"
    assert [p.name for p in (folder(tmp_path) / "blobs").iterdir()] == [look_up("org/repo").files[0].digest]


def test_of_several_the_usual_one_is_taken_with_a_word(hub: FakeHub) -> None:
    hub.files = {"m-Q8_0.gguf": BIG, "m-Q4_K_M.gguf": BIG[1:], "mmproj-f16.gguf": BIG}
    said: list[str] = []
    assert pull("org/repo", notice=said.append).name == "m-Q4_K_M.gguf"
    assert said == ["taking Q4_K_M (10.2 kB); there are also Q8_0 (10.2 kB)"]
    assert pull("org/repo:Q8_0").name == "m-Q8_0.gguf"
    with pytest.raises(AmbiguousModelError, match="org/repo: there are 2 models here"):
        resolve_model_path("org/repo")
    assert resolve_model_path("org/repo:Q8_0").name == "m-Q8_0.gguf"


def test_a_model_that_takes_images_comes_with_its_tower(hub: FakeHub, goldens: Path) -> None:
    tower = (goldens / "gemma3-mm" / "mmproj-Q8_0.gguf").read_bytes()
    model = (goldens / "gemma3" / "model-f16.gguf").read_bytes()
    text_only = (goldens / "qwen3" / "model-f16.gguf").read_bytes()
    towers = {"mmproj-m-Q8_0.gguf": tower, "mmproj-m-F16.gguf": tower}
    hub.files = {"m-Q8_0.gguf": model, "m-F16.gguf": text_only, **towers}
    said: list[str] = []
    path = pull("org/repo:Q8_0", notice=said.append)
    assert path.name == "m-Q8_0.gguf" and said == [f"with its vision tower, mmproj-m-F16.gguf ({size(len(tower))})"]
    with rlx.auto_runner("org/repo:Q8_0", load=False) as runner:
        assert runner.supports_multimodal
    before = len(hub.requests)
    pull("org/repo:F16")
    assert [name for name, _ in hub.requests[before:]] == ["m-F16.gguf"]


def test_all_parts_of_a_split_model_come(hub: FakeHub) -> None:
    parts = {f"Q4_0/m-Q4_0-0000{i}-of-00003.gguf": BIG[i:] for i in (1, 2, 3)}
    hub.files = {**parts, "m-Q8_0.gguf": BIG}
    path = pull("org/repo:Q4_0")
    assert path.name == "m-Q4_0-00001-of-00003.gguf"
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(name.removeprefix("Q4_0/") for name in parts)
    assert resolve_model_path("org/repo:Q4_0") == path


def test_a_checkpoint_comes_with_what_belongs_to_it(hub: FakeHub, goldens: Path) -> None:
    checkpoint = goldens / "qwen3" / "hf"
    hub.files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    hub.files |= {"pytorch_model.bin": BIG, "onnx/model.onnx": BIG, "figure.png": b"x"}
    path = pull("org/repo")
    assert path.name == "model.safetensors"
    assert {p.name for p in path.parent.iterdir()} == {p.name for p in checkpoint.iterdir()} & {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json",
    }  # fmt: skip
    with rlx.auto_runner("org/repo", load=False) as runner:
        assert runner.family == "qwen3"
        assert runner.tokenizer.encode("Hi")
    assert rlx.load_tokenizer("org/repo").encode("Hi")


def test_shards_come_with_their_index(hub: FakeHub) -> None:
    hub.files = {"model.safetensors.index.json": b"{}", "config.json": b"{}", **{
        f"model-0000{i}-of-00002.safetensors": BIG[i:] for i in (1, 2)}}  # fmt: skip
    path = pull("org/repo")
    assert path.name == "model.safetensors.index.json"
    assert len(list(path.parent.iterdir())) == 4


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no GGUF file and no safetensors. Look for one with GGUF"),
        ({"pytorch_model.bin": BIG}, "Its weights are pickles, which rlx does not read"),
        ({"../../evil.gguf": BIG, "/etc/evil.gguf": BIG, "a\\b.gguf": BIG}, "holds no GGUF file"),
    ],
)
def test_repositories_without_a_model(hub: FakeHub, files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    hub.files = files
    with pytest.raises(DownloadError) as caught:
        pull("org/repo")
    assert said in str(caught.value)
    assert not list(tmp_path.rglob("*.gguf"))


# ---------------------------------------------------------------------------------------------------- broken networks


def test_a_connection_that_breaks_off_is_taken_up_in_the_middle(hub: FakeHub) -> None:
    hub.files, hub.cut = {"m.gguf": BIG}, lambda name, at: 4096 if at < 8000 else None
    assert pull("org/repo").read_bytes() == BIG
    starts = [int(asked.split("=")[1].rstrip("-")) if asked else 0 for _, asked in hub.requests]
    assert len(starts) == 3 and starts == sorted(starts) and starts[1] > 3000


def test_wrong_bytes_are_removed_and_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.damage = {"m.gguf": BIG}, lambda data: data[:-1] + b"!"
    with pytest.raises(DownloadError, match=r"m\.gguf: what arrived is damaged: it hashes to \w{12}, expected \w{12}"):
        pull("org/repo")
    assert not list((folder(tmp_path) / "blobs").iterdir())
    hub.damage = lambda data: data
    assert pull("org/repo").read_bytes() == BIG


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "org/repo: the hub has no such repository, or it is private. Check the name"),
        (401, "org/repo: the hub"),
        (403, "access to the repository is restricted. Accept its terms"),
        (500, "the hub answers 500. Try again later"),
    ],
)
def test_the_hub_says_no(hub: FakeHub, status: int, said: str) -> None:
    hub.status = status
    with pytest.raises(DownloadError) as caught:
        pull("org/repo")
    assert said in str(caught.value)
    assert status == 500 or "HF_TOKEN" in str(caught.value)


def test_a_token_opens_what_is_private(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files, hub.token = {"m.gguf": BIG}, "secret"
    with pytest.raises(DownloadError, match="HF_TOKEN"):
        pull("org/repo")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pull("org/repo").read_bytes() == BIG


# ---------------------------------------------------------------------------------------------------- the disk


def test_a_disk_without_room_is_said_before(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": BIG}
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"the download takes 10\.2 kB, and 1 kB are free. Make room"):
        pull("org/repo")
    assert not hub.requests


def test_two_downloads_at_once_fetch_one_file(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"m.gguf": BIG}
    begun, go_on = threading.Event(), threading.Event()
    first = download.Downloads._download

    def slow(self: Any, file: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        first(self, file)

    monkeypatch.setattr(download.Downloads, "_download", slow)
    paths: list[Path] = []
    said: list[str] = []

    def waiting(line: str) -> None:
        said.append(line)
        go_on.set()

    threads = [threading.Thread(target=lambda: paths.append(pull("org/repo"))) for _ in range(1)]
    threads[0].start()
    assert begun.wait(30)
    paths.append(pull("org/repo", notice=waiting))
    threads[0].join(30)
    assert said == ["m.gguf: waiting for another download of it"]
    assert paths[0] == paths[1] and paths[0].read_bytes() == BIG
    assert len(hub.requests) == 1


# ---------------------------------------------------------------------------------------------------- names


def test_the_command(hub: FakeHub, demo_model: Path) -> None:
    hub.files = {"demo-Q8_0.gguf": demo_model.read_bytes(), "demo-Q6_K.gguf": BIG}
    invoke: Callable[..., Any] = CliRunner().invoke
    listed = invoke(cli, ["pull", "org/repo", "--list"])
    assert re.findall(r"^ *(Q\w+)", listed.stdout, re.MULTILINE) == ["Q6_K", "Q8_0"]
    refused = invoke(cli, ["pull", "org/repo"])
    assert (refused.exit_code, "Choose one: rlx pull org/repo:Q6_K" in refused.stderr) == (2, True)
    done = invoke(cli, ["pull", "org/repo:Q8_0"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip().endswith("demo-Q8_0.gguf")
    assert "runnable: yes" in invoke(cli, ["inspect", "org/repo:Q8_0"]).stdout
