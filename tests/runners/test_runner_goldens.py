"""From a path to tokens on the golden checkpoints, with the interpreter as engine: expected values by transformers.

What the native engine adds is tested where it stands; this holds the runners to the same figures without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Opened, Stepwise, install

from rlx import models
from rlx.ir import dims, interp
from rlx.ir.dtypes import F32
from rlx.runners import CachedRunner, LmRunner, auto_runner
from rlx.text import load_tokenizer
from rlx.weights import ModelWeights, open_weights

FAMILIES = {  # and the file of each; both files of a family are compared where its graph is tested
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4-moe", "llama", "qwen2", "qwen3"), "hf"),
    **dict.fromkeys(("qwen3moe", "qwen35"), "hf"),
    **dict.fromkeys(("qwen35moe", "gemma4-e2b"), "model-f16.gguf"),
}
MAX_SEQ, TOLERANCE = 96, 3e-5  # of float32 against float32, and scores of Gemma 4 have no scale
SIZES = {"CTX": MAX_SEQ, "WINDOW_CTX": MAX_SEQ}


class InterpretedEngine(Stepwise):
    """The model's graph, interpreted in float32; weights from the file through the weights stage."""

    def __init__(self, path: Path) -> None:
        with open_weights(path) as loader:
            has_tensor = loader.tensors.__contains__
            self.config = models.config_from(loader.format, loader.metadata, has_tensor, where=loader.path)
            weights = ModelWeights(loader, self.config.arch)
            for view in models.views(self.config, weights.has):
                weights.define(*view)
            self._graph = models.build(self.config, weights, F32)
            constants = self._graph.constants
            names = [name for name in self._graph.leaves("weight") if name not in constants]
            self._weights = {name: self.config.value(name, weights.array(name)) for name in names}
        self.tokenizer, self.max_seq, self.recommended = load_tokenizer(path), MAX_SEQ, None
        self._start()

    def _start(self) -> None:
        states = self._graph.leaves("state").items()
        self._states = {n: np.zeros([dims.value(d, SIZES) for d in s.shape], np.float32) for n, s in states}
        self.ids: list[int] = []

    @property
    def past(self) -> int:
        return len(self.ids)

    def forward(self, ids: Sequence[int], all_rows: bool = False) -> np.ndarray[Any, Any]:
        env = {"SEQ": len(ids), "PAST_SEQ": self.past, **SIZES}
        positions = np.arange(self.past, self.past + len(ids), dtype=np.int32)
        feeds = {**self._weights, **self._states, "tokens": np.array(ids, np.int32), "positions": positions}
        outputs, self._states = interp.run(self._graph, feeds, env)
        self.ids += ids
        return outputs["logits"] if all_rows else outputs["logits"][-1]

    def trim(self, length: int) -> None:
        kept = self.ids[:length]
        if length < self.past and any(layer.recurrent for layer in self.config.each):  # these states cannot go back
            self._start()
            if kept:
                self.forward(kept)
        self.ids = kept

    def reset(self) -> None:
        self._start()

    @contextmanager
    def scratch(self) -> Iterator[None]:
        kept = self._states, self.ids
        self._start()
        try:
            yield
        finally:
            self._states, self.ids = kept

    def compile(self, on_program: Any = None) -> list[Any]:
        return []

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return install(monkeypatch, InterpretedEngine)  # type: ignore[arg-type]


def runner_of(goldens: Path, family: str) -> CachedRunner:
    return auto_runner(goldens / family / FAMILIES[family])


def golden(goldens: Path, family: str) -> dict[str, Any]:
    """The expected values; `positions` are those that have `logits`."""
    return {"positions": np.arange(48), **np.load(goldens / family / "golden.npz")}


def sure(expected: dict[str, Any]) -> int:
    """Greedy tokens before the first that is nearly tied."""
    ties = np.flatnonzero(expected["greedy_margin"] < 20 * TOLERANCE * np.abs(expected["logits"]).max())
    return int(ties[0]) if len(ties) else len(expected["greedy"])


def assert_close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_by_every_way(goldens: Path, family: str) -> None:
    runner, expected = runner_of(goldens, family), golden(goldens, family)
    tokens, cut = expected["tokens"].tolist(), len(expected["tokens"]) // 3
    logits = dict(zip(expected["positions"].tolist(), expected["logits"], strict=True))
    assert_close(runner.predict_logits(tokens, all_positions=True)[list(logits)], expected["logits"])
    assert_close(runner.predict_logits(tokens), logits[len(tokens) - 1])
    assert_close(runner.prefill_logits(tokens[:cut]), logits[cut - 1])
    for at in range(cut, cut + 3):
        assert_close(runner.decode_logits(tokens[at]), logits[at])
        runner.predict_logits(tokens[:3])  # in between, it changes nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(goldens: Path, family: str) -> None:
    runner, expected = runner_of(goldens, family), golden(goldens, family)
    tokens, count = expected["tokens"].tolist(), sure(expected)
    assert count >= 3
    ids = runner.generate(tokens, count, stop_at_eog=False)
    assert ids == expected["greedy"][:count].tolist()
    assert LmRunner.generate(runner, tokens, min(count, 4), stop_at_eog=False) == ids[:4]
    seen: list[int] = []
    assert runner.generate(tokens, 16, lambda t: (seen.append(t), len(seen) < 3)[1]) == seen == ids[:3]
