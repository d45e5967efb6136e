"""The store on disk: what was put is what is got, or nothing is, whatever happens to writers, files and the system."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlx import platform
from rlx.errors import ArgumentError, CacheError
from rlx.platform import Platform
from rlx.platform.linux import Linux
from rlx.platform.macos import Macos
from rlx.platform.windows import Windows
from rlx.store import entry
from rlx.store import store as stores
from rlx.store.entry import Entry, LargeFile
from rlx.store.folder import Damage, Folder, temporary
from rlx.store.key import CompileKey
from rlx.store.kinds import PREFIXES, PROGRAMS, CacheWarning
from rlx.store.store import default_root

pytestmark = pytest.mark.any_machine

FILES: dict[str, bytes | str] = {
    "program.o": bytes(range(256)),
    "program.ll": "define void @step()\n",
    "ir/03-fuse.txt": "%1 = add(%0, %0)\n",
    "kernels/dot_0a1b.txt": "",
    "manifest.json": "{}",
}
CONTENTS = {name: data.encode() if isinstance(data, str) else data for name, data in FILES.items()}
NOBODY = 65534


#: Kinds of entries: the budget of their store, and whether they have a large file.
STORED = {"program": (PROGRAMS, False), "weights": (PROGRAMS, True), "prefix": (PREFIXES, True)}
LARGE = bytes(range(250)) * 3
_kind = "program"  # of `key`


@pytest.fixture
def of_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of the entries of a test."""
    global _kind
    _kind = getattr(request, "param", "program")
    yield _kind
    _kind = "program"


#: What holds for every kind of entries.
each_kind = pytest.mark.parametrize("of_kind", STORED, indirect=True)


def key(number: int = 0) -> CompileKey:
    made = CompileKey(_kind, "tiny", phase="decode", options={"number": number})
    return dataclasses.replace(made, address=f"{'b' * 30}{made.digest[:34]}") if _kind == "prefix" else made


class Store(stores.Store):
    """A store whose entries are of the kind of the test."""

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        super().__init__(root, limit, STORED[_kind][0])

    def put(self, key: CompileKey, files: Any, replace: bool = False, **options: Any) -> Entry:
        if STORED[key.kind][1]:
            options = {"large": {"large.bin": LargeFile(len(LARGE), [memoryview(LARGE)], 100)}, **options}
        return super().put(key, files, replace, **options)


def contents(entry: Entry) -> dict[str, bytes]:
    """The files of an entry; the large one is checked."""
    if entry.large:
        found = bytearray(len(LARGE))
        entry.read_pieces("large.bin", 0, memoryview(found))
        assert found == LARGE
    return {name: entry.read(name) for name in entry.names}


@pytest.fixture
def store(tmp_path: Path, of_kind: str) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def stored(store: Store) -> Path:
    """The folder of the entry of `key()`."""
    folder = store.put(key(), FILES).folder
    assert folder is not None
    return folder


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many entries, quickly."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """A test that expects a warning says so; any other is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


@pytest.fixture
def small() -> None:
    """For tests whose limit is smaller than what they store: they evict their own entries, which is a warning."""
    warnings.filterwarnings("ignore", "the limit of the compile cache", CacheWarning)


def temporaries(store: Store) -> list[Path]:
    return list((store.root / "tmp").glob("*"))


def in_child(action: Callable[[], None]) -> int:
    """Run in a forked child; returns its wait status: 0 if the action ended, 256 if it raised."""
    child = os.fork()
    if not child:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


# ---------------------------------------------------------------------------------------------------- put and get


@each_kind
def test_what_was_put_is_got(store: Store) -> None:
    assert store.get(key()) is None
    put = store.put(key(), FILES)
    got = Store(store.root).get(key())
    assert got is not None
    assert contents(put) == contents(got) == CONTENTS
    assert got.names == tuple(sorted(FILES))
    assert got.key == key()
    assert store.get(key(1)) is None


@each_kind
def test_the_folder_is_private(store: Store, stored: Path) -> None:
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    for path in [stored, *stored.rglob("*")]:
        assert not path.stat().st_mode & 0o022
    assert {stat.S_IMODE(p.stat().st_mode) for p in stored.rglob("*") if p.is_file()} == {0o600}


