"""RLX_JIT=0: loop kernels as Python functions that a debugger sees, with the tokens of compiled programs."""

from __future__ import annotations

import bdb
import importlib.util
import inspect
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

import rlx
from rlx import SEQ, ops
from rlx.backends.cpu.kernels.rows import norm
from rlx.errors import ArgumentError
from rlx.runners import CachedRunner

CEILING = 1e-4  # of the largest logit, in exact precision: sums of f32 in another order
PROMPT = "Once upon a time"


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_JIT", "0")


def opened(precision: str = "exact") -> CachedRunner:
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
    lines, start = inspect.getsourcelines(norm._rms_norm)
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


def edited(path: Path) -> object:
    """`rms_norm` of the module with a breakpoint, as after an edit of the file."""
    line = "        src = row * WIDTH\n"
    path.write_text(inspect.getsource(norm).replace(line, f"{line}        breakpoint()\n"))
    spec = importlib.util.spec_from_file_location("edited_norm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rms_norm


def test_breakpoint_may_stand_in_a_kernel(tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba could not lower it; without compiling it runs, in the thread of the caller."""
    monkeypatch.setattr(norm, "rms_norm", edited(tmp_path / "edited_norm.py"))
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_locals["src"]))
    graph = rlx.Graph("norm")
    x = graph.input("x", [SEQ, 6])
    graph.output("y", ops.rms_norm(x, graph.weight("w", [6]), eps=1e-5))
    rows = np.arange(18, dtype=np.float32).reshape(3, 6)
    with rlx.compile(graph, bind={"w": np.ones(6, np.float32)}) as layer:
        found = layer(x=rows)["y"]
    assert stops == [0, 6, 12]
    np.testing.assert_allclose(found, rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5), rtol=1e-5)


def test_there_is_no_machine_code(uncompiled: None) -> None:
    graph = rlx.Graph("soft")
    graph.output("y", ops.softmax(graph.input("x", [SEQ, 5])))
    with rlx.compile(graph) as layer:
        assert "def _softmax" in layer.source()
        with pytest.raises(ArgumentError, match=r"no machine code.*RLX_JIT is 0"):
            layer.asm()


def test_verification_works_on_it(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong loop kernel is named, as one that was compiled would be."""
    monkeypatch.setenv("RLX_VERIFY", "1")
    with opened("auto") as runner:
        assert len(runner.generate(runner.tokenizer.encode("Once"), 2)) == 2
