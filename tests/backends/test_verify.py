"""RLX_VERIFY=1 and the reference backend: a wrong kernel is named, sound ones pass in every way of generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.base import Program
from rlx.backends.cpu import select
from rlx.backends.cpu.kernels.rows.norm import rms_norm
from rlx.backends.cpu.target import Target
from rlx.errors import ArgumentError, TargetError, VerificationError
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import KV_DTYPES
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.runners import CachedRunner
from rlx.runtime.cache import CompileCache

PROMPT = [5, 9, 2, 7, 5, 9, 2, 7, 5, 9]
SMALL: dict[str, Any] = {"max_seq": 64, "profile": {"buckets": {"seq": [1, 32]}}, "compile_ahead": False, "threads": 2}


@pytest.fixture
def verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_VERIFY", "1")


def wrong_norm(rows: int) -> Any:
    """A kernel for `rms_norm` with another eps, for nodes of this number of rows."""
    right = select.KERNELS["rms_norm"]

    def build(node: Node, target: Target) -> Any:
        call = right(node, target)
        if node.shape[0] != rows:
            return call
        return select._call(node, rms_norm(select.width(node), 0.3, out=node["out"]), call.units)

    return build


def opened(goldens: Path, family: str, **more: Any) -> CachedRunner:
    file = goldens / family / ("model-Q4_K_M.gguf" if family.endswith("k256") else "hf")
    return rlx.auto_runner(file, **{**SMALL, **more})


def test_a_planted_wrong_kernel_is_named(verifies: None, goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(goldens, "llama", precision="exact", cache=CompileCache(policy="off")) as runner:
        runner.prefill_logits(PROMPT)
        monkeypatch.setitem(select.KERNELS, "rms_norm", wrong_norm(rows=1))
        with pytest.raises(VerificationError, match=r"kernel rms_norm_\w+, of program llama/decode: %\S*norm"):
            runner.decode_logits(3)
        with pytest.raises(VerificationError, match="rms_norm"):
            runner.generate(PROMPT, 4)  # the native loop of many tokens would not look


@pytest.mark.parametrize("family", ["llama-k256", "qwen35-k256"])
def test_sound_kernels_pass_in_every_way(verifies: None, goldens: Path, family: str) -> None:
    with opened(goldens, family) as runner:
        greedy = runner.generate(PROMPT, 6, stop_at_eog=False)
        assert len(greedy) == 6
        assert runner.generate(PROMPT, 6, speculative="prompt-lookup", stop_at_eog=False) == greedy
        assert [len(found) for found in runner.generate_batch([PROMPT, PROMPT[:3]], 3, stop_at_eog=False)] == [3, 3]


@pytest.mark.parametrize("kv", [dtype.name for dtype in KV_DTYPES])
def test_the_reference_computes_what_the_cpu_does(goldens: Path, kv: str) -> None:
    found = {}
    for device in rlx.devices():
        with opened(goldens, "llama-k256", device=device, kv_dtype=kv, precision="exact") as runner:
            assert runner.device == device
            found[device] = runner.predict_logits(PROMPT, all_positions=True)
            assert len(runner.generate(PROMPT, 3, stop_at_eog=False)) == 3
    assert np.abs(found["cpu"] - found["reference"]).max() <= 1e-3 * np.abs(found["cpu"]).max()


def test_a_compiled_graph_runs_on_the_reference() -> None:
    graph = Graph("square")
    x = graph.input("x", [SEQ, 4])
    graph.output("y", ops.mul(x, x))
    with rlx.compile(graph, device="reference") as exe:
        assert exe(x=[[1, 2, 3, 4]])["y"].tolist() == [[1, 4, 9, 16]]
        assert exe.kernels == ["elementwise"]
        with pytest.raises(ArgumentError, match="no machine code"):
            exe.asm()
    with pytest.raises(TargetError, match="There is cpu, reference"):
        rlx.compile(graph, device="cuda")


def test_a_step_without_verification_has_no_observer(goldens: Path) -> None:
    with opened(goldens, "llama") as runner:
        runner.prefill_logits(PROMPT)
        program: Program = runner._engine._last  # type: ignore[attr-defined]
        assert program.observers == []