@each_kind
def test_the_first_writer_wins_and_the_second_sees_it(store: Store) -> None:
    store.put(key(), {"a": "first"})
    second = store.put(key(), {"a": "second", "b": "more"})
    second.release()
    assert contents(second) == {"a": b"first"}
    assert not temporaries(store)


@each_kind
def test_replace_takes_the_place(store: Store, stored: Path) -> None:
    assert contents(store.put(key(), {"a": "new"}, replace=True)) == {"a": b"new"}
    got = store.get(key())
    assert got is not None
    assert contents(got) == {"a": b"new"}
    assert not (stored / "program.o").exists()


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".hidden", "a\\b", "a b", "key.json", "checksums.json",
             "last_used", "x\0", "é", "a" * 300]
)  # fmt: skip
def test_a_name_that_leaves_the_folder_is_refused(name: str, store: Store) -> None:
    with pytest.raises(ArgumentError, match="cannot be a file"):
        store.put(key(), {name: "x"})
    assert store.entries() == []


# ---------------------------------------------------------------------------------------------------- damage


def assert_damaged(store: Store, match: str) -> None:
    """It is reported once, removed, never used, and can be put again."""
    with pytest.warns(CacheWarning, match=match) as caught:
        assert store.get(key()) is None
    assert len(caught) == 1
    assert store.damaged == 1
    assert store.get(key()) is None
    assert store.entries() == []
    assert contents(store.put(key(), FILES)) == CONTENTS
    got = store.get(key())
    assert got is not None
    assert contents(got) == CONTENTS


READ_BY_PEOPLE = ["program.ll", "kernels/dot_0a1b.txt"]
CHECKED = [*(name for name in FILES if name not in READ_BY_PEOPLE), "key.json", "checksums.json"]


