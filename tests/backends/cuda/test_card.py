"""Everything on a real card. Skipped where there is none; `make test-cuda` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import check_golden, golden
from steps_ahead import noted_ahead
from weight_bytes import random_bytes

import rlx
from rlx.backends.cuda import layouts
from rlx.backends.cuda.backend import BACKEND
from rlx.backends.cuda.program import CardProgram, Stream
from rlx.backends.cuda.steps import CardCode
from rlx.backends.memory import DeviceArray
from rlx.compiler.compile import Compiler
from rlx.ir import ops
from rlx.ir.dtypes import DTYPES, DType
from rlx.ir.stored import dequantize
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.sampling.choice import UNIFORM, Changes, Choice, choose
from rlx.sampling.options import SampleOpts
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


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "deepseek-v3", "gemma4-moe"])
def test_experts_on_the_cpu(opened: Any, goldens: Path, family: str) -> None:
    runner, expected = opened(family, n_cpu_moe=2), golden(goldens, family)
    check_golden(runner, expected, TOLERANCE, greedy=8)
    ids = expected["tokens"].tolist()
    some = (ids[:24], ids, ids[3:20], ids[:1])
    alone = [runner.generate(each, 6, stop_at_eog=False) for each in some]
    assert runner.generate_batch(some, 6, stop_at_eog=False) == alone


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35", "gpt-oss"])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "q8_0"])
def test_every_kernel_computes_its_op(opened: Any, family: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_VERIFY", "1")
    runner, ids = opened(family, kv_dtype=kv_dtype, max_seq=256), [3 + i * i % 29 for i in range(130)]
    assert len(runner.generate(ids, 3, stop_at_eog=False)) == 3
    assert len(runner.generate_batch([ids, ids[:64], ids[:5]], 3, stop_at_eog=False)) == 3


MANY: dict[str, Any] = {"profile": {"buckets": {"seq": [1, 128]}}, "max_seq": 192}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35", "gpt-oss", "deepseek-v3", "qwen3moe"])
@pytest.mark.parametrize("more", [{}, {"kv_dtype": "f16"}, {"kv_dtype": "q8_0"}], ids=["f32", "f16", "q8_0"])
def test_calls_of_many_rows(opened: Any, family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_VERIFY", "1")
    runner, ids = opened(family, **MANY, **more), [3 + i * i % 29 for i in range(100)]
    assert len(runner.generate(ids, 2, stop_at_eog=False)) == 2
    assert len(runner.generate_batch([ids[1:80], ids[2:22], ids[3:7]], 2, stop_at_eog=False)) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_of_many_rows(opened: Any, family: str) -> None:
    runner, ids = opened(family, **MANY), [3 + i * i % 29 for i in range(100)]
    some = (ids, ids[1:60], ids[2:30], ids[3:7])
    alone = [runner.generate(each, 6, stop_at_eog=False) for each in some]
    assert runner.generate_batch(some, 6, stop_at_eog=False) == alone


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35"])
@pytest.mark.parametrize("more", [{}, {"top_k": 20, "top_p": 0.9}], ids=["temperature", "top-k and top-p"])
def test_sampled_tokens_of_one_call(
    opened: Any, family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the tokens that are drawn one by one, also where a stop id ends them."""
    found = []
    for native in (True, False):
        monkeypatch.setattr(BACKEND, "native_loops", native)
        runner, opts = opened(family), SampleOpts(temperature=1.3, seed=4, **more)
        tokens = runner.generate([5, 9, 2], 50, sample=opts, stop_at_eog=False)
        request = rlx.Request([5, 9, 2], 50, sample=opts, stop_at_eog=False, stop_ids=[tokens[40]])
        found.append([tokens, list(runner.submit(request).result())])
    assert found[0] == found[1] and len(found[0][0]) == 50


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35", "deepseek-v3", "qwen3moe"])
@pytest.mark.parametrize(
    "more", [None, {}, {"top_k": 20, "top_p": 0.9}], ids=["greedy", "temperature", "top-k and top-p"]
)
def test_runs_of_a_batch(
    opened: Any, family: str, more: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card takes the tokens of all rows to the next step: they are those of steps, rows end for themselves."""
    found, ahead = [], noted_ahead(monkeypatch)
    opts = SampleOpts.greedy() if more is None else SampleOpts(temperature=1.3, seed=4, **more)
    for native in (True, False):
        monkeypatch.setattr(BACKEND, "native_loops", native)
        runner = opened(family, max_seq=192)
        some = [[5, 9, 2, 7], [9, 2], list(range(3, 80)), [7], [8, 1, 4]]
        tokens = runner.generate_batch(some, 70, sample=opts, stop_at_eog=False)
        seen = [0] * len(some)

        def until(i: int, token: int, seen: list[int] = seen) -> bool:
            seen[i] += 1
            return seen[i] < 9 * (i + 1)

        found.append([tokens, runner.generate_batch(some, 70, until, sample=opts, stop_at_eog=False)])
        runner.close()  # after the steps that were begun when the last row ended
        assert bool(ahead) == (native and not (family == "qwen35" and opts.top_k)) and (not ahead or max(ahead) > 0)
        ahead.clear()
    assert found[0] == found[1]
    assert [len(each) for each in found[0][1]] == [9, 18, 27, 36, 45]


@pytest.mark.parametrize("dtype", layouts.TYPES, ids=str)
def test_packing_on_the_card(dtype: DType) -> None:
    n, k = 40, 768
    raw = random_bytes(dtype, n, k, np.random.default_rng(0))
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
    code = CardCode(BACKEND.cards(), built.manifest, built.files.__getitem__)
    program = CardProgram(code, built.manifest, BACKEND.memory, Stream(BACKEND.cards(), BACKEND.memory))
    weights, buffers = {}, {}
    for name, row in built.manifest["weights"].items():
        dtype = DTYPES[row["dtype"]]
        raw = random_bytes(dtype, n, k, rng)
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


CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 40}, {"top_p": 0.9, "temperature": 0.7}, {"typical_p": 0.5},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01}, {"min_p": 0.05, "temperature": 2.0}, {"top_p": 0.97},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [1000, 151_936])
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_choice_of_tokens(vocab: int, options: dict[str, Any]) -> None:
    """The tokens of the meaning, alone and together, with masks and changes."""
    rng, rows = np.random.default_rng(vocab), 24
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[5], logits[6, 7], logits[7, 9], logits[8, 3:900] = np.round(logits[5]), np.nan, np.inf, -np.inf
    choices = []
    for i in range(rows):
        mask = rng.integers(-(2**31), 2**31, -(-vocab // 32)).astype(np.int32) if i % 5 == 1 else None
        ids, counts = rng.integers(-3, vocab + 3, 300).astype(np.int32), rng.integers(0, 3, 300).astype(np.float64)
        changes = Changes(ids, counts, rng.standard_normal(300) * 4) if i % 3 == 1 else None
        choices.append(Choice(SampleOpts(seed=1, **options, repetition_penalty=1.2), mask, changes))
        choices[-1].numbers[UNIFORM] = rng.random()
    compiler = Compiler(BACKEND.target(), CompileCache(policy="off"))
    workers = compiler.workers(1)
    chooser = BACKEND.chooser(workers, compiler)
    array = DeviceArray(BACKEND.memory.adopt(logits.reshape(-1).view(np.uint8)), "f4", logits.shape)
    found = chooser([array[i] for i in range(rows)], choices)
    assert found == [choose(row, choice) for row, choice in zip(logits, choices, strict=True)]
    assert [chooser([array[i]], [choices[i]])[0] for i in (0, 1, 5)] == [found[i] for i in (0, 1, 5)]
    array.buffer.close()
    workers.close()
