"""The fixtures: small, whole after unpacking, and each of them described."""

from __future__ import annotations

from pathlib import Path

from golden_folder import PACKED, unpacked_name

LIMIT = 25_000_000  # of everything under tests/, in bytes
LARGEST = 2_000_000
TESTS = Path(__file__).parent


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_they_are_small() -> None:
    sizes = {path: path.stat().st_size for path in files(TESTS)}
    assert max(sizes.values()) < LARGEST
    assert sum(sizes.values()) < LIMIT


def test_models_lie_in_the_repository_compressed_and_here_as_they_are(goldens: Path) -> None:
    unpacked = {path.relative_to(goldens) for path in files(goldens)}
    assert unpacked == {unpacked_name(path) for path in files(PACKED)}
    models = [path for path in unpacked if path.suffix in (".gguf", ".safetensors")]
    assert models and not [path for path in files(PACKED) if path.suffix in (".gguf", ".safetensors")]
    for path in models:
        start = (goldens / path).read_bytes()[:9]
        assert start[:4] == b"GGUF" if path.suffix == ".gguf" else start[8:] == b"{", path
