"""Safetensors reader: tensors against the `safetensors` package, and what it refuses, by name."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import ConfigError, ModelFileError, RlxError, SafetensorsError, UnsupportedModelError, WeightError
from rlx.weights.loader import WeightLoader
from rlx.weights.safetensors import MAX_HEADER_BYTES, SafetensorsFile, parse_header


def entry(dtype: str, shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file(header: dict[str, Any] | bytes, data: int = 0, *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(i % 251 for i in range(data))


ONE = {"a": entry("F32", [2, 3], 0, 24)}
TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(ONE["a"]).encode(),) * 2)
DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

CASES: dict[str, tuple[bytes, type[RlxError], str]] = {
    "empty": (b"", SafetensorsError, "0 bytes, too few for a header"),
    "short": (b"\1\0\0", SafetensorsError, "3 bytes, too few"),
    "length_past_end": (file(ONE, length=10_000), SafetensorsError, "is 10000 bytes long, the file has"),
    "length_huge": (
        file(ONE, length=(1 << 64) - 1), SafetensorsError, f"at most {MAX_HEADER_BYTES} are allowed"),
    "length_0": (file(b""), SafetensorsError, "does not begin with '{'"),
    "leading_space": (file(b" {}"), SafetensorsError, "does not begin with '{'"),
    "not_utf8": (file(b'{"\xff":1}'), SafetensorsError, "the JSON does not parse: 'utf-8' codec"),
    "not_json": (file(b"{]"), SafetensorsError, "the JSON does not parse"),
    "nested": (file(DEEP), SafetensorsError, "does not parse: it is nested too deeply"),
    "duplicate": (file(TWICE, 24), SafetensorsError, "'a' occurs twice"),
    "float_size": (file({"a": entry("F32", [2.0, 3], 0, 24)}, 24), SafetensorsError, "2.0 is not a size"),
    "negative_size": (file({"a": entry("F32", [-2, -3], 0, 24)}, 24), SafetensorsError, "-2 is not a size"),
    "minus_zero": (file(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), SafetensorsError, "-0 is not"),
    "endless_size": (file(b'{"a":{"dtype":"F32","shape":[' + b"1" * 5000 + b"]}}"), SafetensorsError, "does not parse"),
    "many_dims": (file({"a": entry("F32", [1] * 17, 0, 4)}, 4), SafetensorsError, "'a' has the shape"),
    "many_parts": (file(b'{"a":[' + b"[]," * (1 << 20) + b"1]}"), SafetensorsError, "too many to be read"),
    "nan": (file(b'{"a":NaN}'), SafetensorsError, "NaN is not a size"),
    "bool_size": (file({"a": entry("F32", [True], 0, 4)}, 4), SafetensorsError, r"'a' has the shape \[True\]"),
    "shape_no_list": (file({"a": entry("F32", 6, 0, 24)}, 24), SafetensorsError, "'a' has the shape 6"),
    "no_object": (file({"a": 1}), SafetensorsError, "'a' is not described by data_offsets, dtype, shape"),
    "no_dtype": (file({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4), SafetensorsError, "'a' is not described"),
    "unknown_field": (file({"a": {**ONE["a"], "x": 1}}, 24), SafetensorsError, "'a' is not described"),
    "dtype_number": (file({"a": {**ONE["a"], "dtype": 1}}, 24), SafetensorsError, "'a' has the dtype 1"),
    "dtype_fp8": (file({"a": entry("F8_E5M2", [4], 0, 4)}, 4), UnsupportedModelError, "'a' has the dtype F8_E5M2"),
    "dtype_u16": (file({"a": entry("U16", [2], 0, 4)}, 4), UnsupportedModelError, "'a' has the dtype U16"),
    "three_offsets": (
        file({"a": {**ONE["a"], "data_offsets": [0, 8, 24]}}, 24), SafetensorsError, "data_offsets .* expected two"),
    "reversed": (file({"a": entry("F32", [6], 24, 0)}, 24), SafetensorsError, "takes 24 bytes, its data -24"),
    "too_small": (file({"a": entry("F32", [7], 0, 24)}, 24), SafetensorsError, "takes 28 bytes, its data 24"),
    "product_wraps": (
        file({"a": entry("F32", [1 << 33, 1 << 33], 0, 0)}), SafetensorsError, "'a' has the shape"),
    "gap": (
        file({**ONE, "b": entry("F16", [2], 28, 32)}, 32), SafetensorsError, "'b' leaves a gap: .* at 28, expected 24"),
    "overlap": (file({**ONE, "b": entry("F16", [2], 20, 24)}, 24), SafetensorsError, "'b' overlaps the one before"),
    "first_gap": (file({"a": entry("F32", [1], 4, 8)}, 8), SafetensorsError, "'a' leaves a gap"),
    "data_short": (file(ONE, 23), SafetensorsError, "end at byte 24 of the data, the data has 23 .* cut short"),
    "data_long": (file(ONE, 25), SafetensorsError, "end at byte 24 of the data, the data has 25"),
    "metadata_number": (file({"__metadata__": {"a": 1}}), SafetensorsError, "__metadata__ is not an object of strings"),
    "metadata_list": (file({"__metadata__": ["a"]}), SafetensorsError, "__metadata__ is not"),
    "metadata_surrogate": (file(b'{"__metadata__":{"a":"\\ud800"}}'), SafetensorsError, "__metadata__ is not"),
    "name_surrogate": (
        file(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4), SafetensorsError, "not valid Uni"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_crafted_file(name: str) -> None:
    raw, error, message = CASES[name]
    with pytest.raises(error) as caught:
        parse_header(raw, "f.safetensors")
    assert type(caught.value) is error
    assert str(caught.value).startswith("f.safetensors: ")
    assert re.search(message, str(caught.value)), str(caught.value)


# --- the same as the `safetensors` package


def ours(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """name -> (dtype, shape, bytes), or None if the file is refused, which must be by one of our errors."""
    try:
        tensors, offsets = parse_header(raw, "f.safetensors")
    except ModelFileError:
        return None
    return {
        name: (info.dtype.name.upper(), info.shape, raw[offsets[name] : offsets[name] + info.nbytes])
        for name, info in tensors.items()
    }


def theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        found = safetensors.deserialize(raw)
    except safetensors.SafetensorError:
        return None
    # rlx reads a mask as bytes.
    return {n: (each["dtype"].replace("BOOL", "U8"), tuple(each["shape"]), bytes(each["data"])) for n, each in found}


def agree(raw: bytes) -> None:
    found = ours(raw)
    assert found is not None and found == theirs(raw)


def no_more_than_the_library(raw: bytes) -> None:
    """What we accept the library accepts, with the same tensors."""
    found = ours(raw)
    assert found is None or found == theirs(raw)


def test_the_crafted_files_are_no_more_than_the_library_accepts() -> None:
    accepted_by_library = {name for name, (raw, _, _) in CASES.items() if theirs(raw) is not None}
    stricter = {"duplicate", "leading_space", "unknown_field", "dtype_fp8", "dtype_u16", "many_dims"}
    assert accepted_by_library == stricter


DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SHAPES = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4)), max_size=5)


def build(tensors: list[tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {}
    at = 0
    for i, (dtype, shape) in enumerate(tensors):
        end = at + DTYPES[dtype] * int(np.prod(shape))
        header[f"t{i}"] = entry(dtype, shape, at, end)
        at = end
    return header, at


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.randoms(use_true_random=False))
def test_valid_files_agree_with_the_library(tensors: list[tuple[str, list[int]]], random: Any) -> None:
    header, size = build(tensors)
    names = list(header)
    random.shuffle(names)
    agree(file({name: header[name] for name in names}, size))


JUNK: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([1 << 32, 1 << 62, 1 << 63, 1 << 64, 1.0, True, None, "F32", "F4", "", "é", []]),
)


@settings(max_examples=100, deadline=None)
@given(SHAPES.filter(bool), st.data())
def test_changed_headers_are_no_more_than_the_library_accepts(tensors: list[tuple[str, list[int]]], data: Any) -> None:
    header, size = build(tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        each = header[data.draw(st.sampled_from(sorted(header)))]
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
        if field in ("shape", "data_offsets") and isinstance(each[field], list) and each[field]:
            each[field][data.draw(st.integers(0, len(each[field]) - 1))] = data.draw(JUNK)
        else:
            each[field] = data.draw(JUNK)
    no_more_than_the_library(file(header, max(0, size + data.draw(st.sampled_from([0, 0, 0, -1, 1])))))


SMALL = file({"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], 0, 24), "bb": entry("BF16", [4], 24, 32)}, 32)


def test_every_truncation_is_refused() -> None:
    agree(SMALL)
    assert not [length for length in range(len(SMALL)) if ours(SMALL[:length]) is not None]
    with pytest.raises(SafetensorsError, match=r"the header is \d+ bytes long, the file has \d+ left"):
        parse_header(SMALL[:-36], "f.safetensors")  # without the data, and four bytes more


# --- checkpoints on disk


def save(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Written by the library, so that what we read back is its own idea of a file."""
    kinds = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}
    specs = {
        name: safetensors.TensorSpec(
            dtype=kinds[str(value.dtype)], shape=value.shape, data_ptr=value.ctypes.data, data_len=value.nbytes
        )
        for name, value in tensors.items()
    }
    safetensors.serialize_file(specs, path)


