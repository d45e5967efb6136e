"""Answers of a hub that lies: each download ends in a file below the folder of downloads or in an error with a name,
and nothing else is written.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from rlx.errors import DownloadError, RlxError
from rlx.weights.pull import pull

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from fake_hub import COMMIT, FakeHub, git_blob

BODY = b"GGUF" + bytes(2000)
SIZE = len(BODY)
DIGEST = hashlib.sha256(BODY).hexdigest()
CONFIG = b"{}"
ESCAPES = ["../../../../x", "../x", "..", ".", "", "/", "/tmp/rlx-x", "//x", "a/../../../../../x", "..\\..\\x",
           "C:\\x", "C:/x", "x\0y", "x\ny", "~/x", "%2e%2e/x", "\u2025/x", "x" * 300,
           "a/" * 600 + "x", "-x", "\ud800"]  # fmt: skip
NO_TEXTS: list[Any] = [None, 0, 1.5, True, [], {}, ["x"], {"a": "x"}]


class LyingHub(FakeHub):
    """Answers each question for files with `reply`: a JSON value or bytes; and each question for a file with BODY."""

    reply: Any = None
    sent = 0

    def _list(self, request: BaseHTTPRequestHandler) -> None:
        body = self.reply if isinstance(self.reply, bytes) else json.dumps(self.reply).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        with suppress(ConnectionError):  # who has read enough goes away
            for at in range(0, len(body), 1 << 16):
                request.wfile.write(body[at : at + (1 << 16)])
                self.sent += 1 << 16

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if "/resolve/" not in request.path:
            super().answer(request)
            return
        data = CONFIG if request.path.endswith("config.json") else BODY
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "a" / "b" / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with LyingHub({}) as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.endpoint)
        yield found


def row(name: Any = "m.gguf", size: Any = SIZE, digest: Any = DIGEST) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "lfs": {"sha256": digest, "size": size}}


def reply(*rows: Any, sha: Any = COMMIT, **more: Any) -> dict[str, Any]:
    return {"id": "org/repo", "sha": sha, "siblings": list(rows), **more}


def config(name: str = "config.json") -> dict[str, Any]:
    return {"rfilename": name, "size": len(CONFIG), "blobId": git_blob(CONFIG)}


def answers() -> list[Any]:
    """Commits, names, sizes, digests and shapes that no hub sends."""
    bad = [*ESCAPES, *NO_TEXTS]
    found: list[Any] = [
        reply(row(), sha=sha) for sha in [*bad, COMMIT[:-1], COMMIT + "/x", COMMIT.upper(), COMMIT + "\n"]
    ]
    found += [reply(row("model.safetensors"), config(), sha=sha) for sha in ESCAPES]
    found += [reply(row(name)) for name in bad]
    found += [reply(row(f"{name}/m.gguf")) for name in ESCAPES]
    found += [reply(row(f"{name}.gguf")) for name in ESCAPES]
    found += [reply(row("model.safetensors"), row(f"{name}/config.json"), config()) for name in ESCAPES]
    found += [reply(row(digest=digest)) for digest in [*bad, "f" * 63, "f" * 65, DIGEST.upper(), "../" + DIGEST[3:]]]
    found += [reply({"rfilename": "m.gguf", "size": len(BODY), "blobId": blob}) for blob in bad]
    found += [reply(row(size=size)) for size in [-1, 0, 1, 1 << 62, 10**30, 1e300, "7", *NO_TEXTS]]
    found += [
        reply(row("a.gguf"), row("a.gguf/b.gguf")),
        reply(row("a.gguf"), row("a.gguf")),
        reply(row(), row(), 3, None),
    ]
    found += [reply(*each) for each in ([], [None], [[]], ["x"], [3], [{}])]
    found += [{**reply(row()), "siblings": each} for each in [*NO_TEXTS, "x"]]
    found += [
        *NO_TEXTS,
        "x",
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"<html>",
        b"NaN",
        b"\0" * 1000,
    ]
    found += [b'{"sha": "' + COMMIT.encode() + b'", "sha": "../../x", "siblings": []}']
    return found


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_nothing_is_written_outside_the_folder_of_downloads(hub: LyingHub, tmp_path: Path) -> None:
    cache, ends = tmp_path / "a" / "b" / "hub", []
    for number, each in enumerate(answers()):
        hub.reply = each
        try:
            path = pull("org/repo")
        except RlxError as error:
            assert len(str(error)) < 5_000 and str(error).isprintable()
            ends.append("refused")
        else:
            assert path.is_relative_to(cache / "models--org--repo" / "snapshots" / COMMIT), (number, path)
            assert path.resolve().is_relative_to(cache.resolve())
            ends.append("taken")
        outside = {path for path in everything(tmp_path) if not path.is_relative_to(cache)}
        assert outside <= {tmp_path / "a", tmp_path / "a" / "b"}, (number, each)
    assert not Path("/tmp/rlx-x").exists()
    assert ends.count("refused") > 200


@pytest.mark.parametrize(
    "make",
    [
        lambda: b'{"siblings": [' + json.dumps(row()).encode() * 300_000,
        lambda: b'{"sha": "' + b"x" * 45_000_000 + b'"}',
        lambda: b"[" * 45_000_000,
        lambda: b"{}," * 15_000_000,
    ],
    ids=["files", "text", "arrays", "objects"],
)
def test_a_long_answer_is_not_read_to_its_end(hub: LyingHub, make: Callable[[], bytes]) -> None:
    hub.reply = make()
    with pytest.raises(DownloadError, match=r"the hub's list of files has more than 8 MB"):
        pull("org/repo")
    assert hub.sent < 20_000_000
