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

import numpy as np

PACKED = Path(__file__).parent / "data" / "goldens"
SHARED = ".of-safetensors"  # in the name of a GGUF file that is kept as references to its neighbour's weights
ENV = "TEST_GOLDENS"  # the run's own folder, made and removed by conftest.py, shared by its workers


@cache
def goldens() -> Path:
    """The folder of this test run, like tests/data/goldens with the models unpacked."""
    return unpack(Path(os.environ[ENV]))


def unpack(folder: Path) -> Path:
    """Unpacks every golden checkpoint that is not in `folder` yet; returns `folder`."""
    for source in sorted(path for path in PACKED.rglob("*") if path.is_file()):
        target = folder / unpacked_name(source)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            _unpack(source, partial)
            partial.replace(target)  # atomic: another worker may look for the file meanwhile
    return folder


def unpacked_name(source: Path) -> Path:
    """Of a file of the repository, relative to the folder of all."""
    return source.relative_to(PACKED).with_name(source.name.removesuffix(".xz").removesuffix(SHARED))


def _unpack(source: Path, target: Path) -> None:
    if source.name.endswith(f"{SHARED}.xz"):
        weights = source.parent / "hf" / "model.safetensors.xz"
        target.write_bytes(_from_shared(lzma.decompress(source.read_bytes()), lzma.decompress(weights.read_bytes())))
    elif source.suffix == ".xz":
        target.write_bytes(lzma.decompress(source.read_bytes()))
    else:
        shutil.copyfile(source, target)


def _from_shared(packed: bytes, weights: bytes) -> bytes:
    """The file whose words of 16 bits are weights in f16, or stand in `packed` themselves.

    `packed`: the number of words (int64); for each its index in `weights`, where it is bf16, or -1, as int32
    differences from the one before; then the words of those with -1.
    """
    count = int.from_bytes(packed[:8], "little")
    index = np.cumsum(np.frombuffer(packed, np.int32, count, offset=8))
    bf16 = np.frombuffer(weights, np.uint16, len(weights) // 2)[index]
    with np.errstate(over="ignore"):  # what is no weight is overwritten
        words = (bf16.astype(np.uint32) << 16).view(np.float32).astype(np.float16).view(np.uint16)
    words[index < 0] = np.frombuffer(packed, np.uint16, offset=8 + 4 * count)
    return words.tobytes()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    unpack(Path(sys.argv[1]))
