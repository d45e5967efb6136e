"""Everything on a real card. Skipped where there is none; `make test-cuda` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import check_golden, golden

import rlx
from rlx.backends.cuda import layouts
from rlx.backends.cuda.backend import BACKEND
from rlx.backends.cuda.program import CardCode, CardProgram, Stream
from rlx.compiler.compile import Compiler
from rlx.ir import ops
from rlx.ir.dtypes import BF16, DTYPES, F16, F32, DType
from rlx.ir.stored import dequantize
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.store.cache import CompileCache

pytestmark = pytest.mark.skipif("cuda" not in rlx.devices(), reason="this machine has no card")

FAMILIES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4-moe", "llama", "qwen2", "qwen3"), "hf"),
    **dict.fromkeys(("qwen3moe", "qwen35", "gpt-oss", "deepseek-v3", "nemotron-h"), "hf"),
    **dict.fromkeys(("qwen35moe", "gemma4-e2b"), "model-f16.gguf"),
}
OPTIONS: dict[str, Any] = {
    "device": "cuda", "precision": "exact", "max_seq": 96, "profile": {"buckets": {"seq": [1, 32]}},
    "compile_ahead": False,
}  # fmt: skip
#: Of the largest logit.
TOLERANCE = 2e-4
#: Of the largest result of a linear: two bf16 parts of an activation have 16 bits.
LINEAR = 2e-5


@pytest.fixture
def opened(goldens: Path) -> Iterator[Any]:
    runners: list[Any] = []

    def open_one(family: str, **more: Any) -> Any:
        cache = CompileCache(policy="off")
        runners.append(rlx.auto_runner(goldens / family / FAMILIES[family], **{**OPTIONS, "cache": cache, **more}))
        return runners[-1]

    yield open_one
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(opened: Any, goldens: Path, family: str) -> None:
    check_golden(opened(family), golden(goldens, family), TOLERANCE, greedy=8)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_alone_and_together(opened: Any, goldens: Path, family: str) -> None:
    runner, ids = opened(family), golden(goldens, family)["tokens"].tolist()
    some = (ids[:24], ids, ids[3:20], ids[:1])
    alone = [runner.generate(each, 6, stop_at_eog=False) for each in some]
    assert runner.generate_batch(some, 6, stop_at_eog=False) == alone


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35", "gpt-oss"])
def test_every_kernel_computes_its_op(opened: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_VERIFY", "1")
    assert len(opened(family).generate([5, 9, 2, 7, 1], 3, stop_at_eog=False)) == 3


def _raw(dtype: DType, n: int, k: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random bytes of a matrix, whose values are no NaN and below 1e4."""
    if dtype in (F32, F16):
        return rng.standard_normal((n, k)).astype(str(dtype.numpy)).view(np.uint8).reshape(-1)
    if dtype is BF16:
        bits = rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8).reshape(-1)
    raw = rng.integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    blocks = raw.reshape(-1, dtype.nbytes)
    with np.errstate(all="ignore"):
        sizes = np.abs(dequantize(raw, dtype, (n, k))).reshape(-1, dtype.block).max(1)
    good = np.flatnonzero(sizes < 1e4)
    bad = np.setdiff1d(np.arange(len(blocks)), good)
    blocks[bad] = blocks[rng.choice(good, len(bad))]
    return raw


@pytest.mark.parametrize("dtype", layouts.TYPES, ids=str)
def test_packing_on_the_card(dtype: DType) -> None:
    n, k = 40, 768
    raw = _raw(dtype, n, k, np.random.default_rng(0))
    compiler = Compiler(BACKEND.target(), CompileCache(policy="off"))
    packer = compiler.packer(dtype, compiler.workers(1))
    target = BACKEND.memory.allocate(packer.nbytes(n, k))
    packer.pack(raw, target, n, k)
    found = layouts.unpack(dtype, target.read(np.uint8), n, k)
    np.testing.assert_array_equal(found, layouts.unpack(dtype, layouts.pack(dtype, raw, n, k), n, k))
    target.close()


@pytest.mark.parametrize("rows", [1, 8, 29, 61, 509])
def test_linears_of_every_type(rows: int) -> None:
    n, k, rng = 72, 768, np.random.default_rng(rows)
    graph = rlx.Graph("linears")
    x = graph.input("x", [rlx.SEQ, k])
    for dtype in layouts.TYPES:
        graph.output(dtype.name, ops.linear(x, graph.weight(f"w.{dtype}", [n, k], dtype)))
    target = BACKEND.target()
    seq = (1, 1) if rows == 1 else (2, 1 << rows.bit_length())
    options = Options(precision="exact", seq=seq, all_rows=True).effective(target.capabilities)
    lowered = pipeline.lower(graph, options, passes=BACKEND.passes(options.phase))
    built = BACKEND.build(lowered, target, lambda done, total: None)
    code = CardCode(BACKEND.card(), built.manifest, built.files.__getitem__, True)
    program = CardProgram(code, built.manifest, BACKEND.memory, Stream(BACKEND.card()))
    weights, buffers = {}, {}
    for name, row in built.manifest["weights"].items():
        dtype = DTYPES[row["dtype"]]
        raw = _raw(dtype, n, k, rng)
        weights[dtype.name] = dequantize(raw, dtype, (n, k)).astype(np.float64)
        buffers[name] = BACKEND.memory.adopt(layouts.pack(dtype, raw, n, k))
    program.bind(buffers)
    values = rng.standard_normal((rows, k)).astype(np.float32)
    program.inputs["x"][:rows] = values
    extents = {"SEQ": rows} if rows > 1 else {}
    for _ in range(3):  # launched, recorded, replayed
        program.run(**extents)
        for name, weight in weights.items():
            expected = values.astype(np.float64) @ weight.T
            found = program.output(name, **extents)
            assert np.abs(found - expected).max() <= LINEAR * np.abs(expected).max(), name
    program.close()
