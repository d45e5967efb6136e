"""The golden checkpoints (tests/data/README.md) as files that can be mapped; in the repository they are compressed."""

from __future__ import annotations

import lzma
import os
import shutil
from functools import cache
from pathlib import Path

PACKED = Path(__file__).parent / "data" / "goldens"
ENV = "TEST_GOLDENS"  # the run's own folder, made and removed by conftest.py, shared by its workers


@cache
def goldens() -> Path:
    """A folder like tests/data/goldens with the models unpacked."""
    folder = Path(os.environ[ENV])
    for source in sorted(path for path in PACKED.rglob("*") if path.is_file()):
        target = folder / source.relative_to(PACKED)
        target = target.with_suffix("") if source.suffix == ".xz" else target
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            _unpack(source, partial)
            partial.replace(target)  # whole at once, for a second worker looks whether it is there
    return folder


def _unpack(source: Path, target: Path) -> None:
    if source.suffix == ".xz":
        target.write_bytes(lzma.decompress(source.read_bytes()))
    else:
        shutil.copyfile(source, target)
