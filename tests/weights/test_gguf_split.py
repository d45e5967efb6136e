"""Models split over several GGUF files, written by the `gguf` package: opened by any part, refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import gguf_file

from rlx.errors import GgufError, ModelFileError, RlxError
from rlx.weights import ModelWeights, open_weights

TENSORS = {f"blk.{i}.attn_norm.weight": np.arange(i, i + 8, dtype=np.float32) for i in range(5)}
PARTS = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    gguf_file(tmp_path / "m.gguf", TENSORS, split_max_tensors=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == PARTS
    return tmp_path


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("opened", ["", *PARTS])
def test_any_part_opens_the_whole(split: Path, opened: str, mmap: bool) -> None:
    with open_weights(split / opened, mmap=mmap) as loader:
        assert loader.path == split / PARTS[0] and list(loader.tensors) == list(TENSORS)
        assert loader.metadata["general.architecture"] == "llama" and loader.metadata["llama.block_count"] == 1
        for name, expected in TENSORS.items():
            assert loader.raw(name).tobytes() == expected.tobytes()
            loader.release(name)
    with ModelWeights(open_weights(split / opened, mmap=mmap), "llama") as weights:
        assert weights.unused == []
        np.testing.assert_array_equal(weights.array("blk.4.attn_norm.weight"), TENSORS["blk.4.attn_norm.weight"])


def missing(number: int) -> Callable[[Path], object]:
    return lambda directory: (directory / PARTS[number - 1]).unlink()


def patched(part: int, key: str, code: str, value: int) -> Callable[[Path], object]:
    """Overwrites the number of a key."""

    def change(directory: Path) -> None:
        raw = (directory / PARTS[part]).read_bytes()
        at = raw.index(key.encode()) + len(key) + 4
        new = struct.pack(code, value)
        (directory / PARTS[part]).write_bytes(raw[:at] + new + raw[at + len(new) :])

    return change


def renamed_key(directory: Path) -> None:
    path = directory / PARTS[0]
    path.write_bytes(path.read_bytes().replace(b"split.no", b"split.xx"))


def same_names(directory: Path) -> None:
    path = directory / PARTS[1]
    path.write_bytes(path.read_bytes().replace(b"blk.2.attn_norm", b"blk.0.attn_norm"))


Change = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("change", "opened", "error", "message"),
    [
        (missing(2), "", ModelFileError, r"part 2 of 3 of the split model is missing: m-00002-of-00003\.gguf"),
        (missing(1), "", ModelFileError, r"part 1 of 3 of the split model is missing: m-00001-of-00003\.gguf"),
        (missing(3), PARTS[1], ModelFileError, r"part 3 of 3 of the split model is missing: m-00003-of-00003\.gguf"),
        (patched(1, "split.count", "<H", 4), "", GgufError, r"m-00002-.*: split\.count is 4, expected 3"),
        (patched(1, "split.no", "<H", 2), "", GgufError, r"m-00002-.*: split\.no is 2, expected 1"),
        (
            patched(2, "split.tensors.count", "<i", 9),
            "",
            GgufError,
            r"m-00003-.*: split\.tensors\.count is 9, expected 5",
        ),
        (patched(0, "split.no", "<H", 1), "", GgufError, r"part 2 of 3 .* expected a file called NAME-00002-of-00003"),
        (patched(0, "split.no", "<H", 7), "", GgufError, r"split\.no is 7 and split\.count is 3"),
        (renamed_key, "", GgufError, r"there is no key 'split\.no', but split\.count is 3"),
        (same_names, "", GgufError, r"m-00002-.*: tensor 'blk\.0\.attn_norm\.weight' is in this part and in m-00001-"),
    ],
)
def test_parts_that_are_missing_or_of_another_model(
    split: Path, change: Change, opened: str, error: type[RlxError], message: str
) -> None:
    change(split)
    with pytest.raises(error, match=message) as caught:
        open_weights(split / opened)
    assert type(caught.value) is error
