"""Files on their way to their place: what a killed process left goes, what a living one writes stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rlx.errors import ArgumentError, ResourceError
from rlx.export.convert import convert
from rlx.export.quantize import quantize
from rlx.partial_file import collect, into_place


@pytest.fixture
def checkpoint(goldens: Path) -> Path:
    return goldens / "qwen3" / "hf"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    with into_place(out) as partial:
        partial.write_bytes(b"x")
        assert names(tmp_path) == [partial.name]
    assert names(tmp_path) == ["m.gguf"]
    assert out.read_bytes() == b"x"
    assert out.stat().st_mode & 0o777 == 0o666 & ~current_umask()
    with into_place(out, 0o600) as partial:
        partial.write_bytes(b"secret")
    assert out.stat().st_mode & 0o777 == 0o600


def current_umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), into_place(tmp_path / "m.gguf"):
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_file_of_another_process_stays(goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that write one name at a time: the first that is done keeps it, also without hard links."""
    out, source = tmp_path / "m.gguf", goldens / "qwen3" / "model-f16.gguf"

    def meanwhile(what: str, done: int, total: int) -> None:
        out.write_bytes(b"theirs")

    for links in (True, False):
        if not links:
            monkeypatch.setattr(Path, "hardlink_to", no_links)
        with pytest.raises(ArgumentError, match=r"m\.gguf: the file exists"):
            quantize(source, out, "Q8_0", progress=meanwhile)
        assert names(tmp_path) == ["m.gguf"] and out.read_bytes() == b"theirs"
        out.unlink()
        quantize(source, out, "Q8_0")
        assert names(tmp_path) == ["m.gguf"]
        quantize(source, out, "Q8_0", force=True, progress=meanwhile)
        assert names(tmp_path) == ["m.gguf"] and out.read_bytes() != b"theirs"
        out.unlink()


def no_links(self: Path, target: Path) -> None:
    raise PermissionError("no hard links here")


@pytest.mark.parametrize("out", ["", ".", "..", "/"])
def test_a_folder_is_no_file(out: str) -> None:
    with pytest.raises(OSError), into_place(Path(out)):
        pass


@pytest.mark.system("fork", "locks")
def test_left_over_files_go_and_those_of_living_processes_stay(tmp_path: Path) -> None:
    ready = os.pipe()
    child = os.fork()
    if not child:
        with into_place(tmp_path / "live.gguf"):
            os.write(ready[1], b"x")
            time.sleep(600)
    os.read(ready[0], 1)
    (live,) = names(tmp_path)
    mine = {"m.gguf.rlx-1-0123abcd.partial", f"other.gguf.rlx-{os.getpid()}-0123abcd.partial"}
    others = {"m.gguf.partial", "m.gguf.123.partial", "m.gguf", "m.gguf.rlx-x.partial"}
    for name in mine | others:
        (tmp_path / name).write_text("x")
    (tmp_path / "link.rlx-1-0123abcd.partial").symlink_to(tmp_path / "m.gguf")
    os.mkfifo(tmp_path / "fifo.rlx-1-0123abcd.partial")
    with into_place(tmp_path / "new.gguf"):
        pass
    strange = {"link.rlx-1-0123abcd.partial", "fifo.rlx-1-0123abcd.partial"}  # not ours: they are no files
    assert set(names(tmp_path)) == {live, "new.gguf"} | others | strange
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    collect(tmp_path)
    assert set(names(tmp_path)) == {"new.gguf"} | others | strange


def test_a_file_that_is_larger_than_the_system_allows(checkpoint: Path, tmp_path: Path) -> None:
    """A real failure in the middle of a write."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    convert(checkpoint, tmp_path / "warm.gguf")  # the encoders are in the cache
    (tmp_path / "warm.gguf").unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))
    try:
        with pytest.raises(ResourceError, match=r"out\.gguf: the file is larger than the system allows.*ulimit -f"):
            convert(checkpoint, tmp_path / "out.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == []
