"""Opening weights: find the file that a path means, see what format it is in, hand it to the reader.

Entry of the weights stage. What follows (`names.py`, `model.py`, packing) sees only a `WeightLoader`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from rlx.errors import ConfigError, ModelFileError
from rlx.weights.gguf import MAGIC, GgufFile
from rlx.weights.gguf_split import part_number
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.safetensors import INDEX_NAME, SINGLE_NAME, Config, SafetensorsFile

__all__ = ["TensorInfo", "WeightLoader", "open_weights", "resolve_model_path"]

PREFERRED = "Q4_K_M"  # of several GGUF files in a directory
SUFFIXES = (".gguf", ".safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_LFS_POINTER = b"version https://git"
_NO_DOWNLOADS = "rlx downloads nothing: give the path of a model on this machine"
_GIVE = "give a .gguf file, a .safetensors file or a directory that holds one"


@runtime_checkable
class WeightLoader(Protocol):
    """An open model file, whatever its format.

    Attributes:
        path: what was opened.
        format: `gguf` or `safetensors`.
        metadata: GGUF key-values, or the parsed `config.json`.
        tensors: the file's own names.
    """

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes: a read-only 1-D uint8 view, no copy; `WeightError` if there is none of that name."""
        ...

    def release(self, name: str) -> None:
        """Give back the memory of the pages wholly inside the tensor; does nothing where the system cannot."""
        ...

    def stamps(self) -> list[tuple[str, int, int]]:
        """(path, size, time of change in nanoseconds) of each file when it was opened."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...


def open_weights(path: str | os.PathLike[str], *, mmap: bool = True, config: Config | None = None) -> WeightLoader:
    """Open the model at `path`: a GGUF file, a safetensors file or index, or a directory that holds one.

    Args:
        path: see `resolve_model_path`.
        mmap: map the files (fast, shared between processes); False reads them into memory, for file systems where
            another process may cut a file short.
        config: a `config.json`, or what stands in one, for safetensors weights that lie without theirs.

    Raises:
        ConfigError: `config` was given for a GGUF file, which holds its own.
        ModelFileError: nothing there, or nothing that can be read; its subclasses say which rule a file breaks.
    """
    found = resolve_model_path(path)
    if found.name.endswith(".safetensors.index.json"):
        return SafetensorsFile(found, mmap=mmap, config=config)
    head, suffix = _head(found), found.suffix.lower()
    if head.startswith(MAGIC):
        _refuse_config(found, config)
        return GgufFile(found, mmap=mmap)
    if _is_safetensors(head):
        return SafetensorsFile(found, mmap=mmap, config=config)
    _refuse_lookalikes(found, head, suffix)
    if suffix == ".gguf":
        return GgufFile(found, mmap=mmap)  # says which rule is broken
    if suffix == ".safetensors":
        return SafetensorsFile(found, mmap=mmap, config=config)
    raise ModelFileError(
        f"this is neither a GGUF nor a safetensors file; it begins with {head!r}", where=found, hint=_GIVE
    )


def _refuse_config(path: Path, config: Config | None) -> None:
    if config is not None:
        what = "a config was given, and a GGUF file holds its own"
        raise ConfigError(what, where=path, hint="leave the config out; it is for safetensors weights")


def resolve_model_path(path: str | os.PathLike[str]) -> Path:
    """The file that `path` means: itself, or the weights in a directory.

    In a directory: a `.gguf` file (of several the one with Q4_K_M in its name; vision projectors do not count), else
    `model.safetensors`, else `model.safetensors.index.json`.

    Raises:
        ModelFileError: nothing there, no weights in the directory, or several and no way to choose.
    """
    found = Path(path)
    if not os.fspath(path):
        raise ModelFileError("the path is empty", hint=_GIVE)
    try:
        found = found.expanduser()
        if not found.exists():
            parent = found.parent.absolute()
            hint = f"the directory {parent} holds: {_listing(parent)}" if parent.is_dir() else _NO_DOWNLOADS
            raise ModelFileError("there is no such file or directory", where=found, hint=hint)
        return _in_directory(found) if found.is_dir() else found
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"the path cannot be read: {reason}", where=found) from error


def _in_directory(directory: Path) -> Path:
    names = sorted(entry.name for entry in directory.iterdir())
    if ggufs := _main_ggufs(names):
        return directory / _choose(directory, ggufs)
    for name in (SINGLE_NAME, INDEX_NAME):
        if name in names:
            return directory / name
    what = f"the directory holds no {SINGLE_NAME}, no {INDEX_NAME} and no .gguf file; it holds {_listing(directory)}"
    if any(name.lower().endswith(PICKLES) for name in names):
        raise ModelFileError(what, where=directory, hint=_NO_PICKLES)
    raise ModelFileError(what, where=directory, hint="give the path of the model file itself")


def _main_ggufs(names: list[str]) -> list[str]:
    """GGUF files that hold a language model: no vision projectors, of a split model its first part that is there."""
    first: dict[str, str] = {}
    for name in sorted(name for name in names if name.lower().endswith(".gguf")):
        part = part_number(name)
        first.setdefault(part[0] if part else name, name)
    ggufs = list(first.values())
    return [name for name in ggufs if "mmproj" not in name.lower()] or ggufs


def _choose(directory: Path, names: list[str]) -> str:
    preferred = [name for name in names if PREFERRED.lower() in name.lower()]
    for candidates in (names, preferred):
        if len(candidates) == 1:
            return candidates[0]
    what = f"the directory holds several models: {', '.join(names)}"
    raise ModelFileError(what, where=directory, hint=f"give the path of one, such as {directory / names[0]}")


_NO_PICKLES = (
    "pickled weights can run any code when loaded, so rlx does not read them; "
    "use the model's safetensors or GGUF files, or convert them (`safetensors.torch.save_file`)"
)


def _refuse_lookalikes(path: Path, head: bytes, suffix: str) -> None:
    """An error with the way out for what people often have in place of a model."""
    begins = f"it begins with {head!r}"
    if not head:
        what, hint = "the file is empty", "the download or the copy failed: repeat it"
    elif head.startswith(_LFS_POINTER):
        what, hint = "this is a Git LFS pointer, not the model", "fetch the file with `git lfs pull`"
    elif head.lstrip()[:1] == b"<":
        what, hint = f"this looks like a web page; {begins}", "the download failed: download the file again"
    elif head.startswith(_OLD_GGML):
        what, hint = f"this is a GGML file from before GGUF; {begins}", "get the model as GGUF"
    elif suffix in PICKLES or head.startswith(_ZIP) or (suffix not in SUFFIXES and head[:1] == _PICKLE):
        what, hint = f"this is a pickle or an archive; {begins}", _NO_PICKLES
    else:
        return
    raise ModelFileError(what, where=path, hint=hint)


def _head(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ModelFileError("this is not a regular file", where=path)
        with path.open("rb") as file:
            return file.read(20)
    except OSError as error:
        raise ModelFileError(f"the file cannot be read: {error.strerror}", where=path) from error


def _is_safetensors(head: bytes) -> bool:
    """A plausible header length and the brace that the JSON begins with, whatever the file is called."""
    return len(head) > 8 and head[8:9] == b"{" and head[5:8] == b"\0\0\0"


def _listing(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "nothing"
