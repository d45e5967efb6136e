"""Downloads a model from the Hugging Face hub into the folder that all tools of the hub share; lists and removes those.

Part of the weights stage, in front of `locate.py`, which finds what lies there. It says which files of a repository are
a model. Only `rlx pull` downloads, other commands after a question, and Python code that calls `pull`.

Fetching is done here and not by the hub's library: in another process the library begins a broken download anew,
and it compares no hashes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import quote

from rlx import models as model_families
from rlx.arguments import nearest
from rlx.env import size
from rlx.errors import AmbiguousModelError, DownloadError, ModelFileError, file_error
from rlx.partial_file import into_place
from rlx.weights import hub
from rlx.weights.gguf import GgufFile, part_number
from rlx.weights.hub import RemoteFile, RemoteModel, Repository, asked, look_up, named_http_errors
from rlx.weights.locate import (
    INDEX_NAME,
    PICKLES,
    SAFETENSORS,
    SINGLE_NAME,
    FoundModel,
    is_projector,
    models_in,
    quantization_of,
    split_quantization,
    usual_type,
)

Progress = Callable[[str, int, int], None]
Notice = Callable[[str], None]

ATTEMPTS = 5  # in a row without a byte
CHUNK = 1 << 20
SPARE = 64 << 20  # bytes that stay free on the disk

PREFERRED = "Q4_K_M"
"""The quantization that is taken of several where none is named, as other tools do; a word says so."""
# What belongs to a checkpoint beside its weights.
_BESIDE = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
})  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A model that can be downloaded, and from where."""

    repository: Repository
    model: RemoteModel

    def fetch(self, progress: Progress | None = None, notice: Notice | None = None) -> Path:
        """Downloads it; arguments, result and errors as of `pull`."""
        say = notice or (lambda line: None)
        downloads = Downloads(self.repository, progress, say)
        path = downloads.fetch(self.model.files)[0]
        if tower := tower_of(self.repository, path):
            say(f"with its vision tower, {tower.name} ({size(tower.nbytes)})")
            downloads.fetch((tower,))
        return path


def plan(name: str, notice: Notice | None = None) -> Plan:
    """The plan of a download: asks the hub, and downloads nothing."""
    repository, quantization = repository_of(name)
    return Plan(repository, choose(models_of(repository), quantization, repository, notice or (lambda line: None)))


def pull(name: str, progress: Progress | None = None, notice: Notice | None = None) -> Path:
    """Downloads a model; what is there already is not fetched again, and a broken download goes on where it ended.

    Args:
        name: `org/repo`, or `org/repo:QUANT`. Without QUANT the one model that there is, or of several GGUF files the
            one in Q4_K_M. With the GGUF file of a model that takes images comes its vision tower.
        progress: called with (what, bytes done, bytes in all).
        notice: called with a line for the user.

    Returns:
        The file to open: the GGUF file, the first part of a split one, the safetensors file or the index of its shards.

    Raises:
        DownloadError: no such repository or file, no access, no network, no room, or bytes that are not those of the
            repository.
        AmbiguousModelError: there are several models, and none of them is the usual one.
    """
    return plan(name, notice).fetch(progress, notice)


def repository_of(name: str) -> tuple[Repository, str | None]:
    """What the hub has under a name, `org/repo` or `org/repo:QUANT`, and the quantization; errors as of `pull`."""
    base, quantization = split_quantization(name)
    if not hub.is_name(base):
        raise DownloadError("this is no name of a repository", where=name, hint="write org/repo or org/repo:QUANT")
    return look_up(base), quantization


def tower_of(repository: Repository, model: Path) -> RemoteFile | None:
    """The mmproj file that goes with a downloaded GGUF file.

    None if the model takes no images, or the repository has no such file, or several that differ in more than their
    type.
    """
    if model.suffix.lower() != ".gguf":
        return None
    try:
        with GgufFile(model) as file:
            arch = file.metadata.get("general.architecture")
    except ModelFileError:  # whoever opens it reads why
        return None
    files = {f.name: f for f in repository.files if "/" not in f.name and f.name.lower().endswith(".gguf")}
    name = usual_type(name for name in files if is_projector(name))
    families = model_families.vision_config.VISION_FAMILIES.values()
    return files[name] if name and any(arch in row.archs for row in families) else None


