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
from rlx.errors import CacheError, CompileError
from rlx.store.cache import CompileCache
from rlx.store.entry import Entry
from rlx.store.key import CompileKey
from rlx.store.store import Store

pytestmark = pytest.mark.any_machine


def key(number: int = 0) -> CompileKey:
    return CompileKey("program", "tiny", phase="decode", options={"number": number})


class Program:
    """What `load` makes: knows its text and whether it was closed."""

    def __init__(self, files: Entry) -> None:
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


def test_the_table_names_every_variable_that_the_package_reads() -> None:
    import re

    sources = Path(env.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in re.findall(r"\bRLX_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    assert used == {variable.name for variable in env.VARIABLES}
