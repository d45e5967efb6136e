"""Snapshots in files: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.engine.kv.snapshot import Snapshot
from rlx.errors import SnapshotError

pytestmark = pytest.mark.any_machine


def snapshot() -> Snapshot:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "k.0": random.standard_normal((2, 3, 8)).astype(np.float16),
        "v.0": random.integers(0, 1 << 16, (2, 3, 8)).astype(np.uint16),
        "net.1": random.standard_normal((4, 4)).astype(np.float32),
    }
    formats = {"k.0": "full f16 [2, 8]", "v.0": "full bf16 [2, 8]", "net.1": "recurrent f32 [4, 4]"}
    return Snapshot((5, 0, 7), arrays, formats, "a model")


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    one = snapshot()
    one.save(tmp_path / "s")
    two = Snapshot.load(tmp_path / "s")
    assert (two.ids, two.formats, two.model, two.position) == (one.ids, one.formats, one.model, 3)
    assert two.arrays.keys() == one.arrays.keys()
    for name, value in one.arrays.items():
        assert two.arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(two.arrays[name], value)
        assert not two.arrays[name].flags.writeable
    assert [p.name for p in tmp_path.iterdir()] == ["s"], "no temporary file stays"


def rewritten(path: Path, one: Snapshot | None = None, *, head: dict[str, Any] | None = None, **header: Any) -> None:
    """Writes a snapshot to `path`, with fields of its head and its header replaced and a digest that fits."""
    (one or snapshot()).save(path)
    data = path.read_bytes()
    fields = dict(zip(("magic", "version", "length", "digest"), HEAD.unpack_from(data), strict=True))
    raw, rest = data[HEAD.size :][: fields["length"]], data[HEAD.size + fields["length"] :]
    if "raw" in header:
        raw = header["raw"]
    elif header:
        raw = json.dumps({**json.loads(raw), **header}).encode()
    fields |= {"length": len(raw), "digest": blake2b(raw + rest, digest_size=32).digest(), **(head or {})}
    path.write_bytes(HEAD.pack(*fields.values()) + raw + rest)


def array(name: str = "k.0", dtype: Any = "float16", shape: Any = (2, 3, 8)) -> list[Any]:
    return [name, dtype, shape]


HEAD = struct.Struct("<8sII32s")
IDS_AND_ARRAYS = 12 + 96 + 96 + 64  # bytes
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "magic": ({"head": {"magic": b"RLXSNAPX"}}, "this is not a snapshot: it begins with b'RLXSNAPX'"),
    "version": ({"head": {"version": 3}}, "its version is 3, expected 2"),
    "length": ({"head": {"length": 1 << 31}}, "its header is said to have 2147483648 bytes"),
    "digest": ({"head": {"digest": bytes(32)}}, "its digest does not fit"),
    "no_json": ({"raw": b"{"}, "the JSON does not parse"),
    "list": ({"raw": b"[]"}, "expected an object"),
    "deep": ({"raw": b'{"a":' * 99_999}, "nested too deeply"),
    "field": ({"more": 1}, "its header does not hold model, ids, formats, arrays"),
    "model": ({"model": 3}, "its header does not hold"),
    "format": ({"formats": {"k.0": 3}}, "a format that is no text"),
    "ids_float": ({"ids": 3.0}, "3.0 is not a size"),
    "ids_negative": ({"ids": -1}, "-1 is not a size"),
    "ids_true": ({"ids": True}, "its header does not hold"),
    "ids_many": ({"ids": 1 << 40}, "said to have 1099511627776 ids"),
    "ids_more": ({"ids": 4}, f"take {IDS_AND_ARRAYS + 4} bytes, the file has {IDS_AND_ARRAYS}"),
    "array": ({"arrays": [1]}, "not a name, a type and a shape"),
    "array_twice": ({"arrays": [array(), array()]}, "not a name, a type and a shape"),
    "objects": ({"arrays": [array(dtype="object")]}, "'k.0' is not of a known type and shape"),
    "type_list": ({"arrays": [array(dtype=[["a", "f4"]])]}, "not a name, a type and a shape"),
    "dims": ({"arrays": [array(shape=[1] * 9)]}, "known type and shape"),
    "size_text": ({"arrays": [array(shape=["2"])]}, "known type and shape"),
    "size_large": ({"arrays": [array(shape=[1 << 62, 1 << 62])]}, "take .* bytes, the file has"),
    "size_hidden": ({"arrays": [array(shape=[0, 1 << 70])]}, "take .* bytes, the file has"),
    "too_little": ({"arrays": []}, f"take 12 bytes, the file has {IDS_AND_ARRAYS}"),
}


SPAN = [0, "6162", [1, 2], True]
WRONG_SPANS: dict[str, tuple[Any, str]] = {
    "start": ([["0", *SPAN[1:]]], "span 0 of its header is not a start, a digest, a grid and a flag with rows"),
    "digest": ([[0, "xyz", None, True]], "span 0 of its header"),
    "grid": ([[0, None, [1, 0], True]], "span 0 of its header"),
    "grid_small": ([[0, None, [1, 1], True]], "span 0 of its header"),
    "flag": ([[*SPAN[:3], 1]], "span 0 of its header"),
    "rows": ([SPAN, SPAN], "span 1 of its header"),
    "place": ([[2, *SPAN[1:]]], "its spans end at position 4, its ids at 3"),
    "kind": ({"a": 1}, "its header does not hold"),
}


def test_embedded_spans(tmp_path: Path) -> None:
    """Two images and a caller's own rows."""
    rows = np.random.default_rng(1).standard_normal((3, 2, 4)).astype(np.float32)
    spans = [
        EmbeddedSpan(1, rows[0], b"ab", (2, 1)),
        EmbeddedSpan(3, rows[1], b"c", None, True),
        EmbeddedSpan(5, rows[2]),
    ]
    one = replace(snapshot(), ids=(1, *[9] * 7), embeddings=PromptEmbeddings(tuple(spans)))
    one.save(tmp_path / "s")
    two = Snapshot.load(tmp_path / "s")
    assert two.embeddings is not None
    assert two.nbytes == one.nbytes == snapshot().nbytes + 5 * 4 + rows.nbytes
    assert two.arrays.keys() == one.arrays.keys()
    for span, row, want in zip(two.embeddings.spans, rows, spans, strict=True):
        np.testing.assert_array_equal(span.rows, row)
        assert (span.start, span.digest, span.grid, span.two_way) == (want.start, want.digest, want.grid, want.two_way)


