"""Models that are split over several GGUF files: which files they are, and whether they belong together.

Part of the weights stage, under `gguf.py`. Part N of M is called `NAME-0000N-of-0000M.gguf` and says so in its own
metadata: `split.no` (from 0), `split.count`, `split.tensors.count` (of all parts). Only the first part has the model's
metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.errors import GgufError, ModelFileError

MAX_PARTS = 99_999
_PART = re.compile(r"(.*-)([0-9]{5})(-of-)([0-9]{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_KEYS = ("split.no", "split.count", "split.tensors.count")
_TOGETHER = "download all files of the model again, from one place"


def part_number(name: str) -> tuple[str, int] | None:
    """The model's name and the part's number, from 1, if a file is called like a part."""
    part = _PART.fullmatch(name)
    return (part[1] + part[4], int(part[2])) if part else None


def part_paths(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The files of the model that `path` is a part of, in order; `path` alone if the model is not split.

    Raises:
        GgufError: what the part says of itself is not what its name says.
        ModelFileError: a file is missing.
    """
    count = metadata.get("split.count", 0)
    if count <= 1:
        return [path]
    for key in _KEYS:
        if key not in metadata:
            raise GgufError(f"there is no key {key!r}, but split.count is {count}", where=path, hint=_TOGETHER)
    number = metadata["split.no"] + 1
    if not 1 <= number <= count <= MAX_PARTS:
        raise GgufError(f"split.no is {number - 1} and split.count is {count}", where=path, hint=_TOGETHER)
    part = _PART.fullmatch(path.name)
    if part is None or (int(part[2]), int(part[4])) != (number, count):
        called = f"NAME-{number:05}-of-{count:05}.gguf"
        raise GgufError(
            f"this is part {number} of {count} of a split model, expected a file called {called}",
            where=path,
            hint="give the parts the names that they were made with, in one directory",
        )
    paths = [path.with_name(f"{part[1]}{i:05}{part[3]}{part[4]}{part[5]}") for i in range(1, count + 1)]
    for i, each in enumerate(paths, start=1):
        if not each.exists():
            what = f"part {i} of {count} of the split model is missing: {each.name}"
            raise ModelFileError(what, where=path, hint="all parts must be in one directory")
    return paths


def check_parts(
    paths: Sequence[Path], metadata: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, Any]]
) -> None:
    """Raises `GgufError` unless the files are all parts of one model. A single file that is not split passes."""
    if len(paths) == 1:
        return
    total = metadata[0].get("split.tensors.count")
    for i, (path, keys) in enumerate(zip(paths, metadata, strict=True)):
        for key, expected in zip(_KEYS, (i, len(paths), total), strict=True):
            if keys.get(key) != expected:
                raise GgufError(f"{key} is {keys.get(key)}, expected {expected}", where=path, hint=_TOGETHER)
    places: dict[str, Path] = {}
    for path, names in zip(paths, tensors, strict=True):
        for name in names:
            if name in places:
                what = f"tensor {name!r} is in this part and in {places[name].name}"
                raise GgufError(what, where=path, hint=_TOGETHER)
            places[name] = path
    if len(places) != total:
        what = f"the parts have {len(places)} tensors, split.tensors.count is {total}"
        raise GgufError(what, where=paths[0], hint=_TOGETHER)
