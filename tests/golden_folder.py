"""The golden checkpoints (tests/data/README.md) as files that can be mapped. In the repository they are compressed.

python tests/golden_folder.py FOLDER     # unpack them all into FOLDER
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
from functools import cache
from pathlib import Path

PACKED = Path(__file__).parent / "data" / "goldens"
ENV = "TEST_GOLDENS"  # the run's own folder, made and removed by conftest.py, shared by its workers


@cache
def goldens() -> Path:
    """The folder of this test run, like tests/data/goldens with the models unpacked."""
    return unpack(Path(os.environ[ENV]))


def unpack(folder: Path) -> Path:
    """Unpacks every golden checkpoint that is not in `folder` yet; returns `folder`."""
    for source in sorted(path for path in PACKED.rglob("*") if path.is_file()):
        target = folder / source.relative_to(PACKED)
        target = target.with_suffix("") if source.suffix == ".xz" else target
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            _unpack(source, partial)
            partial.replace(target)  # atomic: another worker may look for the file meanwhile
    return folder


def _unpack(source: Path, target: Path) -> None:
    if source.suffix == ".xz":
        target.write_bytes(lzma.decompress(source.read_bytes()))
    else:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    unpack(Path(sys.argv[1]))
