"""RLX_JIT=0: loop kernels as Python functions that a debugger sees, with the tokens of compiled programs."""

from __future__ import annotations

import bdb
import inspect
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

import rlx
from rlx.backends.cpu.kernels.rows import norm
from rlx.runners import Model

CEILING = 1e-4  # of the largest logit, in exact precision: sums of f32 in another order
PROMPT = "Once upon a time"


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_JIT", "0")


def opened(precision: str = "exact") -> Model:
    return rlx.auto_runner(max_seq=32, precision=precision, profile={"buckets": {"seq": [1, 8]}}, cache="off")


def test_tokens_and_logits_are_those_of_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, tokens one by one, and two sequences side by side."""
    found = []
    for jit in ("1", "0"):
        monkeypatch.setenv("RLX_JIT", jit)
        with opened() as runner:
            ids = runner.tokenizer.encode(PROMPT)
            logits = runner.predict_logits(ids)
            together = runner.generate_batch([ids, ids[:2]], 2)
            found.append((logits, runner.generate(ids, 3), together))
    (expected, *compiled), (logits, *own) = found
    assert compiled == own
    assert 0 < np.abs(logits - expected).max() < CEILING * np.abs(expected).max()


def test_a_debugger_sees_the_values_of_a_kernel(uncompiled: None, demo_model: Path) -> None:
    """At a breakpoint in the first norm of a model, x holds the rows of the embedding table that the file has."""
    lines, start = inspect.getsourcelines(norm.norm_rows)
    line = start + next(i for i, text in enumerate(lines) if "src = row * WIDTH" in text)
    seen: list[tuple[int, np.ndarray]] = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: FrameType) -> None:
            if self.break_here(frame):
                seen.append((frame.f_locals["row"], frame.f_locals["x"].copy()))
            self.set_continue()

    with opened() as runner:
        ids = runner.tokenizer.encode(PROMPT)
        debugger = Debugger()
        assert debugger.set_break(norm.__file__, line) is None
        debugger.runcall(runner.predict_logits, ids)
    table = next(t for t in GGUFReader(demo_model).tensors if t.name == "token_embd.weight")
    rows = dequantize(table.data[ids], table.tensor_type)
    assert [row for row, _ in seen[: len(ids)]] == [*range(len(ids))]
    np.testing.assert_allclose(seen[0][1].reshape(len(ids), -1), rows, rtol=1e-6)


def test_verification_works_on_it(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong loop kernel is named, as one that was compiled would be."""
    monkeypatch.setenv("RLX_VERIFY", "1")
    with opened("auto") as runner:
        assert len(runner.generate(runner.tokenizer.encode("Once"), 2)) == 2
