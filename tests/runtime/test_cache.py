"""The cache in memory: true LRU, one compile a key, the four policies, and the variables that choose between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlx import env
from rlx.env import Policy
from rlx.errors import ArgumentError, CacheError, CompileError
from rlx.store.cache import CompileCache, Files
from rlx.store.key import CompileKey
from rlx.store.kinds import CacheWarning
from rlx.store.store import Store

pytestmark = pytest.mark.any_machine


def key(number: int = 0) -> CompileKey:
    return CompileKey("program", "tiny", phase="decode", options={"number": number})


class Program:
    """What `load` makes: knows its text and whether it was closed."""

    def __init__(self, files: Files) -> None:
        self.files, self.text, self.closed = files, files.read("text").decode(), 0

    def close(self) -> None:
        self.closed += 1


class Builder:
    """Counts builds; each makes a text of its own."""

    def __init__(self) -> None:
        self.built: list[int] = []

    def get(self, cache: CompileCache, number: int = 0) -> Program:
        def build() -> dict[str, bytes | str]:
            self.built.append(number)
            return {"text": f"{number} built {len(self.built)}", "program.o": b"\x7fELF"}

        return cache.get_or_compile(key(number), build, Program)


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def reached(cache: CompileCache) -> dict[str, int]:
    """The counters that are not zero, times aside."""
    stats = {name: value for name, value in vars(cache.stats).items() if not name.endswith("seconds")}
    return {name: value for name, value in stats.items() if value}


# ---------------------------------------------------------------------------------------------------- memory


class Lru(RuleBasedStateMachine):
    """Against a list in order of use: same hits, same evictions in the same order, evicted programs closed once."""

    @property
    def capacity(self) -> int:
        return 3

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.builder = CompileCache(self.capacity), Builder()
        self.order: list[int] = []
        self.alive: dict[int, Program] = {}
        self.evicted: list[Program] = []

    @rule(number=st.integers(0, 6))
    def request(self, number: int) -> None:
        hit, builds = number in self.order, len(self.builder.built)
        program = self.builder.get(self.cache, number)
        assert len(self.builder.built) - builds == (not hit)
        if hit:
            assert program is self.alive[number]
            self.order.remove(number)
        elif len(self.order) == self.capacity:
            self.evicted.append(self.alive.pop(self.order.pop(0)))
        self.order.append(number)
        self.alive[number] = program

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert all(program.closed == 1 for program in self.alive.values())
        self.order.clear()
        self.alive.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.cache.keys() == [key(number).digest for number in self.order]
        assert len(self.cache) == len(self.order)
        assert all((key(number) in self.cache) == (number in self.order) for number in range(7))
        assert all(program.closed == 0 for program in self.alive.values())
        assert all(program.closed == 1 for program in self.evicted)
        assert self.cache.stats.evictions == len(self.evicted)
        assert self.cache.stats.compiles == self.cache.stats.misses == len(self.builder.built)


TestLru = Lru.TestCase
TestLru.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_programs_without_close_are_evicted_too() -> None:
    cache = CompileCache(1)
    for number in range(3):
        assert cache.get_or_compile(key(number), lambda: {"a": "x"}, lambda files: files.names) == ("a",)
    assert (len(cache), cache.stats.evictions) == (1, 2)


# ---------------------------------------------------------------------------------------------------- failures


def test_what_build_raises_is_passed_on_and_nothing_remembered(store: Store, builder: Builder) -> None:
    cache = CompileCache(store=store)

    def build() -> dict[str, bytes | str]:
        raise CompileError("no kernel")

    for _ in range(2):
        with pytest.raises(CompileError, match="no kernel"):
            cache.get_or_compile(key(), build, Program)
    assert reached(cache) == {"misses": 2}
    assert (len(cache), store.entries()) == (0, [])
    assert builder.get(cache).text == "0 built 1"


def test_what_load_raises_is_passed_on_and_nothing_remembered(store: Store, builder: Builder) -> None:
    cache = CompileCache(store=store)
    with pytest.raises(CacheError, match="no file is called 'missing'"):
        cache.get_or_compile(key(), lambda: {"text": "x"}, lambda files: files.read("missing"))
    assert len(cache) == 0
    assert builder.get(cache).text == "x"


@pytest.mark.parametrize("policy", ["on", "off"])
def test_a_bad_file_name_is_refused(policy: Policy, store: Store) -> None:
    with pytest.raises(ArgumentError, match="cannot be a file"):
        CompileCache(store=store, policy=policy).get_or_compile(key(), lambda: {"../x": ""}, Program)


# ---------------------------------------------------------------------------------------------------- threads


def in_threads(count: int, action: Callable[[int], Any]) -> list[Any]:
    """Results (or exceptions) of `action` in threads that start together."""
    together, results = threading.Barrier(count), [None] * count

    def run(me: int) -> None:
        together.wait()
        try:
            results[me] = action(me)
        except Exception as error:
            results[me] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=[me]) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def want(cache: CompileCache, number: int, build: Callable[[], dict[str, bytes | str]], me: int) -> Program:
    return cache.get_or_compile(key(number), build, Program)


def test_threads_that_want_one_key_compile_once(store: Store) -> None:
    for number in range(10):
        builds: list[int] = []

        def build(builds: list[int] = builds) -> dict[str, bytes | str]:
            builds.append(1)
            time.sleep(0.005)
            return {"text": "x"}

        cache = CompileCache(store=store)
        found = in_threads(6, partial(want, cache, number, build))
        assert len(builds) == 1
        assert len({id(program) for program in found}) == 1
        assert isinstance(found[0], Program)
        assert (cache.stats.hits_memory, cache.stats.compiles) == (5, 1)


def test_different_keys_compile_side_by_side() -> None:
    inside = threading.Barrier(3)

    def build() -> dict[str, bytes | str]:
        inside.wait(timeout=120)
        return {"text": "x"}

    cache = CompileCache()
    found = in_threads(3, lambda me: cache.get_or_compile(key(me), build, Program))
    assert all(isinstance(program, Program) for program in found)


def test_after_a_failure_a_waiting_thread_compiles() -> None:
    builds: list[int] = []

    def build() -> dict[str, bytes | str]:
        builds.append(1)
        time.sleep(0.01)
        if len(builds) == 1:
            raise CompileError("once")
        return {"text": "x"}

    cache = CompileCache()
    found = in_threads(3, lambda _: cache.get_or_compile(key(), build, Program))
    assert [type(result) for result in found].count(CompileError) == 1
    assert cache.stats.compiles >= 1
    assert len(cache) == 1


# ---------------------------------------------------------------------------------------------------- policies


def test_on_compiles_once_for_all_processes(store: Store, builder: Builder) -> None:
    first, second = CompileCache(store=store), CompileCache(store=Store(store.root))
    made, found = builder.get(first), builder.get(second)
    assert made.text == found.text == "0 built 1"
    assert builder.get(second) is found
    size = len("0 built 1") + len(b"\x7fELF")
    assert reached(first) == {"misses": 1, "compiles": 1, "bytes_written": size}
    assert reached(second) == {"hits_disk": 1, "hits_memory": 1}
    assert first.stats.compile_seconds > 0
    assert second.stats.compile_seconds == 0 < second.stats.load_seconds


def test_without_a_store_programs_live_in_memory(builder: Builder) -> None:
    cache = CompileCache()
    program = builder.get(cache)
    assert builder.get(cache) is program
    assert program.files.names == ("program.o", "text")
    assert program.files.read("program.o") == b"\x7fELF"
    assert reached(cache) == {"misses": 1, "compiles": 1, "hits_memory": 1}


def test_off_touches_no_disk(store: Store, builder: Builder) -> None:
    builder.get(CompileCache(store=store))
    cache = CompileCache(store=store, policy="off")
    assert builder.get(cache).text == "0 built 2"
    assert builder.get(cache, 1).text == "1 built 3"
    assert [row.key for row in store.entries()] == [key()]
    assert reached(cache) == {"misses": 2, "compiles": 2}


def test_redo_replaces_what_is_stored(store: Store, builder: Builder) -> None:
    builder.get(CompileCache(store=store))
    redo = CompileCache(store=store, policy="redo")
    program = builder.get(redo)
    assert program.text == "0 built 2"
    assert builder.get(redo) is program
    assert builder.get(CompileCache(store=store)).text == "0 built 2"
    assert reached(redo) == {"misses": 1, "compiles": 1, "hits_memory": 1, "bytes_written": 13}


def test_readonly_names_the_missing_key(store: Store, builder: Builder) -> None:
    builder.get(CompileCache(store=store))
    cache = CompileCache(store=store, policy="readonly")
    assert builder.get(cache).text == "0 built 1"
    with pytest.raises(CacheError) as caught:
        builder.get(cache, 1)
    near = f"no entry for this program has option number 1 (nearest: {key().digest[:12]}, differs in option number)"
    for part in (str(store.root), f"program tiny decode (key {key(1).digest[:12]})", near, "RLX_CACHE=on"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert builder.built == [0]
    assert [row.key for row in store.entries()] == [key()]
    assert reached(cache) == {"hits_disk": 1, "misses": 1}


@pytest.mark.parametrize("policy", ["on", "readonly"])
def test_a_damaged_entry_is_never_loaded(policy: Policy, store: Store, builder: Builder) -> None:
    builder.get(CompileCache(store=store))
    folder = store.find(key().digest).folder
    (folder / "program.o").write_bytes(b"\x7fELE")
    cache = CompileCache(store=store, policy=policy)
    with pytest.warns(CacheWarning, match="damaged"):
        if policy == "on":
            assert builder.get(cache).text == "0 built 2"
        else:
            with pytest.raises(CacheError, match="has no entry"):
                builder.get(cache)
    assert cache.stats.damaged == 1
    assert folder.exists()  # built anew, or left as it is
    assert (store.verify() == []) == (policy == "on")


def test_a_program_keeps_no_files_in_memory_that_are_stored(store: Store, builder: Builder) -> None:
    program = builder.get(CompileCache(store=store))
    assert program.files.read("program.o") == b"\x7fELF"
    store.clear()
    with pytest.raises(CacheError, match=r"program\.o is gone"):
        program.files.read("program.o")


# ---------------------------------------------------------------------------------------------------- environment


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    yield monkeypatch


@pytest.mark.parametrize(
    ("value", "policy"),
    [(None, "on"), ("", "on"), ("on", "on"), ("OFF", "off"), ("Readonly", "readonly"), (" redo ", "redo")],
)
def test_the_default_cache_does_what_the_environment_says(
    value: str | None, policy: str, clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clean.setenv("RLX_CACHE_DIR", str(tmp_path / "mine"))
    clean.setenv("RLX_CACHE_LIMIT", "7M")
    if value is not None:
        clean.setenv("RLX_CACHE", value)
    cache = CompileCache.default(capacity=5)
    assert (cache.policy, cache.capacity) == (policy, 5)
    assert (cache.store is None) == (policy == "off")
    assert (tmp_path / "mine").exists() == (policy != "off")
    if cache.store:
        assert (cache.store.root, cache.store.limit) == (tmp_path / "mine", 7 << 20)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("2G", 2 << 30), ("1.5 GiB", 3 << 29), ("500mb", 500 << 20), ("8k", 8192), ("1T", 1 << 40)],
)
def test_sizes(text: str, nbytes: int, clean: pytest.MonkeyPatch) -> None:
    clean.setenv("RLX_CACHE_LIMIT", text)
    assert env.cache_limit() == nbytes


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("RLX_CACHE", "yes", env.cache_policy),
        ("RLX_CACHE_LIMIT", "0", env.cache_limit),
        ("RLX_CACHE_LIMIT", "-1G", env.cache_limit),
        ("RLX_CACHE_LIMIT", "lots", env.cache_limit),
        ("RLX_CACHE_LIMIT", "1X", env.cache_limit),
        ("RLX_THREADS", "0", env.threads),
        ("RLX_THREADS", "1025", env.threads),
        ("RLX_THREADS", "two", env.threads),
        ("RLX_THREADS", "1.5", env.threads),
        ("RLX_DEBUG", "8", env.debug_level),
        ("RLX_DEBUG", "-1", env.debug_level),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str, read: Callable[[], object], clean: pytest.MonkeyPatch) -> None:
    clean.setenv(name, value)
    with pytest.raises(ArgumentError, match=f"{name}: '{value}'"):
        read()


def test_the_table_names_every_variable_that_the_package_reads() -> None:
    import re

    sources = Path(env.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in re.findall(r"\bRLX_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    assert used == {variable.name for variable in env.VARIABLES}


def test_the_table_says_what_a_variable_may_say() -> None:
    from rlx.backends.cpu.levels import LEVELS

    values = {variable.name: variable.values.split(" | ") for variable in env.VARIABLES}
    assert set(values["RLX_TARGET"]) == {"native", *LEVELS}
    assert values["RLX_CACHE"] == list(env.CACHE_POLICIES)
