"""An engine without a model: enough of one to test runners and the command line in milliseconds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx import engine as engines
from rlx.compiler.compile import Compilation
from rlx.engine.opening.options import EngineOptions
from rlx.engine.programs.background import BackgroundCompiler
from rlx.engine.programs.programs import ProgramRecord
from rlx.engine.programs.ready import ReadyPrograms
from rlx.sampling.choice import choose_rows


def tokens_as_numbers(eog_ids: Collection[int] = ()) -> Any:
    """A tokenizer whose tokens are their numbers in angle brackets."""
    return SimpleNamespace(
        eog_ids=frozenset(eog_ids), special_ids=frozenset(), drop_space=False, vocab_size=1 << 20,
        token_bytes=lambda i: f"<{i}>".encode(),
    )  # fmt: skip


class FakeSequence:
    """Ids, and the state of the net after each of them."""

    recurrent = marks = False

    def __init__(self, engine: FakeEngine, prompt: Sequence[int], shared: bool) -> None:
        self.engine, self.shared = engine, shared
        known = max((_common(ids, prompt) for ids in engine.known()), default=0) if shared else 0
        self.ids, self.states = list[int](), [np.zeros(8)]
        self.prompt = len(prompt)
        self.closed = False
        for token in prompt[: min(known, len(prompt) - 1)]:
            self.append(token)

    def __len__(self) -> int:
        return len(self.ids)

    def call_end(self, start: int, most: int) -> int:
        return start + most

    def append(self, token: int) -> np.ndarray[Any, Any]:
        """Appends a token: the logits after it."""
        assert not self.closed
        engine = self.engine
        self.ids.append(token)
        self.states.append(np.tanh(engine._mix @ self.states[-1] + engine._embed[token]))
        logits = self.states[-1] @ engine._head
        answered = len(self.ids) - self.prompt
        if 0 <= answered < len(engine._script):
            logits = np.where(np.arange(len(logits)) == engine._script[answered], 9.0, 0.0)
        return logits

    def mark(self, length: int) -> None:
        """There are no states that could not go back."""

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.ids)
        del self.ids[length:], self.states[length + 1 :]

    def pause(self) -> None:
        """There is room enough."""

    resume = pause

    def close(self) -> None:
        if not self.closed and self.shared:
            self.engine.remembered.append(list(self.ids))
        self.closed = True

    def discard(self) -> None:
        self.closed = True


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class FakeEngine:
    """A small recurrent net with weights from a seed: its logits depend on every token before and on their order.

    Args:
        script: answer with these ids, whatever the prompt, instead of what the net says.
        rule: called with (ids in the cache, logits of the last) to change or break the logits.

    Attributes:
        calls: the rows of each segment that was computed, in order.
        steps: how many segments each step had.
        prompts: what sequences were opened with.
        remembered: the ids of closed sequences: new ones begin with what they share.
    """

    most_rows, shared_rows = 16, 16
    device = "cpu"
    ready = ReadyPrograms([])
    images = None  # text only
    adapters = None

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
        self.ahead = BackgroundCompiler(None)
        self.kept = self.prefix_writer = None
        self.max_seq, self.closed, self.compiles = max_seq, False, 0
        self.calls, self.steps, self.remembered = list[int](), list[int](), list[list[int]]()
        self.prompts: list[list[int]] = []
        self._open: weakref.WeakSet[FakeSequence] = weakref.WeakSet()
        self._script, self._rule = list(script), rule
        self._embed = random.normal(size=(vocab_size, 8))
        self._mix, self._head = random.normal(size=(8, 8)), random.normal(size=(8, vocab_size))
        self.records = [
            ProgramRecord("decode", (1, 1), 9, 4000, 0.5, False, "0" * 64),
            ProgramRecord("prefill", (2, 16), 12, 9000, 0.01, True, "0" * 64),
        ]

    def known(self) -> list[list[int]]:
        """The ids of all sequences."""
        return [*self.remembered, *(each.ids for each in self._open if not each.closed and each.shared)]

    def open_sequence(
        self,
        prompt: Sequence[int] = (),
        embeddings: Any = None,
        *,
        shared: bool = True,
        salt: str = "",
        adapter: int = 0,
    ) -> Any:
        made = FakeSequence(self, prompt, shared)
        self.prompts.append(list(prompt))
        self._open.add(made)
        return made

    def check_fits(self, positions: int) -> None:
        """There is room enough."""

    choose = staticmethod(choose_rows)

    def compute(self, segments: Any) -> list[Any]:
        self.steps.append(len(segments))
        found = [self._rows(segment.sequence, segment.tokens) for segment in segments]
        wanted = (segment.logits for segment in segments)
        return [{"none": None, "last": rows[-1], "all": rows}[name] for rows, name in zip(found, wanted, strict=True)]

    step = compute

    def _rows(self, sequence: FakeSequence, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        assert not self.closed
        assert all(type(i) is int for i in ids)
        assert 0 < len(ids) <= min(self.most_rows, self.max_seq - len(sequence)), "the runner must check the room"
        self.calls.append(len(ids))
        rows = [sequence.append(token) for token in ids]
        if self._rule:
            ends = range(len(sequence) - len(ids) + 1, len(sequence) + 1)
            rows = [self._rule(sequence.ids[:end], row) for end, row in zip(ends, rows, strict=True)]
        return np.stack(rows).astype(np.float32)

    def logits(self, ids: Sequence[int], all_rows: bool = False) -> np.ndarray[Any, Any]:
        """The logits after some ids, or after each of them: what a runner has to come to."""
        rows = self._rows(self.open_sequence(shared=False), ids)
        return rows if all_rows else rows[-1]

    def hidden(self, sequence: Any, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        self._rows(sequence, ids)
        return np.stack(sequence.states[-len(ids) :]).astype(np.float32)

    def run(self, rows: Any, *, loads: bool = True) -> None:
        """It computes step by step."""

    def greedy(self, sequence: Any, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        return []

    def snapshot_of(self, sequence: Any) -> Any:
        return list(sequence.ids)

    def restored(self, snapshot: Any) -> Any:
        made = self.open_sequence()
        for token in snapshot:
            made.append(token)
        return made

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
        own = {"threads": 1, "weights_bytes": 10, "profile": None}
        return {**own, "programs": {}, "cache": cache, "compiled": compiled}

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class Opened:
    """What `Engine.open` was asked for, without options at their defaults, and the engines that it gave out."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, dict[str, Any]]] = []
        self.engines: list[FakeEngine] = []

    @property
    def options(self) -> dict[str, Any]:
        return self.calls[-1][1]


def install(monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], FakeEngine]) -> Opened:
    """Puts a module in the place of `rlx.engine.engine` whose `Engine.open` calls `make`."""
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

    module = ModuleType("rlx.engine.engine")
    module.Engine = SimpleNamespace(open=open_)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlx.engine.engine", module)
    monkeypatch.setattr(engines, "engine", module, raising=False)
    return opened


def with_config(engine: FakeEngine, **changes: Any) -> FakeEngine:
    engine.config = SimpleNamespace(**{**vars(engine.config), **changes})
    return engine


__all__ = ["FakeEngine", "Opened", "install", "replace", "with_config"]
