"""A model ready to be written as GGUF, whatever its source, and the writer of the file.

First step of the export stage: describes a GGUF file (here) or a safetensors directory (`hf.py`) in GGUF's terms: keys,
tensor names, row order. The following steps (`convert`, `quantize`) only choose types and write. Values are read
lazily; a tensor takes memory only while its values are in use. The header needs the types and shapes of all tensors,
but no values, so the bytes of one tensor at a time are made, written and freed. The file is created only when it is
complete.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rlx import env
from rlx.closing import Closing, on_error
from rlx.errors import (
    ArgumentError,
    ConfigError,
    ModelFileError,
    OutputError,
    ResourceError,
    file_error,
    named_refusals,
)
from rlx.export.hf_config import GgufType
from rlx.ir.dtypes import DType
from rlx.ir.stored import dequantize
from rlx.partial_file import into_place
from rlx.weights import TensorInfo
from rlx.weights.gguf import TYPE_NAMES, GgufFile

if TYPE_CHECKING:
    from gguf import GGUFWriter


Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Keys that the writer of the file sets: quantization, layout and split of the file.
WRITERS_KEYS = frozenset({
    "general.file_type", "general.quantization_version", "general.alignment",
    "split.no", "split.count", "split.tensors.count",
})  # fmt: skip


@dataclass(frozen=True)
class ExportTensor:
    """One tensor of the output file.

    Attributes:
        name: GGUF name.
        shape: row-major, the reverse of GGUF's `ne`.
        dtype: type in the source.
        values: returns dequantized float32 of `shape`, after permutations and additions; reads the source.
        raw: returns the 1-D bytes if they can be copied unchanged as `dtype`; else None.
        instead: types that readers of the format do not take for it -> the ones that take their place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    values: Callable[[], Floats]
    raw: Callable[[], Bytes] | None
    instead: Mapping[DType, DType] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportModel(Closing):
    """A source of GGUF metadata and tensors; a context manager that closes the source.

    Attributes:
        path: the opened path.
        arch: `general.architecture`.
        metadata: GGUF key -> (value, its `GgufType`), and (value, (ARRAY, type of the elements)) of an
            array; strings in arrays are str, or bytes where they come from a GGUF file, which may hold any bytes.
            Without `WRITERS_KEYS`.
        tensors: in the order of the output file.
        left_out: names in the source of tensors that are not part of the language model.
        close: closes the source; tensors can no longer be read.
    """

    path: Path
    arch: str
    metadata: Mapping[str, tuple[Any, Any]]
    tensors: tuple[ExportTensor, ...]
    left_out: tuple[str, ...]
    close: Callable[[], None]


@dataclass(frozen=True)
class Written:
    """A GGUF file that was written: what `convert` and `quantize` return.

    Attributes:
        path: the file.
        arch: `general.architecture`.
        type: its type by the common name, such as "BF16" or "Q4_K_M".
        nbytes: its size.
        tensors: (name, type in the source, type in the file) of each tensor, in the order of the file.
        left_out: names in the source of tensors that belong to neither the language model nor its vision tower.
        parameters: number of values in all tensors.
        weighed: how many tensors were rounded by their importance.
        mmproj: the file with the vision tower, if it was written beside this one.
        no_mmproj: why the tower was not written, where the source has one that rlx does not support.
    """

    path: Path
    arch: str
    type: str
    nbytes: int
    tensors: tuple[tuple[str, DType, DType], ...]
    left_out: tuple[str, ...]
    parameters: int
    weighed: int = 0
    mmproj: Written | None = None
    no_mmproj: str | None = None

    @property
    def types(self) -> Counter[DType]:
        """How many tensors have each type."""
        return Counter(dtype for _, _, dtype in self.tensors)

    @property
    def bits(self) -> float:
        """Bits of the file per value."""
        return 8 * self.nbytes / self.parameters


# -- GGUF -------------------------------------------------------------------------------------------------------------


