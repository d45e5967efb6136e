"""Safetensors checkpoints as Hugging Face lays them out: one file, or shards under an index, with `config.json` beside.

Part of the weights stage. Header layout (safetensors format): u64 length, then that many bytes of JSON
`{name: {dtype, shape, data_offsets}}`, then the tensors without gap or overlap. Every rule is checked before a tensor
is handed out; what passes here, the reference library accepts too, but not the other way round (it takes duplicate
names). The library itself is not used: its NumPy front end has no bf16.
"""

from __future__ import annotations

import os
import reprlib
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from rlx import arguments, json_file
from rlx.errors import CUT_SHORT, ConfigError, ModelFileError, SafetensorsError, UnsupportedModelError
from rlx.ir.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, U8, DType
from rlx.json_file import JsonObject, parse_object, read_object
from rlx.weights import quantization
from rlx.weights.locate import INDEX_NAME, SINGLE_NAME
from rlx.weights.mapped import Buffer, MappedFile, MappedTensors, TensorInfo

MAX_HEADER_BYTES = json_file.MAX_BYTES  # about 260,000 tensors; the format allows 100 MB
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 53

_DTYPES = {"F64": F64, "F32": F32, "F16": F16, "BF16": BF16, "I64": I64, "I32": I32, "I16": I16, "I8": I8, "U8": U8}
_DTYPES |= {"F8_E4M3": quantization.CODES, "BOOL": U8}  # masks are no weights
_FIELDS = {"dtype", "shape", "data_offsets"}

Config = str | os.PathLike[str] | Mapping[str, Any]
"""A `config.json`, or what stands in one."""


class SafetensorsFile(MappedTensors):
    """A safetensors checkpoint as a `WeightLoader`.

    Args:
        path: a `.safetensors` file, an index (`*.safetensors.index.json`), or a directory that holds either under its
            usual name.
        mmap: map the files; False reads them into memory.
        config: a `config.json` elsewhere, or what stands in one; by default the one beside the weights.

    Attributes:
        metadata: `config.json` as it stands, nested `text_config` included.
        generation_config: `generation_config.json`, or {} where there is none.
        tensors: name -> `TensorInfo`; integer and f64 tensors are listed (checkpoints hold index buffers), the model
            refuses them where it wants a weight.

    Raises:
        ModelFileError: a file is missing or cannot be read.
        SafetensorsError: a header or the index breaks a rule.
        ConfigError: a JSON file beside the weights is missing or malformed.
        UnsupportedModelError: a tensor of a type that rlx does not have, or a checkpoint quantized in a scheme other
            than FP8.
    """

    format: ClassVar[str] = "safetensors"

    def __init__(self, path: str | Path, *, mmap: bool = True, config: Config | None = None) -> None:
        super().__init__(Path(path))
        main = _main_file(self.path)
        self.metadata: Mapping[str, Any] = read_config(main.parent / "config.json" if config is None else config)
        generation = main.parent / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_object(generation, ConfigError) if generation.exists() else {}
        self.tensors: dict[str, TensorInfo] = {}
        if main.suffix != ".json":
            self._add(main, mmap)
            return
        weight_map = _read_index(main)
        for shard in sorted(set(weight_map.values())):
            self._add(main.parent / shard, mmap)
        self._check_index(main, weight_map)

    def _add(self, path: Path, mmap: bool) -> None:
        file = MappedFile(path, mmap=mmap)
        tensors, offsets = parse_header(file.buffer, str(path))
        for name in tensors:
            if name in self.tensors:
                other = self._places[name][0].path.name
                raise SafetensorsError(f"tensor {name!r} occurs in this file and in {other}", where=path)
        self._files.append(file)
        self.tensors.update(tensors)
        self._places.update((name, (file, offset)) for name, offset in offsets.items())

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        for name, shard in weight_map.items():
            place = self._places.get(name)
            if place is None or place[0].path.name != shard:
                found = "in no shard" if place is None else f"in {place[0].path.name}"
                raise SafetensorsError(f"tensor {name!r} should be in {shard} but is {found}", where=index)


