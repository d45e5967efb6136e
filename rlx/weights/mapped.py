"""Model files in memory: mapped read-only, with byte views of tensors, whose pages can be released after packing.

First step of the weights stage: the format readers (`gguf.py`, `safetensors.py`) find tensors, this file holds their
bytes. A mapped file that another process truncates kills the reader with SIGBUS; `mmap=False` reads the
file into memory once and has no such risk.
"""

from __future__ import annotations

import mmap as _mmap
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import platform
from rlx.closing import Closing
from rlx.errors import ModelFileError, WeightError, file_error
from rlx.ir.dtypes import DType

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | _mmap.mmap


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, type, shape and size of one tensor, as its file states them.

    Attributes:
        name: the file's own name.
        dtype: storage type, block formats included.
        shape: row-major, the fastest dimension last (PyTorch order, the reverse of GGUF's `ne`).
        nbytes: size in the file, in bytes.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


class MappedFile:
    """One regular file, mapped read-only (or read into memory with `mmap=False`).

    Attributes:
        buffer: the bytes; slices of it are `bytes`, `struct.unpack_from` reads it in place.
        size: bytes at the time of opening.
        stamp: size and time of change in nanoseconds, of then.

    Raises:
        ModelFileError: missing, unreadable, not a regular file, or empty.
    """

    def __init__(self, path: Path, *, mmap: bool = True) -> None:
        self.path = path
        self.buffer: Buffer
        self.buffer, found = _open(path, mmap)
        self.size = len(self.buffer)
        self.stamp = _stamp(found)
        self._bytes: Bytes | None = np.frombuffer(self.buffer, np.uint8)
        self._bytes.flags.writeable = False

    def view(self, offset: int, nbytes: int) -> Bytes:
        """A read-only view, uint8 [nbytes], without a copy; it stays valid after `close`.

        Raises:
            ModelFileError: the file was closed.
        """
        if self._bytes is None:
            raise ModelFileError("the file was closed", where=self.path, hint="read tensors before close()")
        return self._bytes[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Releases the pages that lie completely inside the range: they no longer count as memory of this process.
        Reading them again maps them again.
        """
        first = -(-offset // _mmap.PAGESIZE) * _mmap.PAGESIZE
        last = (offset + nbytes) // _mmap.PAGESIZE * _mmap.PAGESIZE
        if first < last and isinstance(self.buffer, _mmap.mmap):
            platform.current().release(self.buffer, first, last - first)

    def close(self) -> None:
        """Drops the mapping. The memory is released with the last view of it."""
        self._bytes, self.buffer = None, b""


class MappedTensors(Closing):
    """Tensors found in mapped files: the half of a `WeightLoader` that does not depend on the format.

    Attributes:
        path: what was opened.
        tensors: the file's own names, in file order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = {}
        self._places: dict[str, tuple[MappedFile, int]] = {}
        self._files: list[MappedFile] = []

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes in the file: a read-only view, uint8 [nbytes], without a copy.

        Raises:
            WeightError: the file has no tensor of that name.
            ModelFileError: the file was closed.
        """
        file, offset = self._place(name)
        return file.view(offset, self.tensors[name].nbytes)

    def release(self, name: str) -> None:
        """Releases the pages that lie completely inside the tensor; no effect on systems that cannot."""
        file, offset = self._place(name)
        file.release(offset, self.tensors[name].nbytes)

    def stamps(self) -> list[tuple[str, int, int]]:
        """(path, size in bytes, modification time in nanoseconds) of each file, as of opening."""
        return [(str(file.path.resolve()), *file.stamp) for file in self._files]

    def close(self) -> None:
        """Drops the mappings. Views that callers hold stay valid."""
        for file in self._files:
            file.close()

    def _place(self, name: str) -> tuple[MappedFile, int]:
        if name not in self._places:
            raise WeightError(f"there is no tensor {name!r} among the {len(self.tensors)} in the file", where=self.path)
        return self._places[name]


def _open(path: Path, mmap: bool) -> tuple[Buffer, os.stat_result]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError("this is not a regular file", where=path)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size == 0:
                raise ModelFileError("the file is empty", where=path, hint="the download or the copy failed: repeat it")
            return (_mmap.mmap(file.fileno(), 0, access=_mmap.ACCESS_READ) if mmap else file.read()), found
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise file_error(ModelFileError, "the file cannot be read", error, path) from error


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


class Header(Closing):
    """The header that a model file would have.

    Args:
        path: shown in errors: what the header was made from.
        format: `gguf` or `safetensors`.
        metadata: GGUF key-values, or a parsed `config.json`.
        tensors: in the order of the file.
        values: the bytes of the few small tensors whose values are part of a program.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        metadata: Mapping[str, Any],
        tensors: Iterable[TensorInfo],
        values: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self.path, self.format, self.metadata = path, format, metadata
        self.tensors: Mapping[str, TensorInfo] = {info.name: info for info in tensors}
        self._values = dict(values or {})

    def raw(self, name: str) -> Bytes:
        if name not in self._values:
            hint = "it compiles, but only a model with weights runs: name a model file"
            raise WeightError("there are no weights", where=self.path, hint=hint)
        return np.ascontiguousarray(self._values[name]).reshape(-1).view(np.uint8)

    def release(self, name: str) -> None:
        """No effect: there is no memory to release."""

    def stamps(self) -> list[tuple[str, int, int]]:
        return []

    def close(self) -> None:
        """No effect: there is no file."""