def models_of(repository: Repository) -> list[RemoteModel]:
    """The models in a repository: GGUF files, the parts of one together, and a safetensors checkpoint."""
    groups: dict[str, list[RemoteFile]] = {}
    for file in sorted(repository.files, key=lambda file: file.name):
        if file.name.lower().endswith(".gguf") and not is_projector(file.name):
            part = part_number(PurePosixPath(file.name).name)
            whole = str(PurePosixPath(file.name).with_name(part[0])) if part else file.name
            groups.setdefault(whole, []).append(file)
    models = [RemoteModel(quantization_of(name), tuple(files)) for name, files in groups.items()]
    at_top = {file.name: file for file in repository.files if "/" not in file.name}
    first = next((at_top[name] for name in (SINGLE_NAME, INDEX_NAME) if name in at_top), None)
    if first is not None:
        shards = [f for n, f in at_top.items() if n.endswith(".safetensors")] if first.name == INDEX_NAME else []
        beside = [file for name, file in sorted(at_top.items()) if name in _BESIDE]
        models.append(RemoteModel(SAFETENSORS, (first, *shards, *beside)))
    return models


def choose(models: list[RemoteModel], quantization: str | None, repository: Repository, say: Notice) -> RemoteModel:
    """The model that is meant; see `pull`."""
    if not models:
        pickles = any(file.name.lower().endswith(PICKLES) for file in repository.files)
        hint = "its weights are pickles, which rlx does not read" if pickles else "look for one with GGUF in its name"
        raise DownloadError("the repository holds no GGUF file and no safetensors", where=repository.name, hint=hint)
    listed = ", ".join(map(str, models))
    labels = [str(model.quantization) for model in models]
    if quantization is not None:
        fitting = [model for model in models if str(model.quantization).upper() == quantization.upper()]
        if not fitting:
            close = nearest(quantization.upper(), labels)
            hint = f"did you mean {repository.name}:{close[0]}? There are {listed}" if close else f"there are {listed}"
            raise DownloadError(f"it has no model in {quantization}", where=repository.name, hint=hint)
    else:
        fitting = models if len(models) == 1 else [m for m in models if m.quantization == PREFERRED]
        if len(models) > 1 and len(fitting) == 1:
            others = ", ".join(str(model) for model in models if model is not fitting[0])
            say(f"taking {fitting[0]}; there are also {others}")
    if len(fitting) == 1:
        return fitting[0]
    example = f"{repository.name}:{next((q for q in labels if labels.count(q) == 1), 'QUANT')}"
    what, hint = f"it holds {len(models)} models: {listed}", f"choose one, such as {example}"
    raise AmbiguousModelError(what, where=repository.name, hint=hint, example=example)