@pytest.mark.parametrize("of_kind", ["weights", "prefix"], indirect=True)
def test_a_flip_in_a_large_file_is_seen_by_whoever_reads_or_verifies_it(store: Store, stored: Path) -> None:
    got, found = store.get(key()), bytearray(len(LARGE))
    assert got is not None
    for at in (0, 99, 100, len(LARGE) // 2, len(LARGE) - 1):
        (stored / "large.bin").write_bytes(LARGE[:at] + bytes([LARGE[at] ^ 4]) + LARGE[at + 1 :])
        with pytest.raises(Damage, match=f"wrong checksum of piece {at // 100} of large.bin"):
            got.read_pieces("large.bin", 0, memoryview(found))
        assert store.verify(discard=False) == [(key().digest, "wrong checksum of large.bin")]
    (stored / "large.bin").write_bytes(LARGE[:-1])
    with pytest.raises(Damage, match="cut short"):
        got.read_pieces("large.bin", 0, memoryview(found))


HARMS = pytest.mark.parametrize("harm", ["missing", "empty", "shorter", "longer", "link", "folder"])


def damage(path: Path, harm: str) -> None:
    """Harms a file of an entry."""
    data = path.read_bytes()
    if harm == "empty" and not data:
        path.write_bytes(b"x")
    path.unlink() if harm in ("missing", "link", "folder") else None
    if harm == "link":
        (path.parent / "elsewhere").write_bytes(data)
        path.symlink_to("elsewhere")
    if harm == "folder":
        path.mkdir()
    if harm in ("shorter", "longer"):
        path.write_bytes(data[:-1] if harm == "shorter" and data else data + b"\n")
    if harm == "empty" and data:
        path.write_bytes(b"")


@each_kind
@pytest.mark.parametrize("name", READ_BY_PEOPLE)
@HARMS
def test_a_damaged_text_is_seen_by_whoever_reads_or_verifies_it(
    name: str, harm: str, store: Store, stored: Path
) -> None:
    """A program runs without it, so no start reads it."""
    damage(stored / name, harm)
    got = store.get(key())
    assert got is not None and store.damaged == 0
    assert got.read("program.o") == CONTENTS["program.o"]
    with pytest.raises(CacheError, match=f"{name} (is gone|changed since it was stored)"):
        got.read(name)
    ((digest, _),) = store.verify()
    assert digest == key().digest
    assert store.entries() == []


def test_texts_of_an_entry_of_an_earlier_version_are_checked_before_use(store: Store, stored: Path) -> None:
    """Its checksums have none of their own, so all that they say is looked at."""
    sums = json.loads((stored / "checksums.json").read_bytes())
    del sums["checksums.json"]
    (stored / "checksums.json").write_bytes(json.dumps(sums, indent=1, sort_keys=True).encode() + b"\n")
    got = store.get(key())
    assert got is not None and contents(got) == CONTENTS
    damage(stored / "program.ll", "longer")
    assert_damaged(store, "wrong checksum of program.ll")


@each_kind
@pytest.mark.parametrize("name", CHECKED)
@HARMS
def test_a_damaged_file(name: str, harm: str, store: Store, stored: Path) -> None:
    damage(stored / name, harm)
    assert_damaged(store, f"{key().digest[:12]} is damaged and not used: .*")


@each_kind
@pytest.mark.parametrize("name", CHECKED)
def test_a_flip_of_any_byte_is_seen(name: str, store: Store, stored: Path) -> None:
    data = (stored / name).read_bytes()
    generator = random.Random(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for i in range(len(data)):
            flipped = bytes([*data[:i], data[i] ^ 1 << generator.randrange(8), *data[i + 1 :]])
            (stored / name).write_bytes(flipped)
            assert store.get(key(), discard=False) is None, i
    (stored / name).write_bytes(data)
    assert store.get(key()) is not None
    assert store.damaged == len(data)


@each_kind
def test_an_entry_evicted_while_it_is_read_is_a_miss(
    store: Store, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Folder.read

    def evicting(folder: Folder, name: str) -> bytes:
        if name == "program.o":
            shutil.rmtree(stored)
        return read(folder, name)

    monkeypatch.setattr(Folder, "read", evicting)
    assert store.get(key()) is None
    assert store.damaged == 0


@pytest.mark.parametrize("of_kind", ["prefix"], indirect=True)
def test_a_large_file_whose_entry_is_evicted_while_it_is_opened_is_gone(
    store: Store, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, child = store.get(key()), Folder.child

    def evicting(folder: Folder, name: str) -> Folder:
        below = child(folder, name)
        if below.path == stored:
            shutil.rmtree(stored)
        return below

    monkeypatch.setattr(Folder, "child", evicting)
    assert found is not None
    with pytest.raises(FileNotFoundError):
        found.read_pieces("large.bin", 0, memoryview(bytearray(len(LARGE))))


@each_kind
def test_an_entry_of_another_process_that_is_evicted_before_it_is_read_is_written(
    store: Store, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = entry.load

    def evicting(*arguments: Any, **options: Any) -> Entry:
        shutil.rmtree(stored)
        return load(*arguments, **options)

    monkeypatch.setattr(entry, "load", evicting)
    assert store.put(key(), FILES).folder == stored
    monkeypatch.undo()
    assert store.get(key()) is not None


@each_kind
def test_verify_finds_and_removes(store: Store, no_sync: None) -> None:
    folders = [store.put(key(i), FILES).folder for i in range(6)]
    assert store.verify() == []
    for folder, name in zip(folders, ["program.o", "key.json", "checksums.json"], strict=False):
        assert folder is not None
        (folder / name).write_bytes(b"?")
    wrong = store.verify(discard=False)
    assert {digest for digest, _ in wrong} == {key(i).digest for i in range(3)}
    assert len(store.entries()) == 6
    assert store.verify() == wrong
    assert {row.digest for row in store.entries()} == {key(i).digest for i in range(3, 6)}
    assert store.verify() == []


# ---------------------------------------------------------------------------------------------------- killed writers


def count_calls(monkeypatch: pytest.MonkeyPatch, on_call: Callable[[int, bool], None]) -> None:
    """Call `on_call(number, before or after)` around every call that changes files."""
    number = iter(range(10**6))

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            i = next(number)
            on_call(i, True)
            try:
                return function(*args, **kwargs)
            finally:
                on_call(i, False)

        return wrapped

    for name in ("open", "fsync", "rename", "mkdir", "unlink", "rmdir", "utime"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


def crashing(at: int, before: bool, action: Callable[[], object]) -> int:
    """Run in a child that exits with 9 around the system call number `at`; returns its wait status."""

    def exit_there(i: int, is_before: bool) -> None:
        if (i, is_before) == (at, before):
            os._exit(9)

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            count_calls(patch, exit_there)
            action()

    return in_child(run)


@pytest.mark.system("descriptors")
def test_a_writer_that_dies_at_any_step_leaves_all_or_nothing(tmp_path: Path) -> None:
    """`os._exit` around every system call of a put, until one put survives; in a process that is small, so that it
    forks quickly.
    """
    code = f"import sys; sys.path[:] = {sys.path}; import test_store; test_store.die_everywhere({str(tmp_path)!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr


def die_everywhere(folder: str) -> None:
    global _kind
    warnings.simplefilter("error", CacheWarning)
    os.fsync = lambda descriptor: None
    for _kind, before, replace in (("weights", True, False), ("program", False, True)):
        store = Store(Path(folder) / _kind)
        assert _deaths(store, before, replace) > 20


def _deaths(store: Store, before: bool, replace: bool) -> int:
    """How many puts died before one survived."""
    old, new = {"program.o": b"old"}, {"program.o": b"new", "ir/00.txt": b"new"}
    for died in range(1000):
        store.clear()
        if replace:
            store.put(key(), old)
        status = crashing(died, before, lambda: store.put(key(), new, replace=replace))
        got = store.get(key())
        assert got is None or contents(got) in (old, new)
        assert store.verify() == []
        assert contents(store.put(key(), new, replace=True)) == new
        assert not temporaries(store)
        if status == 0:
            return died
        assert os.waitstatus_to_exitcode(status) == 9
    raise AssertionError("no put survives")


@pytest.mark.system("descriptors")
def test_what_dead_writers_left_is_collected_and_what_live_ones_write_is_not(store: Store) -> None:
    """A lock tells them apart, not the process id, which another process may have got since."""
    store.put(key(), FILES)
    base, days_ago = store.root / "tmp", time.time() - 2 * 86400
    pipe = os.pipe()

    def write_until_told() -> None:
        with Folder(store.root) as root, temporary(root):
            os.write(pipe[1], b"x")
            time.sleep(600)

    child = os.fork()
    if not child:
        write_until_told()
    os.read(pipe[0], 1)
    (live,) = (path.name for path in temporaries(store))
    gone, kept = {f"new-{os.getpid()}-dead", "new-1-dead", "00000000-1-old"}, {live, "00000000-1-of-another-version"}
    for name in (gone | kept) - {live}:
        (base / name / "ir").mkdir(parents=True)
        (base / name / "ir" / "x").write_text("x")
    for name in ("00000000-1-old", live):  # a live one may be as old as it likes
        os.utime(base / name, (days_ago, days_ago))
    store.put(key(1), FILES)
    assert {path.name for path in temporaries(store)} == kept
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Store(store.root).collect()
    assert {path.name for path in temporaries(store)} == kept - {live}


# ---------------------------------------------------------------------------------------------------- the system


def assert_uncached(store: Store, match: str) -> None:
    """A put that cannot store warns once, returns the files all the same, and leaves nothing behind."""
    with pytest.warns(CacheWarning, match=match) as caught:
        entry = store.put(key(7), FILES)
        again = store.put(key(8), FILES)
    assert len(caught) == 1
    assert entry.folder is again.folder is None
    entry.release()
    assert contents(entry) == CONTENTS


@each_kind
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "fsync", "rename", "mkdir"])
def test_a_system_call_that_fails(call: str, code: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if call == "fsync" and not store.budget.is_synced:
        return  # it is not called
    function = getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if call != "open" or (len(args) > 1 and args[1] & os.O_CREAT):
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert_uncached(store, f"running uncached.*{os.strerror(code)}")
    assert store.entries() == []
    assert not temporaries(store)
    assert store.put(key(), FILES).folder is not None


@pytest.fixture
def as_user() -> Iterator[Callable[[Callable[[Path], None]], int]]:
    """Runs an action in a child that permissions apply to, on a folder of its own; returns the wait status."""
    root = Path(tempfile.mkdtemp(prefix="rlx-test-"))
    if os.geteuid() == 0:
        os.chown(root, NOBODY, NOBODY)

    def run(action: Callable[[Path], None]) -> int:
        def child() -> None:
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            action(root)

        return in_child(child)

    yield run
    shutil.rmtree(root)


@each_kind
def test_a_read_only_folder_serves_reads(as_user: Callable[[Callable[[Path], None]], int], of_kind: str) -> None:
    def action(root: Path) -> None:
        store = Store(root / "cache")
        folder = store.put(key(), FILES).folder
        assert folder is not None
        (folder / "program.ll").write_bytes(CONTENTS["program.ll"])
        locked = [store.root, store.root / "tmp", folder.parent, folder]
        for path in locked:
            path.chmod(0o500)
        got = Store(store.root).get(key())
        assert got is not None
        assert contents(got) == CONTENTS
        assert_uncached(Store(store.root), "running uncached.*Permission denied")
        with pytest.raises(CacheError, match=r"cannot be used.*Permission denied"):
            store.remove(key().digest)
        for path in locked:
            path.chmod(0o700)

    assert as_user(action) == 0


# ---------------------------------------------------------------------------------------------------- trust


def untrusted(kind: str, tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    if kind == "link":
        root.rename(tmp_path / "real")
        root.symlink_to(tmp_path / "real", target_is_directory=True)
    elif kind == "dangling link":
        root.rmdir()
        root.symlink_to(tmp_path / "nowhere")
    elif kind == "file":
        root.rmdir()
        root.write_text("x")
    elif kind == "foreign":
        os.chown(root, NOBODY, NOBODY)
    else:
        root.chmod(int(kind, 8))
    return root


KINDS = {
    "0777": "other users can write it .mode 0777",
    "0770": "other users can write it .mode 0770",
    "0702": "other users can write it .mode 0702",
    "link": "it is a symbolic link",
    "dangling link": "it is a symbolic link",
    "file": "it is not a folder",
    "foreign": "it belongs to user 65534",
}


@each_kind
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_others_may_have_written_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_kind: str
) -> None:
    if kind == "foreign" and os.geteuid():
        pytest.skip("only root can give a folder away")
    root = untrusted(kind, tmp_path)
    with pytest.raises(CacheError, match=KINDS[kind]):
        Store(root)
    monkeypatch.setenv("RLX_CACHE_DIR", str(root))
    with pytest.warns(CacheWarning, match=f"is not used: {KINDS[kind]}") as caught:
        store = Store()
        assert store.get(key()) is None
        assert contents(store.put(key(), FILES)) == CONTENTS
        assert store.put(key(), FILES).folder is None
    assert len(caught) == 1
    assert (store.entries(), store.verify()) == ([], [])
    assert store.clear() == 0
    assert store.stats().problem == store.problem


# What an attacker, or an accident, may put in the place of one name of the cache, and what is then said.
PLANTED = {
    "link": "is a symbolic link|not be trusted",
    "fifo": "is no regular file|is not a folder|not be trusted",
    "socket": "is no regular file|is not a folder|not be trusted",
    "foreign": "belongs to user 65534",
    "writable": "other users can write it",
    "hard link": "has 2 hard links",
}


def plant(kind: str, path: Path) -> None:
    """Puts something that must not be trusted in the place of a file or folder of the cache."""
    aside = path.with_name(f"{path.name}-aside")
    if kind == "foreign":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(path, NOBODY, NOBODY)
    elif kind == "writable":
        path.chmod(0o777)
    elif kind == "hard link":
        os.link(path, aside)
    else:
        path.rename(aside)
        if kind == "link":
            path.symlink_to(aside)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket has at most 107 bytes
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
            os.chdir(here)


@each_kind
@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["program.o", "checksums.json", "key.json"])
def test_a_file_that_others_may_have_written_is_not_read(kind: str, name: str, store: Store, stored: Path) -> None:
    """Its contents and checksum are right: what counts is who could have written it. Nothing hangs on a FIFO."""
    plant(kind, stored / name)
    with pytest.warns(CacheWarning, match=f"damaged and not used: {name} .*({PLANTED[kind]})"):
        assert store.get(key(), discard=False) is None
    assert [digest for digest, _ in store.verify(discard=False)] == [key().digest]
    assert [row.digest for row in store.entries()] == [key().digest]


@each_kind
@pytest.mark.parametrize("kind", [kind for kind in PLANTED if kind != "hard link"])
@pytest.mark.parametrize("level", ["root", "shelf", "entry", "ir"])
def test_a_folder_that_others_may_have_written_is_not_read(kind: str, level: str, store: Store, stored: Path) -> None:
    """Checked at each read, not only when the store was opened: here it is open already."""
    plant(kind, {"root": store.root, "shelf": stored.parent, "entry": stored, "ir": stored / "ir"}[level])
    with pytest.warns(CacheWarning, match="not used|not be trusted") as caught:
        assert store.get(key(), discard=False) is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert store.put(key(), FILES).folder is None or level in ("ir", "entry")
        with contextlib.suppress(CacheError):
            store.entries(), store.stored_keys(), store.verify(discard=False)


@each_kind
@pytest.mark.system("root")
def test_a_root_that_is_swapped_by_another_user_between_open_and_read(tmp_path: Path, of_kind: str) -> None:
    """The parent may be written by everybody and has no sticky bit: the attacker renames the cache and makes another,
    with an entry of the right key, right checksums and other code.
    """
    tmp_path.chmod(0o755)
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    store = Store(parent / "cache")
    store.put(key(), FILES)
    victim = store.get(key())
    assert victim is not None
    victim.release()

    def attack() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        (parent / "cache").rename(parent / "stolen")
        Store(parent / "cache").put(key(), {**FILES, "program.o": b"evil"})

    for path in [*tmp_path.parents][:3]:
        path.chmod(path.stat().st_mode | 0o011)
    assert in_child(attack) == 0
    assert (parent / "cache" / key().digest[:2] / key().digest / "program.o").read_bytes() == b"evil"
    with pytest.warns(CacheWarning, match="belongs to user 65534"):
        assert store.get(key()) is None
    with pytest.raises(CacheError, match="belongs to user 65534"):
        victim.read("program.o")
    with pytest.warns(CacheWarning, match="running uncached: it belongs to user 65534"):
        assert store.put(key(1), FILES).folder is None


@each_kind
def test_where_the_platform_has_no_descriptors_of_folders(
    tmp_path: Path, of_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: paths and the checks that are left."""
    monkeypatch.setattr(platform.current(), "by_descriptor", False)
    store = Store(tmp_path / "cache")
    store.put(key(), FILES)
    with Folder(store.root) as root:
        root.replace_file("note.txt", b"x")
        assert root.read("note.txt") == b"x"
    got = Store(store.root).get(key())
    assert got is not None
    got.release()
    assert contents(got) == CONTENTS
    assert store.verify() == []
    assert not temporaries(store)
    (store.root / key().digest[:2]).chmod(0o777)
    with pytest.warns(CacheWarning, match="other users can write it"):
        assert store.get(key()) is None
    (store.root / key().digest[:2]).chmod(0o700)
    assert store.clear() == 1


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {"RLX_CACHE_DIR": "~/mine", "XDG_CACHE_HOME": "/x"}, "/h/mine"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/rlx"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/h/.cache/rlx"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/h/.cache/rlx"),
        ("linux", {}, "/h/.cache/rlx"),
        ("plain", {}, "/h/.cache/rlx"),
        ("macos", {}, "/h/Library/Caches/rlx"),
        ("windows", {"LOCALAPPDATA": "/l"}, "/l/rlx"),
        ("windows", {}, "/h/AppData/Local/rlx"),
    ],
)
def test_the_default_folder(
    system: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RLX_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/h", **variables}.items():
        monkeypatch.setenv(name, value)
    forms = {"linux": Linux(), "plain": Platform(), "macos": Macos(None), "windows": Windows(lambda name: MagicMock())}
    monkeypatch.setattr(platform, "current", lambda: forms[system])
    assert default_root().as_posix() == expected


# ---------------------------------------------------------------------------------------------------- size


def size(store: Store) -> int:
    """Bytes of all files but the store's own."""
    files = (path for path in store.root.rglob("*") if path.is_file() and path.name not in ("lock", "total"))
    return sum(path.lstat().st_size for path in files)


def test_the_least_recently_used_go(tmp_path: Path, no_sync: None, small: None) -> None:
    one = {"x": b"x" * 10_000}
    each = Store(tmp_path / "measure").put(key(), one).folder
    assert each is not None
    nbytes = sum(path.stat().st_size for path in each.iterdir())
    store = Store(tmp_path / "cache", limit=5 * nbytes + 100)
    generator = random.Random(1)
    order: list[int] = []
    dropped = 0
    for step in range(80):
        number = generator.randrange(12)
        hit = store.get(key(number)) is not None
        assert hit == (number in order)
        if hit:
            order.remove(number)
        else:
            store.put(key(number), one)
        order.append(number)
        dropped += len(order) > 5
        order = order[-5:]
        folder = store.find(key(number).digest).folder
        os.utime(folder / "last_used", (step, step))  # clocks are coarser than this loop
        assert [row.digest for row in store.entries()] == [key(n).digest for n in reversed(order)]
        assert size(store) == store.stats().nbytes <= store.limit
    assert store.evicted == dropped > 0


def test_what_this_process_stored_goes_last_and_with_a_warning(tmp_path: Path, no_sync: None) -> None:
    """A compile with a small limit evicted what it had just made, in silence."""
    root, one = tmp_path / "cache", {"x": bytes(400_000)}
    assert in_child(lambda: [Store(root).put(key(i), one) for i in range(2)] and None) == 0
    os.utime(Store(root).find(key(1).digest).folder / "last_used", (2e9, 2e9))  # used last, but not stored by us
    store = Store(root, limit=1_000_000)
    store.put(key(2), one)
    store.put(key(3), one)  # no warning: only entries of the other process had to go
    assert {row.digest for row in store.entries()} == {key(2).digest, key(3).digest}
    with pytest.warns(CacheWarning) as caught:
        Store(root, limit=1_000_000).put(key(4), one)  # of the same process, though of another object
    assert [row.digest for row in store.entries()] == [key(4).digest, key(3).digest]
    said = str(caught[0].message)
    assert len(caught) == 1
    assert "the limit of the compile cache" in said
    assert "1 MB, is too small: this process stored 1.2 MB, evicts what it stored itself" in said
    assert "Raise RLX_CACHE_LIMIT (to 3M, for example)" in said


def test_budgets_have_limits_of_their_own(tmp_path: Path, no_sync: None, small: None) -> None:
    """Programs, states of prompts and a tuning in one folder: each evicts its own kind, and nobody the tuning."""
    root = tmp_path / "cache"
    programs, prefixes = stores.Store(root, 50_000), stores.Store(root, 30_000, PREFIXES)
    programs.write(CompileKey("tuning", "x"), {"x": bytes(60_000)}, replace=False)
    for number in range(20):
        for store, kind in ((programs, "program"), (prefixes, "prefix")):
            made = CompileKey(kind, "x", options={"number": number})
            store.put(made, {"x": bytes(5_000)}, used=1e9 + number)
            assert sum(row.nbytes for row in store.evictable()) <= store.limit
    kinds = [row.key.kind for row in programs.entries() if row.key]
    assert (kinds.count("tuning"), kinds.count("program") > kinds.count("prefix") > 2) == (1, True)
    assert programs.stats().nbytes <= 50_000 and prefixes.stats().nbytes <= 30_000
    programs.clear()
    assert [row.key.kind for row in programs.entries() if row.key] == ["tuning"]


# ---------------------------------------------------------------------------------------------------- looking


@pytest.fixture
def many(store: Store, no_sync: None) -> Store:
    for number in range(20):
        store.put(key(number), FILES)
    return store