A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(6, dtype=np.float16).reshape(2, 3)
C = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2 in bf16
CONFIG = {"model_type": "gemma3", "text_config": {"hidden_size": 4}}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save(tmp_path / "model.safetensors", {"a": A, "b": B, "c": C})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(tmp_path / "model-00001-of-00002.safetensors", {"a": A, "b": B})
    save(tmp_path / "model-00002-of-00002.safetensors", {"c": C})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {name: f"model-0000{part}-of-00002.safetensors" for name, part in (("a", 1), ("b", 1), ("c", 2))}
    write_index(tmp_path, weight_map)
    return tmp_path


def write_index(directory: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 64}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def check(found: SafetensorsFile) -> None:
    assert isinstance(found, WeightLoader)
    assert found.format == "safetensors" and found.metadata == CONFIG
    for name, value, dtype in (("a", A, "f32"), ("b", B, "f16"), ("c", C, "bf16")):
        info = found.tensors[name]
        assert (info.name, info.dtype.name, info.shape, info.nbytes) == (name, dtype, value.shape, value.nbytes)
        assert found.raw(name).tobytes() == value.tobytes()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_single_file(single: Path, name: str, mmap: bool) -> None:
    with SafetensorsFile(single / name, mmap=mmap) as found:
        check(found)
        assert found.generation_config == {}
        found.release("a")
        assert found.raw("a").tobytes() == A.tobytes()
    with pytest.raises(ModelFileError, match="was closed"):
        found.raw("a")


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_shards(sharded: Path, name: str) -> None:
    with SafetensorsFile(sharded / name) as found:
        check(found)
        with pytest.raises(WeightError, match="there is no tensor 'd' among the 3"):
            found.raw("d")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (None, ConfigError, r"config\.json: the file is missing\. Put the checkpoint's"),
        ("{", ConfigError, r"config\.json: the JSON does not parse"),
        ('{"a": 1, "a": 2}', ConfigError, "'a' occurs twice"),
        ("[]", ConfigError, "the JSON is a list"),
        ("\udcff", ConfigError, "does not parse: 'utf-8' codec"),
        ('{"quantization_config": {"quant_method": "hqq"}}', UnsupportedModelError, r"quantization_config: hqq\)"),
    ],
)
def test_config_must_be_there_and_parse(single: Path, config: str | None, error: type[RlxError], message: str) -> None:
    (single / "config.json").unlink()
    if config is not None:
        (single / "config.json").write_text(config, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(error, match=message) as caught:
        SafetensorsFile(single)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        (None, SafetensorsError, "the index has no weight_map"),
        ({}, SafetensorsError, "the index has no weight_map"),
        (
            {"a": "../x.safetensors"},
            SafetensorsError,
            r"'a' is said to be in '\.\./x\.safetensors', which is not a file",
        ),
        ({"a": "/etc/passwd"}, SafetensorsError, "'/etc/passwd', which is not a file name"),
        ({"a": ".."}, SafetensorsError, "which is not a file name"),
        ({"a": ""}, SafetensorsError, "which is not a file name"),
        ({"a": 5}, SafetensorsError, "in 5, which is not a file name"),
        ({"a": "nul\0"}, SafetensorsError, "which is not a file name"),
        ({"a": "absent.safetensors"}, ModelFileError, r"absent\.safetensors: the file cannot be read: No such file"),
        ({"d": "model-00001-of-00002.safetensors"}, SafetensorsError, "'d' should be in .* but is in no shard"),
        (
            {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
            SafetensorsError,
            "'a' should be in model-00002-of-00002.safetensors but is in model-00001-of-00002.safetensors",
        ),
    ],
)
def test_an_index_must_fit_its_shards(sharded: Path, weight_map: object, error: type[RlxError], message: str) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(error, match=message) as caught:
        SafetensorsFile(sharded)
    assert type(caught.value) is error