class Downloads:
    """Files on their way into the hub's folder: `blobs` by what they hash to, `snapshots/<commit>` with their names."""

    def __init__(self, repository: Repository, progress: Progress | None, say: Notice) -> None:
        self.repository, self.progress, self.say = repository, progress, say
        self.storage = hub.folder(repository.name)
        self.locks = self.storage.parent / ".locks" / self.storage.name
        self.snapshot = self.storage / "snapshots" / repository.commit

    def fetch(self, files: Iterable[RemoteFile]) -> list[Path]:
        """All files, in their order; the snapshot becomes the current one when they are all there."""
        files = list(files)
        with _named_system_errors(self.repository.name):
            self._check_places(files)
            for folder in (self.storage / "blobs", self.storage / "refs", self.snapshot, self.locks):
                folder.mkdir(parents=True, exist_ok=True)
            self._check_room(files)
            paths = [self._file(file) for file in files]
            self._make_current()
        return paths

    def _check_places(self, files: Iterable[RemoteFile]) -> None:
        """Everything that is written lies in the repository's folder, with links followed."""
        places = [self.snapshot / file.name for file in files]
        places += [place for file in files for place in (self._blob(file), self._partial(file))]
        inside = self.storage.resolve()
        for place in places:
            if not place.parent.resolve().is_relative_to(inside):
                hint = "remove the links in that folder"
                raise DownloadError(f"a file of the repository would lie outside {inside}", where=place, hint=hint)

    def _make_current(self) -> None:
        with into_place(self.storage / "refs" / "main") as partial:
            partial.write_text(self.repository.commit, encoding="utf-8")

    def _blob(self, file: RemoteFile) -> Path:
        return self.storage / "blobs" / file.digest

    def _partial(self, file: RemoteFile) -> Path:
        return self.storage / "blobs" / f"{file.digest}.rlx.incomplete"

    def _check_room(self, files: Iterable[RemoteFile]) -> None:
        missing = [file for file in files if not self._is_there(file)]
        partial = sum(p.stat().st_size for p in map(self._partial, missing) if p.exists())
        needed = sum(file.nbytes for file in missing) - partial
        free = shutil.disk_usage(self.storage).free
        if missing and needed + SPARE > free:
            what = f"the download takes {size(needed)}, and {size(free)} are free"
            raise DownloadError(what, where=self.storage, hint="make room, or name another folder by HF_HUB_CACHE")

    def _is_there(self, file: RemoteFile) -> bool:
        blob = self._blob(file)
        return blob.is_file() and blob.stat().st_size == file.nbytes

    def _file(self, file: RemoteFile) -> Path:
        from filelock import FileLock, Timeout

        path = self.snapshot / file.name
        lock = FileLock(self.locks / f"{file.digest}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self.say(f"{file.name}: waiting for another download of it")
            lock.acquire()
        try:
            if not self._is_there(file):
                self._download(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.unlink(missing_ok=True)  # a link to nothing
                _link(self._blob(file), path)
        finally:
            lock.release()
        return path

    def _download(self, file: RemoteFile) -> None:
        partial = self._partial(file)
        where = f"{self.repository.name}, {file.name}"
        url = f"{self.repository.name}/resolve/{self.repository.commit}/{quote(file.name)}"
        with open(partial, "r+b" if partial.exists() else "w+b") as out:
            if out.seek(0, os.SEEK_END) > file.nbytes:
                out.seek(0)
                out.truncate()
            if found := out.tell():
                self.say(f"{file.name}: going on at {size(found)} of {size(file.nbytes)}")
            _Fetch(url, file, out, where, self.progress).run()
            out.flush()
            os.fsync(out.fileno())
            found_digest = _digest(out, file)
        if found_digest != file.digest:
            partial.unlink()
            what = f"what arrived is damaged: it hashes to {found_digest[:12]}, expected {file.digest[:12]}"
            raise DownloadError(what, where=where, hint="it was removed; run the command again")
        os.replace(partial, self._blob(file))


@dataclass
class _Fetch:
    """One file by HTTP, from where `out` ends. The URL names a commit, so that its bytes never change."""

    url: str
    file: RemoteFile
    out: IO[bytes]
    where: str
    progress: Progress | None

    def run(self) -> None:
        """Goes on after a connection that broke off, as long as it gets further."""
        idle, furthest, broken = 0, self.out.tell(), list[str]()
        while (at := self.out.tell()) < self.file.nbytes:
            with named_http_errors(self.where, broken):
                self._stream(at)
            idle = 0 if self.out.tell() > furthest else idle + 1
            furthest = max(furthest, self.out.tell())
            if idle >= ATTEMPTS:
                what = f"the connection breaks off at {size(at)} of {size(self.file.nbytes)}"
                reason = f": {broken[-1]}" if broken else ""
                hint = "run the command again later: it goes on from there"
                raise DownloadError(f"{what}{reason}", where=self.where, hint=hint)

    def _stream(self, at: int) -> None:
        with asked(self.url, self.where, {"Range": f"bytes={at}-"} if at else None) as answer:
            whole = answer.status_code == 416 or (at and answer.status_code == 200)
            if whole:  # the server does not go on in the middle
                self.out.seek(0)
                self.out.truncate()
            if answer.status_code == 416:
                return
            for chunk in answer.iter_raw():
                if self.out.tell() + len(chunk) > self.file.nbytes:
                    what = f"more than its {self.file.nbytes} bytes arrive"
                    raise DownloadError(what, where=self.where, hint="run the command again")
                self.out.write(chunk)
                if self.progress is not None:
                    self.progress(f"downloading {self.file.name}", self.out.tell(), self.file.nbytes)


def _digest(out: IO[bytes], file: RemoteFile) -> str:
    """SHA-256 of a large file's bytes; of a small one the id that Git gives them."""
    digest = hashlib.sha256() if file.is_large else hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    out.seek(0)
    while chunk := out.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _link(blob: Path, path: Path) -> None:
    """`path` as a relative link to a blob, or a second name of it where the file system has no such links."""
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:
        os.link(blob, path)


@contextmanager
def _named_system_errors(where: str) -> Iterator[None]:
    """What the system refuses while files are written becomes a `DownloadError`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room, or name another folder by HF_HUB_CACHE; the download goes on where it ended"
        what = "the disk is full" if full else f"it cannot be written: {error.strerror or error}"
        place = getattr(error, "filename", None) or where
        raise DownloadError(what, where=place, hint=hint) from error


@dataclass(frozen=True)
class DownloadedModel:
    """A model that was downloaded.

    Attributes:
        repo: its repository, `org/repo`.
        model: its files.
        used: when its weights were last read, as a time of the system; some file systems keep that by the day only.
    """

    repo: str
    model: FoundModel
    used: float

    @property
    def name(self) -> str:
        """What to call it on the command line."""
        return f"{self.repo}:{self.model.quantization}" if self.model.quantization else self.repo


def downloaded() -> list[DownloadedModel]:
    """The models of the main branches of all repositories in the folder, the most recently used first."""
    found = [model for folder in hub.folder().glob("models--*--*") for model in _of_repository(folder)]
    return sorted(found, key=lambda model: -model.used)


def _of_repository(folder: Path) -> Iterator[DownloadedModel]:
    repo = "/".join(folder.name.split("--")[1:])
    try:
        snapshot = hub.snapshot(repo) if hub.is_name(repo) else None
        for model in models_in(snapshot, deep=True) if snapshot else ():
            yield DownloadedModel(repo, model, max(file.stat().st_atime for file in model.files))
    except (OSError, UnicodeDecodeError):  # removed meanwhile, or of another user
        return


def find(name: str) -> list[DownloadedModel]:
    """The downloaded models that a name means: all of `org/repo`, or the one of `org/repo:QUANT`.

    Raises:
        ModelFileError: there is none.
    """
    base, quantization = split_quantization(name)
    there = downloaded()
    tag = (quantization or "").upper()
    found = [each for each in there if each.repo == base and tag in ("", (each.model.quantization or "").upper())]
    if found:
        return found
    if Path(name).expanduser().exists():
        raise ModelFileError(
            "this is no name of a downloaded model, but a path", where=Path(name), hint="remove it yourself"
        )
    close = nearest(name, [*(each.name for each in there), *(each.repo for each in there)])
    hint = f"did you mean {close[0]}?" if close else "`rlx list` shows what there is"
    raise ModelFileError(f"no model named {name!r} was downloaded", hint=hint)


def remove(models: Iterable[DownloadedModel]) -> None:
    """Removes models; of a repository that then holds none, everything.

    Raises:
        ModelFileError: the system refuses.
    """
    for each in models:
        folder = hub.folder(each.repo)
        try:
            for path in each.model.files:
                _remove_file(path, folder / "blobs")
            if not any(_of_repository(folder)):
                shutil.rmtree(folder)
                shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
        except OSError as error:
            raise file_error(ModelFileError, "the model cannot be removed", error, error.filename or folder) from error


def _remove_file(path: Path, blobs: Path) -> None:
    """Removes a name, and what it leads to if that is a blob of the same repository that no other name leads to."""
    blob = path.resolve()
    path.unlink()
    others = (each.resolve() for each in (blobs.parent / "snapshots").rglob("*") if each.is_symlink())
    if blob.parent == blobs.resolve() and blob not in others:
        blob.unlink(missing_ok=True)
