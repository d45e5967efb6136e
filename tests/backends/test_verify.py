"""RLX_VERIFY=1 and the reference backend: a wrong kernel is named, sound ones pass in every way of generating."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import rlx
from rlx.backends import verify
from rlx.backends.cpu import select
from rlx.backends.cpu.kernels.rows.norm import rms_norm
from rlx.backends.cpu.target import Target, supported_levels
from rlx.backends.program import Program
from rlx.errors import ArgumentError, TargetError, VerificationError
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.runners import Model
from rlx.store.cache import CompileCache

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


def opened(goldens: Path, family: str, **more: Any) -> Model:
    file = goldens / family / ("model-Q4_K_M.gguf" if family.endswith("k256") else "hf")
    return rlx.auto_runner(file, **{**SMALL, **more})


@pytest.mark.any_machine
def test_a_planted_wrong_kernel_is_named(verifies: None, goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(goldens, "llama", precision="exact", cache=CompileCache(policy="off")) as runner:
        runner.prefill_logits(PROMPT)
        monkeypatch.setitem(select.KERNELS, "rms_norm", wrong_norm(rows=1))
        with pytest.raises(
            VerificationError, match=r"rms_norm, kernel norm_weighted_\w+, of program llama/decode: %\S*norm"
        ):
            runner.decode_logits(3)
        with pytest.raises(VerificationError, match="rms_norm"):
            runner.generate(PROMPT, 4)  # the native loop of many tokens would not look


# At lower levels the second one alone, which has every op of the first one.
@pytest.mark.parametrize("family", [pytest.param("llama-k256", marks=pytest.mark.any_machine), "qwen35-k256"])
def test_sound_kernels_pass_in_every_way(
    verifies: None, goldens: Path, family: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "SECONDS", 0.0)
    with opened(goldens, family) as runner:
        greedy = runner.generate(PROMPT, 6, stop_at_eog=False)
        assert len(greedy) == 6
        assert runner.generate(PROMPT, 6, speculative="prompt-lookup", stop_at_eog=False) == greedy
        assert [len(found) for found in runner.generate_batch([PROMPT, PROMPT[:3]], 3, stop_at_eog=False)] == [3, 3]
    said = capfd.readouterr().err
    assert re.search(r"rlx: verify: \w+/decode, step 1 \(.*SEQ 1.*\): up to %\S+ nothing differs", said)
    sums = re.findall(r"rlx: verify: \S+/(\w+): \d+ values of \d+ steps? compared", said)
    assert {"prefill", "decode", "batch"} <= {*sums}, "each program says how much was compared when it is closed"


@pytest.mark.parametrize("jit", ["1", "0"])
@pytest.mark.parametrize("level", supported_levels())
def test_codes_of_eight_bits(verifies: None, monkeypatch: pytest.MonkeyPatch, level: str, jit: str) -> None:
    """Each level packs them as its instructions take them; a table that is also multiplied is packed."""
    monkeypatch.setenv("RLX_JIT", jit)
    graph = Graph("tied")
    table = graph.weight("table", [48, 64], "q8_0")
    graph.output("y", ops.linear(ops.embedding(table, graph.input("ids", [SEQ], "int32")), table))
    values = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    rows = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    with rlx.compile(graph, bind={"table": packed}, target=level, precision="exact") as exe:
        found = exe(ids=[3, 47, 0])["y"]
    np.testing.assert_allclose(found, rows[[3, 47, 0]] @ rows.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kv", ["bf16", "q4_0"])
def test_the_reference_computes_what_the_cpu_does(goldens: Path, kv: str) -> None:
    found = {}
    for device in ("cpu", "reference"):
        with opened(goldens, "llama-k256", device=device, kv_dtype=kv, precision="exact") as runner:
            assert runner.device == device
            found[device] = runner.predict_logits(PROMPT, all_positions=True)
            assert len(runner.generate(PROMPT, 3, stop_at_eog=False)) == 3
    assert np.abs(found["cpu"] - found["reference"]).max() <= 1e-3 * np.abs(found["cpu"]).max()


@pytest.mark.any_machine
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
        rlx.compile(graph, device="rocm")


@pytest.mark.parametrize("precision", ["exact", "auto"])
def test_a_picture_encoder(verifies: None, precision: str) -> None:
    """Plain keys lie in tiles, with room after the last; rows of pictures see each other; the norm prepares rows."""
    graph, width = Graph("encoder"), 72
    patches = graph.input("patches", [4 * SEQ, 2 * width])
    places = graph.input("places", [4 * SEQ, 2], "int32")
    frequencies = graph.constant("frequencies", np.geomspace(1, 0.01, width // 2).astype(np.float32))
    angles = ops.rope_angles(places, frequencies, sections=(width // 4, width // 4))
    y = ops.layer_norm(patches, graph.weight("norm", [2 * width]), graph.weight("shift", [2 * width]))
    heads = [
        ops.linear(y, graph.weight(name, [2 * width, 2 * width], "bf16"), bf16=True).reshape(-1, 2, width)
        for name in "qkv"
    ]
    q, k = (ops.rope(part, angles, style="neox") for part in heads[:2])
    seen = ops.attention(q, k, heads[2], scale=width**-0.5, visible=graph.input("visible", [4 * SEQ], "int32"))
    pooled = seen.reshape(SEQ, 4, 2 * width).mean(1).clamp(-1.0, 0.75)
    index = graph.input("index", [SEQ], "int32")
    graph.output("y", ops.overlay_rows(graph.input("tokens", [SEQ, 2 * width]), pooled, index))
    rng = np.random.default_rng(0)
    sizes = {"norm": 2 * width, "shift": 2 * width, **dict.fromkeys("qkv", (2 * width, 2 * width))}
    weights = {name: 0.1 * rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    bind = {n: (w.view(np.uint32) >> 16).astype(np.uint16) if n in "qkv" else w for n, w in weights.items()}
    rows = {"patches": rng.standard_normal((84, 2 * width)), "tokens": rng.standard_normal((21, 2 * width))}
    numbers = {"places": rng.integers(0, 9, (84, 2)), "index": np.arange(21) % 3 - 1, "visible": np.arange(84) | 7}
    numbers["visible"][-4:] = 83
    found = []
    for device in ("cpu", "reference"):
        with rlx.compile(graph, {"SEQ": (16, 32), **bind}, precision=precision, device=device) as exe:
            found.append(exe(**rows, **numbers)["y"])
    assert np.abs(found[0] - found[1]).max() <= (1e-5 if precision == "exact" else 0.02) * np.abs(found[0]).max()


@pytest.mark.any_machine
def test_a_step_without_verification_has_no_observer(goldens: Path) -> None:
    with opened(goldens, "llama") as runner:
        runner.prefill_logits(PROMPT)
        program: Program = next(iter(runner._engine.tables["prefill"].programs.values()))  # type: ignore[attr-defined]
        assert program.observers == ()