def model_from_gguf(file: GgufFile) -> ExportModel:
    """Describes an open file and takes ownership of it; `ConfigError` if the file names no architecture."""
    if "general.architecture" not in file.metadata:
        raise ConfigError("the key 'general.architecture' is missing", where=file.path)
    return ExportModel(
        path=file.path,
        arch=str(file.metadata["general.architecture"]),
        metadata={key: _gguf_entry(file, key) for key in file.metadata if key not in WRITERS_KEYS},
        tensors=tuple(_gguf_tensor(file, info) for info in file.tensors.values()),
        left_out=(),
        close=file.close,
    )


def _gguf_entry(file: GgufFile, key: str) -> tuple[Any, Any]:
    """A key's value and type, exactly as in the file."""
    name = file.metadata.type_of(key)
    element = name.removeprefix("array of ")
    kind = GgufType(TYPE_NAMES.index(element))
    if element == name:
        return file.metadata[key], kind
    value = file.metadata_bytes(key) if kind is GgufType.STRING else file.metadata[key].tolist()
    return value, (GgufType.ARRAY, kind)


def _gguf_tensor(file: GgufFile, info: TensorInfo) -> ExportTensor:
    return ExportTensor(
        name=info.name,
        shape=info.shape,
        dtype=info.dtype,
        values=lambda: dequantize(file.raw(info.name), info.dtype, info.shape),
        raw=lambda: file.raw(info.name),
    )


_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
Progress = Callable[[str, int, int], None]  # (what, done, total), in bytes of the file

QUANTIZATION_VERSION = 2
ALIGNMENT = 32
MAX_NAME_BYTES = 63  # the longest name that readers of the format accept