def parse_header(buffer: Buffer, where: str) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Read and check the header of one file.

    Args:
        buffer: the whole file.
        where: name of the file for messages.

    Returns:
        The tensors in order of their data, and where each begins, in bytes from the start of the file.

    Raises:
        SafetensorsError, UnsupportedModelError: see `SafetensorsFile`.
    """
    entries, data_offset = _read_entries(buffer, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) and _is_text(each) for each in _flat(metadata)):
        _fail("__metadata__ is not an object of strings", where)
    found = [_read_entry(name, entry, where) for name, entry in entries.items()]
    found.sort(key=lambda each: each[1:])
    _check_dense(found, len(buffer) - data_offset, where)
    tensors = {info.name: info for info, _, _ in found}
    return tensors, {info.name: data_offset + begin for info, begin, _ in found}


def _fail(what: str, where: object, hint: str | None = None) -> NoReturn:
    raise SafetensorsError(what, where=where, hint=hint)


def _read_entries(buffer: Buffer, where: str) -> tuple[JsonObject, int]:
    if len(buffer) < 8:
        _fail(f"the file has {len(buffer)} bytes, too few for a header", where, CUT_SHORT)
    length = struct.unpack_from("<Q", buffer)[0]
    if length > MAX_HEADER_BYTES:
        _fail(f"the header is {length} bytes long, at most {MAX_HEADER_BYTES} are allowed", where)
    if length > len(buffer) - 8:
        _fail(f"the header is {length} bytes long, the file has {len(buffer) - 8} left", where, CUT_SHORT)
    raw = buffer[8 : 8 + length]
    if raw[:1] != b"{":
        _fail(f"the header does not begin with '{{' but with {raw[:16]!r}", where)
    return parse_object(raw, where, SafetensorsError, sizes_only=True), 8 + length


def _read_entry(name: str, entry: object, where: str) -> tuple[TensorInfo, int, int]:
    """A tensor with the begin and end of its data, from the data section."""
    if not _is_text(name):
        _fail(f"a tensor's name is not valid Unicode: {name!r}", where)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        _fail(f"tensor {name!r} is not described by {', '.join(sorted(_FIELDS))} alone", where)
    dtype = _read_dtype(name, entry["dtype"], where)
    shape, bounds = _sizes(entry["shape"], MAX_DIMS), _sizes(entry["data_offsets"], 2)
    if shape is None or (elements := prod(shape)) > MAX_ELEMENTS or not (elements or _is_small(shape)):
        _fail(f"tensor {name!r} has the shape {reprlib.repr(entry['shape'])}", where)
    if bounds is None or len(bounds) != 2:
        _fail(f"tensor {name!r} has the data_offsets {reprlib.repr(entry['data_offsets'])}, expected two sizes", where)
    begin, end = bounds
    nbytes = dtype.nbytes * elements
    if end - begin != nbytes:
        _fail(f"tensor {name!r} of shape {shape} and type {dtype} takes {nbytes} bytes, its data {end - begin}", where)
    return TensorInfo(name, dtype, shape, nbytes), begin, end


def _read_dtype(name: str, dtype: object, where: str) -> DType:
    if not isinstance(dtype, str):
        _fail(f"tensor {name!r} has the dtype {reprlib.repr(dtype)}, expected a string", where)
    if dtype not in _DTYPES:
        hint = "use a checkpoint in BF16, F16 or F32, or a GGUF file of the model"
        raise UnsupportedModelError(f"tensor {name!r} has the dtype {dtype}", where=where, hint=hint)
    return _DTYPES[dtype]


def _sizes(values: object, most: int) -> tuple[int, ...] | None:
    """The list as a tuple if it is a list of at most `most` integers; the parser lets no negative one through."""
    if isinstance(values, list) and len(values) <= most and set(map(type, values)) <= {int}:
        return tuple(values)
    return None


def _is_small(shape: tuple[int, ...]) -> bool:
    """Of a shape without elements: whether the other dimensions are sizes nevertheless."""
    return prod(max(each, 1) for each in shape) <= MAX_ELEMENTS


def _check_dense(found: list[tuple[TensorInfo, int, int]], size: int, where: str) -> None:
    at = 0
    for info, begin, end in found:
        if begin != at:
            problem = "overlaps the one before it" if begin < at else "leaves a gap"
            _fail(f"tensor {info.name!r} {problem}: its data begins at {begin}, expected {at}", where)
        at = end
    if at != size:
        hint = CUT_SHORT if at > size else None
        _fail(f"the tensors end at byte {at} of the data, the data has {size} bytes", where, hint)


def _main_file(path: Path) -> Path:
    """The file to begin with: the weights themselves or the index of their shards."""
    if not path.is_dir():
        return path
    for name in (SINGLE_NAME, INDEX_NAME):
        if (path / name).exists():
            return path / name
    raise ModelFileError(f"the directory holds neither {SINGLE_NAME} nor {INDEX_NAME}", where=path)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_object(path, SafetensorsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail("the index has no weight_map", path)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            _fail(f"tensor {name!r} is said to be in {shard!r}, which is not a file name of this directory", path)
    return weight_map


def _is_file_name(text: str) -> bool:
    """A plain name. Symbolic links are followed: the hub's own cache is made of them."""
    return bool(text) and text not in (".", "..") and not any(c in "/\\:\0" for c in text) and _is_text(text)


def _is_text(text: str) -> bool:
    """No lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _flat(pairs: JsonObject) -> list[Any]:
    return [*pairs.keys(), *pairs.values()]


def read_config(source: Config) -> JsonObject:
    """A `config.json`, parsed.

    Raises:
        ConfigError: it is missing or malformed.
        UnsupportedModelError: its weights are quantized in a scheme that rlx does not read.
    """
    if isinstance(source, Mapping):
        path, config = Path("config"), dict(source)
    else:
        path = arguments.path("config", source)
        if not path.exists():
            hint = "put the checkpoint's config.json beside its weights"
            raise ConfigError("the file is missing", where=path, hint=hint)
        config = read_object(path, ConfigError)
    for key in ("quantization_config", "quantization"):
        scheme = config.get(key)
        if isinstance(scheme, dict) and scheme and (method := quantization.refusal(scheme)):
            hint = "use the BF16 checkpoint or a GGUF file of the model"
            raise UnsupportedModelError(f"the weights are quantized ({key}: {method})", where=path, hint=hint)
    return config
