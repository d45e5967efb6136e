"""The models in the folder that all tools of the Hugging Face hub share: what is there, and removing it.

Part of the weights stage, beside `pull.py`. Nothing here uses the network.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.arguments import nearest
from rlx.errors import ModelFileError, file_error
from rlx.weights import hub
from rlx.weights.locate import FoundModel, models_in, split_quantization


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
    wanted = (quantization or "").upper()
    found = [each for each in there if each.repo == base and wanted in ("", (each.model.quantization or "").upper())]
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
