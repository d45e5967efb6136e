"""An engine without a model: enough of one to test runners and the command line in milliseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx.errors import NumericalError
from rlx.runners.engine.ahead import Ahead
from rlx.runners.engine.ready import ProgramRecord, ReadyPrograms
from rlx.runners.opening.options import EngineOptions
from rlx.runtime.compile import Compilation


def tokens_as_numbers(eog_ids: Collection[int] = ()) -> Any:
    """A tokenizer whose tokens are their numbers in angle brackets."""
    return SimpleNamespace(
        eog_ids=frozenset(eog_ids), special_ids=frozenset(), drop_space=False, token_bytes=lambda i: f"<{i}>".encode()
    )


class Stepwise:
    """The greedy run of an engine that has nothing but single steps."""

    forward: Callable[..., np.ndarray[Any, Any]]
    most_rows = 16
    ahead = Ahead(None)
    trim: Callable[[int], None]
    past: Any
    repeats = True
    device = "cpu"

    def recover(self) -> None:
        """Nothing here survives an interrupt that should not."""

    current = None  # the one sequence

    def greedy(self, sequence: Any, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        found: list[int] = []
        while len(found) < count and not (found and found[-1] in stops):
            logits = self.forward([found[-1] if found else token])
            if not np.isfinite(logits).all():
                self.trim(self.past - 1)
                raise NumericalError("a logit is NaN or infinite", where=f"position {self.past}")
            found.append(int(logits.argmax()))
        return found


class FakeEngine(Stepwise):
    """A small recurrent net with weights from a seed: its logits depend on every token before and on their order.

    Args:
        script: answer with these ids, whatever the prompt, instead of what the net says.
        rule: called with (ids in the cache, logits of the last) to change or break the logits.
    """

    def __init__(
        self,
        vocab_size: int = 40,
        max_seq: int = 24,
        *,
        family: str = "qwen3",
        tokenizer: Any = None,
        script: Sequence[int] = (),
        rule: Callable[[list[int], np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        self.config: Any = SimpleNamespace(vocab_size=vocab_size, context=64, family=family, arch=family, layers=2)
        self.tokenizer = tokenizer or tokens_as_numbers()
        self.recommended: Any = None
        self.max_seq, self.closed, self.compiles, self.calls = max_seq, False, 0, list[int]()
        self._script, self._rule, self._prompt = list(script), rule, 0
        self.batches: list[FakeBatch] = []
        self._embed = random.normal(size=(vocab_size, 8))
        self._mix, self._head = random.normal(size=(8, 8)), random.normal(size=(8, vocab_size))
        self._states, self._ids = [np.zeros(8)], list[int]()
        self.records = [
            ProgramRecord("decode", (1, 1), 9, 4000, 0.5, False, "0" * 64),
            ProgramRecord("prefill", (2, 16), 12, 9000, 0.01, True, "0" * 64),
        ]

    @property
    def past(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        return list(self._ids)

    def forward_rows(self, ids: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        for at in range(0, len(ids), 3):
            yield self.forward(ids[at : at + 3], True)

    def hidden_rows(self, ids: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        for at in range(0, len(ids), 3):
            self.forward(ids[at : at + 3])
            yield np.stack(self._states[-len(ids[at : at + 3]) :]).astype(np.float32)

    def snapshot(self) -> Any:
        return list(self._ids), list(self._states)

    def restore(self, snapshot: Any) -> None:
        self._ids, self._states = map(list, snapshot)

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> np.ndarray[Any, Any]:
        assert not self.closed
        assert all(type(i) is int for i in ids)
        assert 0 < len(ids) <= self.max_seq - self.past, "the runner must check the room"
        self.calls.append(len(ids))
        self._prompt = self._prompt if self.past else len(ids)
        rows = np.stack([self._append(i) for i in ids]).astype(np.float32)
        return rows if all_rows else rows[-1]

    def verify(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        return self.forward(ids, all_rows=True)

    def _append(self, token: int) -> np.ndarray[Any, Any]:
        self._ids.append(token)
        self._states.append(np.tanh(self._mix @ self._states[-1] + self._embed[token]))
        logits = self._states[-1] @ self._head
        answered = self.past - self._prompt
        if 0 <= answered < len(self._script):
            logits = np.where(np.arange(len(logits)) == self._script[answered], 9.0, 0.0)
        return self._rule(self._ids, logits) if self._rule else logits

    def trim(self, length: int) -> None:
        assert 0 <= length <= self.past
        del self._ids[length:], self._states[length + 1 :]

    def reset(self) -> None:
        self.trim(0)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        kept = self._states, self._ids, self._prompt
        self._states, self._ids = [np.zeros(8)], []
        try:
            yield
        finally:
            self._states, self._ids, self._prompt = kept

    @contextmanager
    def batch(self, slots: int, length: int) -> Iterator[FakeBatch]:
        assert 0 < length <= self.max_seq
        kept = self._states, self._ids, self._prompt
        self.batches.append(FakeBatch(self, slots, length))
        try:
            yield self.batches[-1]
        finally:
            self._states, self._ids, self._prompt = kept

    ready = ReadyPrograms([])

    def compile(
        self,
        on_program: Callable[[ProgramRecord], None] | None = None,
        batch: int = 1,
        phase: str | None = None,
        rows: int | None = None,
    ) -> list[ProgramRecord]:
        self.prepared = batch
        for record in self.records:
            if on_program:
                on_program(record)
        return self.records

    def stats(self) -> dict[str, Any]:
        cache = SimpleNamespace(compiles=self.compiles, compile_seconds=0.25 * self.compiles, hits_disk=2)
        compiled = [
            Compilation(f"program qwen3 {i}", 0.25, "0" * 64, "no entry has model 'qwen3'")
            for i in range(self.compiles)
        ]
        return {"threads": 1, "weights_bytes": 10, "profile": None, "cache": cache, "compiled": compiled}

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class FakeBatch:
    """Sequences of the net side by side.

    Attributes:
        steps: how many sequences each step had.
    """

    def __init__(self, engine: FakeEngine, slots: int, length: int) -> None:
        self.engine, self.slots, self.length, self.steps = engine, slots, length, list[int]()
        self._sequences: dict[int, tuple[list[Any], list[int], int]] = {}

    def start(self, slot: int, prompt: Sequence[int]) -> np.ndarray[Any, Any]:
        assert 0 <= slot < self.slots
        self._sequences[slot] = [np.zeros(8)], [], 0
        return self._forward(slot, prompt)

    def step(self, tokens: Mapping[int, int]) -> np.ndarray[Any, Any]:
        self.steps.append(len(tokens))
        return np.stack([self._forward(slot, [token]) for slot, token in tokens.items()])

    def _forward(self, slot: int, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        engine = self.engine
        engine._states, engine._ids, engine._prompt = self._sequences[slot]
        logits = engine.forward(list(ids))
        assert engine.past <= self.length
        self._sequences[slot] = engine._states, engine._ids, engine._prompt
        return logits


class Opened:
    """What `Engine.open` was asked for, without options at their defaults, and the engines that it gave out."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, dict[str, Any]]] = []
        self.engines: list[FakeEngine] = []

    @property
    def options(self) -> dict[str, Any]:
        return self.calls[-1][1]


def install(monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], FakeEngine]) -> Opened:
    """Puts a module in the place of `rlx.runners.engine.engine` whose `Engine.open` calls `make`."""
    opened = Opened()

    def open_(source: Any, **options: Any) -> FakeEngine:
        path = Path(getattr(source, "path", source))  # of a path, or of an open loader
        path = path.parent if path.suffix == ".safetensors" else path
        usual = vars(EngineOptions())
        opened.calls.append((path, {name: value for name, value in options.items() if value != usual[name]}))
        if progress := options.get("progress"):
            progress("weights", 1, 2)
            progress("weights", 2, 2)
        opened.engines.append(make(path))
        return opened.engines[-1]

    module = ModuleType("rlx.runners.engine.engine")
    module.Engine = SimpleNamespace(open=open_)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlx.runners.engine.engine", module)
    return opened


def with_config(engine: FakeEngine, **changes: Any) -> FakeEngine:
    engine.config = SimpleNamespace(**{**vars(engine.config), **changes})
    return engine


__all__ = ["FakeEngine", "Opened", "install", "replace", "with_config"]
