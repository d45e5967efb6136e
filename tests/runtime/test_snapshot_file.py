"""Snapshots in files: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.errors import SnapshotError
from rlx.runtime.snapshot import Snapshot


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


def test_saving_replaces_a_file_whole(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"something older")
    snapshot().save(tmp_path / "s")
    assert Snapshot.load(tmp_path / "s").ids == (5, 0, 7)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be written"):
        snapshot().save(tmp_path / "none" / "s")
    with pytest.raises(SnapshotError, match="cannot be read"):
        Snapshot.load(tmp_path / "s")


def test_a_snapshot_says_what_it_is() -> None:
    one = snapshot()
    assert repr(one) == f"<Snapshot of {len(one.ids)} tokens, {one.nbytes} bytes>"


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x80\4nothing", b"GGUF" + bytes(60)])
def test_files_of_other_kinds(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(SnapshotError, match=r"no snapshot, or a damaged one: it is no \.npz file\. Save it again"):
        Snapshot.load(tmp_path / "s")


@pytest.mark.parametrize("length", range(0, 900, 37))
def test_a_file_cut_short(length: int, tmp_path: Path) -> None:
    snapshot().save(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    assert len(data) > 900
    (tmp_path / "s").write_bytes(data[:length])
    with pytest.raises(SnapshotError):
        Snapshot.load(tmp_path / "s")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rlx": None}, "no snapshot"),
        ({"ids": None}, "no snapshot"),
        ({"ids": np.array([[1, 2]], np.int32)}, "no list of ids"),
        ({"ids": np.array([1, -2], np.int32)}, "no list of ids"),
        ({"rlx": b"{"}, "no snapshot"),
        ({"rlx": b"[]"}, "no snapshot"),
        ({"rlx": json.dumps({"format": 99, "model": "m", "formats": {}}).encode()}, "format is 99, expected 1"),
        ({"rlx": json.dumps({"format": 1, "model": 3, "formats": {}}).encode()}, "header"),
        ({"state/k.0": np.array(["text"])}, "is of <U4|is of str"),
        ({"state/k.0": np.array([object()])}, "no snapshot"),
    ],
)
def test_what_is_inside_is_checked(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    snapshot().save(tmp_path / "s")
    with np.load(tmp_path / "s") as file:
        arrays = {name: file[name] for name in file.files}
    for name, value in changes.items():
        if value is None:
            del arrays[name]
        else:
            arrays[name] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    with (tmp_path / "s").open("wb") as out:
        np.savez(out, **arrays)
    with pytest.raises(SnapshotError, match=message):
        Snapshot.load(tmp_path / "s")


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    snapshot().save(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    with zipfile.ZipFile(tmp_path / "s") as archive:
        offset = archive.getinfo("state/net.1.npy").header_offset
    data[offset + 220] ^= 1
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(SnapshotError):
        Snapshot.load(tmp_path / "s")