@pytest.mark.parametrize("name", WRONG_SPANS)
def test_every_field_of_a_span_is_checked(name: str, tmp_path: Path) -> None:
    spans, message = WRONG_SPANS[name]
    rows = PromptEmbeddings((EmbeddedSpan(0, np.zeros((2, 4), np.float32)),))
    rewritten(tmp_path / "s", replace(snapshot(), embeddings=rows), spans=spans)
    with pytest.raises(SnapshotError, match=message):
        Snapshot.load(tmp_path / "s")


@pytest.mark.parametrize("name", WRONG)
def test_every_field_is_checked(name: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    rewritten(tmp_path / "s", **changes)
    with pytest.raises(SnapshotError, match=message):
        Snapshot.load(tmp_path / "s")


@pytest.mark.parametrize("content", [b"", b"\x80\4nothing", b"GGUF" + bytes(60), b"RLXSNAP\0"])
def test_files_of_other_kinds(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(SnapshotError, match=r"this is not a snapshot: .* Give a file that Snapshot\.save wrote"):
        Snapshot.load(tmp_path / "s")


@pytest.mark.parametrize("place", range(0, 500, 23))
def test_a_flipped_bit_or_a_cut_is_noticed(place: int, tmp_path: Path) -> None:
    snapshot().save(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    assert len(data) > 500
    for damaged in (data[:place], data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :], data + b"\0"):
        (tmp_path / "s").write_bytes(damaged)
        with pytest.raises(SnapshotError):
            Snapshot.load(tmp_path / "s")