@dataclass(frozen=True)
class Planned:
    """A tensor to be written.

    Attributes:
        name: GGUF name.
        shape: row-major.
        dtype: type in the file.
        pieces: makes its bytes in order: 1-D uint8 arrays of any size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: Callable[[], Iterable[Bytes]]

    @property
    def nbytes(self) -> int:
        return self.dtype.size(self.shape)


def check_output(out: Path, source: Path, *, force: bool) -> None:
    """Checks whether the file may be written, before any work is done.

    Raises:
        ArgumentError: `out` is a file of the source, exists while `force` is not set, is no regular file, or its
            folder does not exist.
    """
    if _is_read(out, source):
        raise ArgumentError("this is a file that is read", where=out, hint="Give another name for the result.")
    if out.is_dir():
        raise ArgumentError("this is a folder, expected a name for a file", where=out)
    if out.exists() and not out.is_file():
        raise ArgumentError("this is no regular file", where=out)
    if out.exists() and not force:
        raise _exists(out)
    if not out.parent.is_dir():
        raise ArgumentError("there is no such folder", where=out.parent, hint="Make it first.")


def _exists(out: Path) -> ArgumentError:
    return ArgumentError("the file exists", where=out, hint="Give another name, or force=True.")


def _is_read(out: Path, source: Path) -> bool:
    """Whether `out` is one of the files that the source consists of."""
    if not out.exists() or not source.exists():
        return False
    folder = source if source.is_dir() else source.parent
    if out.samefile(source) or not out.parent.samefile(folder):
        return out.samefile(source)
    if _PART.search(source.name):  # one of several files
        return _PART.sub("", out.name) == _PART.sub("", source.name)
    return source.suffix != ".gguf" and out.suffix in (".json", ".safetensors", ".model")


def write_model(
    out: Path,
    model: ExportModel,
    plan: Sequence[Planned],
    name: str,
    file_type: int,
    *,
    force: bool,
    progress: Progress | None = None,
) -> Written:
    """Writes all tensors of a model, with arguments and errors as of `write_gguf`.

    Args:
        plan: one for each of its tensors, in their order.
        name: of the file type.
    """
    nbytes = write_gguf(out, model, plan, file_type, force=force, progress=progress)
    tensors = tuple((t.name, t.dtype, planned.dtype) for t, planned in zip(model.tensors, plan, strict=True))
    return Written(out, model.arch, name, nbytes, tensors, model.left_out, sum(prod(t.shape) for t in model.tensors))


def write_gguf(
    out: Path,
    model: ExportModel,
    plan: Sequence[Planned],
    file_type: int,
    *,
    force: bool,
    progress: Progress | None = None,
) -> int:
    """Writes the file under another name beside `out` and renames it when it is whole. An error leaves nothing behind.

    What killed processes left in that folder is removed first.

    Args:
        out: the file; see `check_output`.
        model: its metadata is written, with the file type and the version of the block formats.
        plan: the tensors in their order in the file.
        file_type: `general.file_type`, a `gguf.LlamaFileType`.
        force: replaces `out` if it exists, also one that somebody wrote meanwhile.

    Returns:
        The file's size in bytes.

    Raises:
        ArgumentError: `out` exists, and `force` is not set.
        ResourceError: the disk has no room for it, or the system refuses memory or a file descriptor.
        OutputError: the file cannot be written.
        ModelFileError: two tensors have one name, a name is too long, or the pieces of a tensor are not its size.
    """
    _check_names(plan, out)
    total = sum(tensor.nbytes for tensor in plan)
    _check_space(out.parent, sum(_padded(tensor.nbytes) for tensor in plan))
    with _named_errors(out), into_place(out, replace=force) as partial:
        writer = _start(partial, model.arch, model.metadata, plan, file_type)
        try:
            _write_tensors(_file(writer), plan, total, progress)
            _file(writer).flush()
            os.fsync(_file(writer).fileno())
        finally:
            writer.close()
        return partial.stat().st_size


def _check_names(plan: Sequence[Planned], out: Path) -> None:
    names = [tensor.name for tensor in plan]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise ModelFileError(f"two tensors would be named {twice[0]!r}", where=out)
    if long := [name for name in names if len(name.encode()) > MAX_NAME_BYTES]:
        raise ModelFileError(f"the name {long[0]!r} is longer than {MAX_NAME_BYTES} bytes", where=out)


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        what = f"the file needs {env.size(nbytes)} and the disk has {env.size(free)} free"
        raise ResourceError(what, where=folder, hint="Make room, or write to another disk.")


@contextmanager
def _named_errors(out: Path) -> Iterator[None]:
    try:
        with named_refusals(out):
            yield
    except FileExistsError as error:
        raise _exists(out) from error
    except OSError as error:
        if error.errno in (None, errno.EPIPE):  # of the progress callback, not of a file
            raise
        raise file_error(OutputError, "the file cannot be written", error, out) from error


def _start(
    path: Path, arch: str, metadata: Mapping[str, tuple[Any, Any]], plan: Sequence[Planned], file_type: int
) -> GGUFWriter:
    """A writer that has written everything before the data section."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(None, arch)
    for key, (value, kind) in metadata.items():
        if key not in (*WRITERS_KEYS, "general.architecture"):
            _add(writer, key, value, kind)
    writer.add_file_type(file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    for tensor in plan:
        kind = GGMLQuantizationType(tensor.dtype.ggml or 0)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    with on_error(writer.close):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.write_padding(_file(writer), _file(writer).tell())
    return writer


def _add(writer: GGUFWriter, key: str, value: Any, kind: Any) -> None:
    scalar, element = kind if isinstance(kind, tuple) else (kind, None)
    if scalar == GgufType.ARRAY and len(value) == 0:
        return  # GGUFWriter cannot write empty arrays, and readers treat them as absent keys
    writer.add_key_value(key, value, scalar, element)


def _file(writer: GGUFWriter) -> BinaryIO:
    assert writer.fout is not None
    file: BinaryIO = writer.fout[0]
    return file


def _write_tensors(file: BinaryIO, plan: Sequence[Planned], total: int, progress: Progress | None) -> None:
    done = 0
    for tensor in plan:
        start = done
        for piece in tensor.pieces():
            file.write(piece.data)
            done += piece.nbytes
            if progress is not None:
                progress("writing tensors", done, total)
        if done - start != tensor.nbytes:
            what = f"{done - start} bytes were made of a {tensor.dtype}{list(tensor.shape)} of {tensor.nbytes}"
            raise ModelFileError(what, where=tensor.name)
        file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
