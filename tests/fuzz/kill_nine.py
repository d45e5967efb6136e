"""kill -9 at random moments of a store and of a convert: entries and files are whole or absent, and nothing is left.

A child does the work over and over and is killed. Then the next process looks: the cache opens, every entry is as it
was written, and the converted file is the old one or the new one. After that process has stored and converted, no
temporary file is left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from rlx.errors import RlxError
from rlx.export.convert import convert
from rlx.store.cache import CompileCache
from rlx.store.entry import LargeFile
from rlx.store.key import CompileKey
from rlx.store.kinds import PREFIXES, PROGRAMS, Budget
from rlx.store.store import Store

KEYS = 6  # entries that are stored and replaced
SECONDS = 0.08  # a kill comes this long after the child began, at most


@dataclass
class Harness:
    """One folder with a cache and a converted file.

    Args:
        folder: empty.
        checkpoint: a safetensors model.
        seed: of the moments.

    Attributes:
        counts: kills by what was killed, and how many of them left something half done.
        problems: what was wrong; none is what a run must show.
    """

    folder: Path
    checkpoint: Path
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random, self.parent = random.Random(self.seed), os.getpid()  # a child ends with its parent
        self.root, self.out = self.folder / "cache", self.folder / "out" / "model.gguf"
        self.out.parent.mkdir()
        self._convert()
        self.right = self.out.read_bytes()

    def _convert(self) -> None:
        convert(self.checkpoint, self.out, "F16", force=True, cache=CompileCache(store=Store(self.root)))

    def kill(self, what: str) -> None:
        """One child, one kill, one look."""
        actions: dict[str, Callable[[], None]] = {"store": self._store_forever, "convert": self._convert_forever}
        if what == "convert" and self.random.random() < 0.5:
            self.out.unlink(missing_ok=True)  # then it must be absent or whole
        child = os.fork()
        if not child:
            try:
                actions[what]()
            finally:
                os._exit(1)
        time.sleep(self.random.uniform(0, SECONDS))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            self.problems.append(f"{what}: the child ended by itself with {status}")
        self.counts[what] += 1
        self.counts[f"{what}, half done"] += bool(self._left())
        self.look(what)

    def _left(self) -> list[str]:
        """Temporary folders and partial files."""
        partial = [path.name for path in self.out.parent.iterdir() if path != self.out]
        return partial + [path.name for path in (self.root / "tmp").glob("*")]

    def look(self, what: str) -> None:
        """What the next process finds, and what it leaves."""
        say = self.problems.append
        store = Store(self.root)
        try:
            for digest, damage in store.verify(discard=False):
                say(f"{what}: entry {digest[:12]}: {damage}")
            for number, budget in product(range(KEYS), (PROGRAMS, PREFIXES)):
                entry = store.get(key(number, budget))
                if entry is not None and entry.read("number") != str(number).encode():
                    say(f"{what}: entry {number} has other contents")
            if self.out.exists() and self.out.read_bytes() != self.right:
                say(f"{what}: the converted file is damaged")
            store.put(key(0), files(0, 1), replace=True)
            if what == "convert":
                self._convert()
                if self.out.read_bytes() != self.right:
                    say(f"{what}: the next convert wrote another file")
        except (RlxError, OSError) as error:
            say(f"{what}: {type(error).__name__}: {error}")
        if left := self._left():
            say(f"{what}: left behind: {left}")

    def _store_forever(self) -> None:
        """Entries of all budgets and several sizes, in place of others, some of them large, with limits that evict."""
        generator = random.Random(os.getpid())
        stores = [Store(self.root, 400_000, budget) for budget in (PROGRAMS, PREFIXES)]
        while os.getppid() == self.parent:
            store = generator.choice(stores)
            number = generator.randrange(KEYS)
            contents = files(number, generator.randrange(1, 40_000))
            file = LargeFile(50_000, [memoryview(bytes(50_000))])
            large = {"weights.bin": file} if generator.random() < 0.3 else None
            store.put(key(number, store.budget), contents, replace=True, large=large)
            store.get(key(generator.randrange(KEYS), store.budget))

    def _convert_forever(self) -> None:
        while os.getppid() == self.parent:
            self._convert()


def key(number: int, budget: Budget = PROGRAMS) -> CompileKey:
    kind = "program" if budget is PROGRAMS else "prefix"
    return CompileKey(kind, "tiny", options={"number": number}, address=f"{number:064x}" if kind == "prefix" else "")


def files(number: int, size: int) -> dict[str, bytes | str]:
    return {"number": str(number), "program.o": bytes(size), "ir/00-graph.txt": "x" * size, "kernels/a.o": b"x"}


def run(kills: int, seed: int, source: Path, folder: Path) -> Harness:
    """Half of the kills in a store, half in a convert."""
    harness = Harness(folder, source, seed)
    null = os.open(os.devnull, os.O_WRONLY)  # warnings of the small limit
    saved = os.dup(2)
    os.dup2(null, 2)
    try:
        for number in range(kills):
            harness.kill(("store", "convert")[number % 2])
    finally:
        os.dup2(saved, 2)
        os.close(null)
        os.close(saved)
    return harness
