"""The Hugging Face hub: names of models, the folder of downloads, and what it says of a repository.

Part of the weights stage, under `locate.py` and `pull.py`. Commits, digests and names become names of files here, so a
hub that says anything else than what they look like is not believed. An answer is read piece by piece up to a limit.
The hub's library knows its environment (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) and gives the client.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlx.env import size
from rlx.errors import DownloadError
from rlx.json_file import parse_object

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_name(text: str) -> bool:
    """Whether a text has the form of a repository's name, `org/repo`."""
    return _NAME.fullmatch(text) is not None and "--" not in text and ".." not in text


def _library() -> Any:
    """The hub's library, which takes long to import."""
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download

    return huggingface_hub


def folder(repo: str | None = None) -> Path:
    """The folder of all downloads, or that of a repository in it: where HF_HUB_CACHE or HF_HOME says."""
    library = _library()
    cache = Path(library.constants.HF_HUB_CACHE)
    return cache if repo is None else cache / library.file_download.repo_folder_name(repo_id=repo, repo_type="model")


def snapshot(repo: str) -> Path | None:
    """The folder of what was downloaded of a repository's main branch; None if nothing was."""
    reference = folder(repo) / "refs" / "main"
    if not reference.is_file():
        return None
    found = folder(repo) / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return found if found.is_dir() else None


TIMEOUT = 30.0  # seconds without a byte


@contextmanager
def asked(url: str, where: str, headers: dict[str, str] | None = None) -> Iterator[Any]:
    """The hub's answer to a GET request while it comes, with whatever status; redirects are followed.

    Args:
        url: behind the address of the hub.
        where: what is asked for, for messages.
    """
    library = _library()
    sent = {"Accept-Encoding": "identity", **(headers or {})}
    if token := library.get_token():
        sent["Authorization"] = f"Bearer {token}"
    url = f"{library.constants.ENDPOINT}/{url}"
    with library.get_session().stream("GET", url, headers=sent, timeout=TIMEOUT) as answer:
        if answer.is_error and answer.status_code != 416:
            raise _refused(answer.status_code, answer.headers, where)
        yield answer


def _read(url: str, where: str, most: int, seconds: float) -> bytes:
    """The whole answer to a question.

    Args:
        most: bytes of it.
        seconds: until its last byte.

    Raises:
        DownloadError: the hub refuses, or its answer is too long or takes too long.
    """
    end, body = time.monotonic() + seconds, bytearray()
    with named_http_errors(where), asked(url, where) as answer:
        for chunk in answer.iter_raw():
            body += chunk
            if len(body) > most:
                what = f"the hub's list of files has more than {size(most)}"
                raise DownloadError(what, where=where, hint="download the files with another tool, and give their path")
            if time.monotonic() > end:
                what = f"the hub's answer takes more than {seconds:g} s"
                raise DownloadError(what, where=where, hint="try again later")
    return bytes(body)


@contextmanager
def named_http_errors(where: str, broken: list[str] | None = None) -> Iterator[None]:
    """A connection to the hub that does not come becomes a `DownloadError`.

    Args:
        broken: takes the reason of a connection that breaks, which then is no error.
    """
    library = _library()
    try:
        yield
    except library.errors.OfflineModeIsEnabled as error:
        hint = "unset HF_HUB_OFFLINE"
        raise DownloadError("the hub's tools are told to work offline", where=where, hint=hint) from error
    except _transport_errors() as error:
        reason = str(error) or type(error).__name__
        if broken is None:
            what = f"there is no connection to {library.constants.ENDPOINT}: {reason}"
            raise DownloadError(what, where=where, hint="check the network, or HF_ENDPOINT") from error
        broken.append(reason)


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the hub's HTTP client raises where there is no answer, whichever client it is."""
    known = _library().errors.HfHubHTTPError.__mro__
    base = next(kind for kind in known if kind.__name__ == "HTTPError" and issubclass(kind, Exception))
    client = sys.modules[base.__module__.partition(".")[0]]
    return base, client.InvalidURL, client.StreamError


def _refused(status: int, headers: Any, where: str) -> DownloadError:
    token = "set HF_TOKEN to a token of an account that may read it"
    if status == 403 or headers.get("X-Error-Code") == "GatedRepo":
        hint = f"accept its terms on its page at the hub, and {token}"
        return DownloadError("access to the repository is restricted", where=where, hint=hint)
    if status == 401 and headers.get("X-Error-Message", "").startswith("Invalid credentials"):
        return DownloadError("the hub refuses the token", where=where, hint=token)
    if status in (401, 404):
        what = "the hub has no such repository, or it is private"
        what = f"the hub has no such file ({status})" if "," in where else what
        return DownloadError(what, where=where, hint=f"check the name; if it is private, {token}")
    return DownloadError(f"the hub answers {status}", where=where, hint="try again later")


MOST_BYTES = 8_000_000  # of the list of files; one takes about 250
MOST_SECONDS = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PART = re.compile(r"[^\\/:\0]{1,200}")  # of a name, between slashes
_MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        name: its path in the repository.
        digest: what its bytes hash to: the SHA-256 of a large file, the Git blob id of a small one. It names the file
            in the download folder.
    """

    name: str
    nbytes: int
    digest: str

    @property
    def is_large(self) -> bool:
        return len(self.digest) == 64


@dataclass(frozen=True)
class RemoteModel:
    """A model in a repository: its files and what they are called."""

    quantization: str | None
    files: tuple[RemoteFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def __str__(self) -> str:
        return f"{self.quantization or self.files[0].name} ({size(self.nbytes)})"


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    commit: str
    files: tuple[RemoteFile, ...]


def look_up(name: str) -> Repository:
    """The files of a repository's main branch; `DownloadError` if the hub does not say."""
    raw = _read(f"api/models/{name}?blobs=true", name, MOST_BYTES, MOST_SECONDS)
    found = parse_object(raw, name, DownloadError, most=MOST_BYTES)
    commit, siblings = found.get("sha"), found.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        hint = "check HF_ENDPOINT: what answers there is no hub"
        raise DownloadError(f"the hub names the commit {str(commit)[:80]!r}, which is none", where=name, hint=hint)
    files = map(_remote_file, siblings if isinstance(siblings, list) else [])
    return Repository(name, commit, tuple(file for file in files if file is not None))


def _remote_file(sibling: Any) -> RemoteFile | None:
    """A file whose name is a plain path, and whose size and digest are such; others are none of a model's."""
    if not isinstance(sibling, dict):
        return None
    name, nbytes, large = sibling.get("rfilename"), sibling.get("size"), sibling.get("lfs")
    digest = large.get("sha256") if isinstance(large, dict) else sibling.get("blobId")
    if not isinstance(name, str) or not isinstance(digest, str) or not isinstance(nbytes, int):
        return None
    sound = _is_plain(name) and _DIGEST.fullmatch(digest) and 0 <= nbytes < 1 << 60
    return RemoteFile(name, nbytes, digest) if sound else None


def _is_plain(name: str) -> bool:
    """Whether a name is a path that stays below its folder on every system."""
    parts = name.split("/")
    plain = len(name) <= _MOST_CHARACTERS and name.isprintable() and str(PurePosixPath(name)) == name
    return plain and all(_PART.fullmatch(part) and part not in (".", "..") for part in parts)
