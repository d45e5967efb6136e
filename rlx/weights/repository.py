"""What the Hugging Face hub says of a repository: its commit and its files, each checked before anything uses it.

Part of the weights stage, under `pull.py`. Commits, digests and names become names of files here, so a hub that says
anything else than what they look like is not believed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rlx.env import size
from rlx.errors import DownloadError
from rlx.json_file import parse_object
from rlx.weights import hub_http

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
    raw = hub_http.read(f"api/models/{name}?blobs=true", name, MOST_BYTES, MOST_SECONDS)
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
