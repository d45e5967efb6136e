"""Opens model files: finds the file of a path, detects its format, and calls the reader of that format.

Entry of the weights stage. Later steps (`names.py`, `model.py`, packing) see only a `WeightLoader`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from rlx import weights
from rlx.closing import Closing
from rlx.errors import ConfigError, ModelFileError, file_error
from rlx.weights.composed import Composed
from rlx.weights.gguf import MAGIC, GgufFile
from rlx.weights.locate import GIVE, NO_PICKLES, PICKLES, SUFFIXES, resolve_model_path
from rlx.weights.mapped import Bytes, TensorInfo

if TYPE_CHECKING:
    from rlx.weights.safetensors import Config

__all__ = ["TensorInfo", "WeightLoader", "model_format", "open_weights", "resolve_model_path"]

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_LFS_POINTER = b"version https://git"


@runtime_checkable
class WeightLoader(Protocol):
    """An open model file, whatever its format.

    Attributes:
        path: what was opened.
        format: `gguf` or `safetensors`.
        metadata: GGUF key-values, or the parsed `config.json`.
        tensors: tensors by their names in the file, in file order.
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
        """The tensor's bytes: a read-only view, uint8 [nbytes], without a copy.

        Raises:
            WeightError: there is no tensor of that name.
            ModelFileError: the file was closed.
        """
        ...

    def release(self, name: str) -> None:
        """Releases the pages that lie completely inside the tensor; no effect on systems that cannot."""
        ...

    def stamps(self) -> list[tuple[str, int, int]]:
        """(path, size in bytes, modification time in nanoseconds) of each file, as of opening."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...


class LoaderOver(Closing):
    """A `WeightLoader` over another, which shows other tensors. It closes the other one.

    Args:
        loader: the other.
        tensors: those of the other that it shows.
        made: those that are made of tensors of the other.
    """

    def __init__(self, loader: WeightLoader, tensors: Mapping[str, TensorInfo], made: Iterable[Composed] = ()) -> None:
        self.loader, self._made = loader, {each.info.name: each for each in made}
        self.tensors = {**tensors, **{name: each.info for name, each in self._made.items()}}

    @property
    def path(self) -> Path:
        return self.loader.path

    @property
    def format(self) -> str:
        return self.loader.format

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.loader.metadata

    def raw(self, name: str) -> Bytes:
        return self._made[name].raw() if name in self._made else self.loader.raw(name)

    def release(self, name: str) -> None:
        for each in self._made[name].files if name in self._made else (name,):
            self.loader.release(each)

    def stamps(self) -> list[tuple[str, int, int]]:
        return self.loader.stamps()

    def close(self) -> None:
        self.loader.close()


def renamed(loader: WeightLoader, rename: Callable[[str], str]) -> LoaderOver:
    """A `WeightLoader` whose tensors have other names. It closes the other one.

    Args:
        rename: the name of a tensor in `loader` -> the name here.
    """
    made = (
        Composed.of(replace(info, name=rename(name)), (name,), partial(loader.raw, name))
        for name, info in loader.tensors.items()
    )
    return LoaderOver(loader, {}, made)


def open_weights(path: str | os.PathLike[str], *, mmap: bool = True, config: Config | None = None) -> WeightLoader:
    """Opens a model: a GGUF file, a safetensors file or index, a directory with one of them, or a downloaded model.

    Args:
        path: see `resolve_model_path`.
        mmap: map the files, which is fast and shares memory between processes. False reads them into memory: the choice
            for file systems on which another process may truncate a file.
        config: a `config.json` (path or contents) for safetensors weights without one.

    Raises:
        ConfigError: `config` was given for a GGUF file, which holds its own.
        ModelFileError: there is no file, or it is no model; subclasses name the rule of the format that it breaks.
    """
    found = resolve_model_path(path)
    if model_format(found) == "safetensors":
        return weights.safetensors.SafetensorsFile(found, mmap=mmap, config=config)
    _refuse_config(found, config)
    return GgufFile(found, mmap=mmap)


def model_format(path: Path) -> str:
    """The format, `gguf` or `safetensors`, by a file's first bytes; by its name if it is an index or damaged.

    Raises:
        ModelFileError: it is neither; the message says what it seems to be.
    """
    if path.name.endswith(".safetensors.index.json"):
        return "safetensors"
    head, suffix = _head(path), path.suffix.lower()
    if head.startswith(MAGIC):
        return "gguf"
    if _is_safetensors(head):
        return "safetensors"
    _refuse_lookalikes(path, head, suffix)
    if suffix in SUFFIXES:
        return suffix[1:]  # its reader says which rule is broken
    raise ModelFileError(
        f"this is neither a GGUF nor a safetensors file; it begins with {head!r}", where=path, hint=GIVE
    )


def _refuse_config(path: Path, config: Config | None) -> None:
    if config is not None:
        what = "a config was given, and a GGUF file holds its own"
        raise ConfigError(what, where=path, hint="leave the config out; it is for safetensors weights")


def _refuse_lookalikes(path: Path, head: bytes, suffix: str) -> None:
    """Raises `ModelFileError` for files that are often taken for a model: pickles, archives, LFS pointers, old GGML."""
    begins = f"it begins with {head!r}"
    if not head:
        what, hint = "the file is empty", "the download or the copy failed: download it again"
    elif head.startswith(_LFS_POINTER):
        what, hint = "this is a Git LFS pointer, not the model", "download the model with `git lfs pull`"
    elif head.lstrip()[:1] == b"<":
        what, hint = f"this looks like a web page; {begins}", "the download failed: download it again"
    elif head.startswith(_OLD_GGML):
        what, hint = f"this is a GGML file from before GGUF; {begins}", "download the model as GGUF"
    elif suffix in PICKLES or head.startswith(_ZIP) or (suffix not in SUFFIXES and head[:1] == _PICKLE):
        what, hint = f"this is a pickle or an archive; {begins}", NO_PICKLES
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
        raise file_error(ModelFileError, "the file cannot be read", error, path) from error


def _is_safetensors(head: bytes) -> bool:
    """Whether the file begins like a safetensors file: a plausible header length (u64), then the brace of JSON."""
    return len(head) > 8 and head[8:9] == b"{" and head[5:8] == b"\0\0\0"
