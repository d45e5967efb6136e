"""The device "cuda" without a card: kernels become PTX, values lie where they are looked for, refusals have names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle3
import numpy as np
import paper_card
import pytest
from click.testing import CliRunner

import rlx
from rlx.backends.cuda import clocks, driver, layouts, ptx, sass
from rlx.backends.cuda.backend import Cuda
from rlx.backends.cuda.code import Code
from rlx.backends.cuda.launches import Context
from rlx.backends.cuda.passes import round_activations
from rlx.backends.cuda.target import LEVELS, named
from rlx.cli.main import cli
from rlx.engine.engine import Engine
from rlx.errors import CompileError, TargetError
from rlx.ir import ops
from rlx.ir.dtypes import BF16, F8_E4M3, F16, F32, Q4_K, Q6_K, Q8_0, DType
from rlx.passes.options import Options
from rlx.sampling.choice import UNIFORM, Sampler, choose
from rlx.store.cache import CompileCache

#: Recurrent states and quantized weights. Slow cases: windows and soft caps, which `test_cuda_kernels.py` computes,
#: latent attention, experts with sinks, layer norms.
FAMILIES = {
    **dict.fromkeys(("gemma2", "deepseek-v3", "qwen35", "gpt-oss", "cohere2"), "hf"),
    "llama-k256": "model-Q4_K_M.gguf",
}
SLOW = ("cohere2", "gemma2", "deepseek-v3", "gpt-oss")
OPTIONS: dict[str, Any] = {
    "precision": "exact", "max_seq": 96, "profile": {"buckets": {"seq": [1, 32, 128]}}, "compile_ahead": False,
}  # fmt: skip


@pytest.fixture
def card() -> Iterator[paper_card.PaperCard]:
    with paper_card.registered() as found:
        found.ptx.clear()
        found.manifests.clear()
        yield found


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] if family in SLOW else []) for family in FAMILIES]
)
def test_families(card: paper_card.PaperCard, goldens: Path, family: str) -> None:
    expected = np.load(goldens / family / "golden.npz")
    found = []
    for device in ("paper", "reference"):
        cache = CompileCache(policy="off")
        with rlx.auto_runner(goldens / family / FAMILIES[family], **OPTIONS, device=device, cache=cache) as runner:
            found.append(runner.predict_logits(expected["tokens"].tolist()))
            assert len(runner.generate([1, 2, 3], 2, stop_at_eog=False)) == 2
            assert len(runner.generate_batch([[1, 2, 3], [4, 5]], 2, stop_at_eog=False)) == 2
    assert np.abs(found[0] - found[1]).max() <= 3e-5 * np.abs(found[1]).max()
    assert all(re.search(r"\.target sm_90", text) for text in card.ptx.values()) and len(card.ptx) > 10
    assert "advance.ptx" in card.ptx, "greedy programs take their token to the next step"


def test_a_head_drafts(card: paper_card.PaperCard, goldens: Path, tmp_path: Path) -> None:
    """Its programs and those of the model become kernels of a card; there are no native rounds."""
    model = eagle3.model(goldens, tmp_path / "model")
    drafted = f"model:{eagle3.write(eagle3.random_head(), tmp_path / 'head')}"
    with rlx.auto_runner(model, **OPTIONS, device="paper", cache=CompileCache(policy="off")) as runner:
        plain = runner.generate([1, 2, 3], 6, stop_at_eog=False)
        assert runner.generate([1, 2, 3], 6, stop_at_eog=False, speculative=drafted) == plain
        assert runner.stats()["speculation"]["drafted"] > 0


DRAWS = {
    "temperature": rlx.SampleOpts(temperature=1.3, seed=5),
    "top-k and top-p": rlx.SampleOpts(top_k=20, top_p=0.9, temperature=1.1, seed=6),
    "penalties, which look back": rlx.SampleOpts(temperature=1.5, repetition_penalty=1.3, seed=7),
    "mirostat, which does, too": rlx.SampleOpts(mirostat=2, seed=8),
}


@pytest.mark.parametrize("name", DRAWS)
def test_sampled_tokens_of_one_call(
    card: paper_card.PaperCard, goldens: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the tokens that are drawn one by one, also where somebody stops at some of them."""
    found = []
    for native in (True, False):
        monkeypatch.setattr(card, "native_loops", native)
        options: dict[str, Any] = {**OPTIONS, "device": "paper", "cache": CompileCache(policy="off")}
        with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
            tokens = [runner.generate([1, 2, 3], 30, sample=DRAWS[name], stop_at_eog=False)]
            request = rlx.Request([1, 2, 3], 30, sample=DRAWS[name], stop_at_eog=False, stop_ids=[tokens[0][9]])
            tokens.append(list(runner.submit(request).result()))
            tokens.append([step.token for step in islice(runner.stream([1, 2, 3], 30, sample=DRAWS[name]), 7)])
        found.append(tokens)
    assert found[0] == found[1]
    assert len(found[0][1]) == 10 if tokens[0][9] not in tokens[0][:9] else len(found[0][1]) < 10


def test_draws_advance_one_number_a_token() -> None:
    """Numbers that are told ahead are those of choices one by one, and only tokens that were taken use theirs."""
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    ahead, single = (Sampler(rlx.SampleOpts(temperature=1.0, seed=3)) for _ in range(2))
    expected = [single.sample(logits) for _ in range(9)]
    found: list[int] = []
    for taken in (3, 0, 5, 1):
        choice, numbers = ahead.ahead(len(logits), 6)
        some = []
        for number in numbers[:taken]:
            choice.numbers[UNIFORM] = number
            some.append(choose(logits, choice).token)
        ahead.take(some)
        found += some
    assert found == expected and not ahead.looks_back
    for more in (
        {"logit_bias": {3: 1.0}},
        {"mirostat": 2},
        {"presence_penalty": 0.5},
        {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    ):
        assert Sampler(rlx.SampleOpts(temperature=1.0, seed=3, **more), [1], None).looks_back


@pytest.mark.parametrize("level", ["sm_75", "sm_80", "sm_120"])
def test_other_cards(card: paper_card.PaperCard, goldens: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "level", level)
    options = {**OPTIONS, "device": "paper", "cache": CompileCache(policy="off")}
    with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
        runner.predict_logits([1, 2, 3])
    assert card.ptx and all(f".target {level}" in text for text in card.ptx.values())
    waits = [text for text in card.ptx.values() if "griddepcontrol" in text]
    assert bool(waits) == (level == "sm_120"), "older cards do not overlap kernels"


@pytest.mark.parametrize("level", ["sm_80", "sm_90a"])
def test_the_code_of_several_cards(card: paper_card.PaperCard, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to all of them, and they meet before and after."""
    monkeypatch.setattr(card, "level", level)
    monkeypatch.setattr(card, "cards", 4)
    graph = rlx.Graph("product")
    weight = graph.weight("w", [256, 64])
    graph.output("y", ops.softmax(ops.linear(graph.input("x", [rlx.SEQ, 64]), weight)))
    with rlx.compile(graph, device="paper", cache=CompileCache(policy="off")) as exe:
        assert exe is not None
    (product,) = (text for text in card.ptx.values() if "mma" in text)
    assert len(re.findall(r"st\.global", product)) >= 4
    assert "st.release.sys.global" in card.ptx["meet.ptx"] and "ld.acquire.sys.global" in card.ptx["meet.ptx"]
    assert [each["meets"] for each in card.manifests] == [[-1, 0]], "not after what each computes for itself"


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_programs_have_no_kernels_for_many_rows(
    card: paper_card.PaperCard, goldens: Path, deterministic: bool
) -> None:
    options = {**OPTIONS, "device": "paper", "cache": CompileCache(policy="off"), "deterministic": deterministic}
    with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
        runner.predict_logits([1 + i % 60 for i in range(70)])
        assert runner.stats()["deterministic"] is deterministic
    loads = [text for text in card.ptx.values() if "ldmatrix" in text]
    products = [text for text in loads if ".trans" not in text]  # attention of few rows turns values, too
    assert loads and bool(products) is not deterministic
    (many,) = (each["launches"] for each in card.manifests if each["bounds"]["SEQ"][1] > 64)
    splits = [kernel for launch in many for kernel in launch["kernels"] if kernel["blocks"][3]]
    layers = 4 if deterministic else 1  # the last one computes one row
    assert len(splits) == layers, "positions are cut as in calls of few rows"


@pytest.mark.parametrize(
    ("more", "buckets"),
    [
        ({"max_seq": 600}, (1, 16, 64, 512, 2048)),
        ({"max_seq": 512}, (1, 16, 64, 512)),
        ({"profile": {"buckets": {"seq": [1, 16, 512]}}}, (1, 16, 512)),
    ],
)
def test_short_and_long_prompts_have_programs(
    card: paper_card.PaperCard, goldens: Path, more: dict[str, Any], buckets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones if contexts are long enough; none if somebody chose programs."""
    monkeypatch.setattr(card, "call_rows", Cuda.call_rows)
    options = {"device": "paper", "compile_ahead": False, "cache": CompileCache(policy="off"), "max_seq": 600} | more
    with closing(Engine.open(goldens / "llama" / "hf", **options)) as engine:
        assert engine.profile.buckets == buckets


def test_the_code_can_be_read(card: paper_card.PaperCard) -> None:
    graph = rlx.Graph("product")
    weight = graph.weight("w", [32, 64])
    graph.output("y", rlx.ops.linear(graph.input("x", [rlx.SEQ, 64]), weight))
    values = np.ones((32, 64), np.float32)
    with rlx.compile(graph, {"w": values}, device="paper", cache=CompileCache(policy="off")) as exe:
        assert "define ptx_kernel void @region_" in exe.llvm()
        assert "mma.sync.aligned.m16n8k16" in exe.asm() == exe.asm(form="ptx")
        np.testing.assert_allclose(exe(np.ones((3, 64), np.float32))["y"], 64)


def test_forms_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli, ["compile", "--emit", "sass"])
    assert result.exit_code and "device 'cpu': no code has the form sass" in result.stderr
    result = CliRunner().invoke(cli, ["tune", "--device", "reference", "--dry-run"])
    assert result.exit_code and "there is nothing to tune" in result.stderr


def shown(form: str, *options: str) -> str:
    """What `rlx compile` prints of a decode program of the demo model."""
    result = CliRunner().invoke(cli, ["compile", "--device", "cuda", "--emit", form, *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_code_for_a_card_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLX_TARGET names it; every form can be read, and nothing of it runs."""
    monkeypatch.setenv("RLX_TARGET", "sm_120")
    assert re.findall(r"\.target (\w+)", found := shown("ptx")) == ["sm_120"] * found.count(".target") != []
    assert "define ptx_kernel void @region_" in shown("llvm") and "%logits = linear(" in shown("schedule")
    assert "st.release.sys.global" in shown("ptx", "--device", "cuda:0,1") and "st.release.sys" not in found
    assert rlx.backends.backend("cuda").target().capabilities.layouts == layouts.LAYOUTS
    if "cuda" not in rlx.devices():
        with pytest.raises(TargetError, match=r"code for sm_120 is there to look at.*Leave RLX_TARGET"):
            rlx.auto_runner(device="cuda")
    monkeypatch.setenv("RLX_TARGET", "sm_20")
    result = CliRunner().invoke(cli, ["compile", "--device", "cuda", "--emit", "ptx"])
    assert result.exit_code and "level 'sm_20' is unknown. Known: sm_75, sm_80" in result.stderr


def test_experts_on_the_cpu_beside_a_card_that_is_not_there(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLX_TARGET is then that of the card alone."""
    monkeypatch.setenv("RLX_TARGET", "sm_90a")
    code = shown("ptx", str(goldens / "qwen3moe" / "hf"), "--n-cpu-moe", "1")
    assert ".target sm_90a" in code


def test_machine_code_without_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVIDIA's tools make it and print it, where they are installed; what they refuse is told."""
    monkeypatch.setenv("RLX_TARGET", "sm_90a")
    tools = {name: tmp_path / name for name in ("ptxas", "nvdisasm")}
    monkeypatch.setattr(sass, "tool", lambda name: str(tools[name]) if tools[name].exists() else None)
    for name in tools:
        result = CliRunner().invoke(cli, ["compile", "--device", "cuda", "--emit", "sass"])
        assert result.exit_code and re.search(rf"NVIDIA's {name} is not there.*pip install nvidia", result.stderr)
        write = "cp code made; test $2 = -arch=sm_90a" if name == "ptxas" else "echo SASS; grep -c -m1 target $1"
        tools[name].write_text(f"#!/bin/sh\n{write}\n")
        tools[name].chmod(0o755)
    assert "# advance\nSASS\n1\n" in shown("sass", "--kernel", "advance")
    tools["ptxas"].write_text("#!/bin/sh\necho no such instruction >&2; exit 1\n")
    result = CliRunner().invoke(cli, ["compile", "--device", "cuda", "--emit", "sass"])
    assert result.exit_code and "ptxas refuses the code: no such instruction" in result.stderr


@pytest.mark.parametrize("dtype", [Q4_K, Q6_K, Q8_0, F8_E4M3, F32, F16, BF16], ids=str)
def test_rows_of_each_kind_are_looked_up(card: paper_card.PaperCard, dtype: DType) -> None:
    graph = rlx.Graph("lookup")
    table = graph.weight("table", [40, 256], dtype)
    graph.output("y", rlx.ops.embedding(table, graph.input("ids", [rlx.SEQ], "i32"), scale=1.0))
    with rlx.compile(graph, device="paper", cache=CompileCache(policy="off")) as exe:
        assert "@embedding_" in exe.llvm()
    assert card.ptx


@pytest.mark.parametrize(
    ("text", "message"),
    [("call float @llvm.sin.f32(float %x)", "kernels call llvm.sin.f32"), ("declare void @llvm.trap()", "llvm.trap")],
)
def test_calls_that_end_llvm_are_refused_before(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        ptx.compiled([text], "sm_80", 70)


def test_what_llvm_refuses_names_the_kernel() -> None:
    text = "define ptx_kernel void @broken() {\n  ret i32 %nothing\n}\n"
    with pytest.raises(CompileError, match="LLVM refuses the kernel broken"):
        ptx.compiled([text], "sm_80", 70)


@pytest.mark.parametrize("line", ["atom.global.add.u32 %r1, [%rd1], 1;", "red.global.add.u32 [%rd1], 1;"])
def test_atomic_operations_need_an_order(line: str) -> None:
    with pytest.raises(CompileError, match="an atomic operation without an order"):
        ptx.check_order(f"{{\n\t{line}\n}}")
    ptx.check_order(f"{{\n\t{line.replace('.global', '.release.gpu.global')}\n}}")


def test_a_block_with_too_much_shared_memory_is_refused() -> None:
    def body(k: Code) -> None:
        k.share(70 << 10)

    context = Context((), {}, named("sm_75").features)
    with pytest.raises(CompileError, match="a block of op takes 71680 bytes of shared memory, of 65536 of this card"):
        context.kernel("op", {}, body)
    replace(context, features=named("sm_80").features).kernel("op", {}, body)


def test_levels() -> None:
    assert named("sm_90").features.overlaps and not named("sm_89").features.overlaps
    assert all(named(level).ptx == version for level, (version, _) in LEVELS.items())
    with pytest.raises(TargetError, match="level 'sm_20' is unknown"):
        named("sm_20")


def test_without_a_card() -> None:
    """The reason is told, and no other device is taken."""
    if "cuda" in rlx.devices():
        pytest.skip("this machine has a card")
    with pytest.raises(TargetError, match=r"NVIDIA's driver .*(?:is not there|finds no card)"):
        rlx.auto_runner(device="cuda")
    graph = rlx.Graph("double")
    x = graph.input("x", [rlx.SEQ, 4])
    graph.output("y", x + x)
    with pytest.raises(TargetError, match="Choose device="):
        rlx.compile(graph, device="cuda")


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (2, rlx.errors.ResourceError, "not enough memory for 12 MiB"),
        (700, rlx.errors.DeviceError, "a step.*kernel read or wrote memory"),
        (1, rlx.errors.DeviceError, "the card refuses"),
    ],
)
def test_errors_of_the_driver(code: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """A driver whose functions fail."""

        def cuGetErrorName(self, code: int, text: object) -> int:
            return 0

        def cuMemAlloc_v2(self) -> int:
            return code

    monkeypatch.setattr(driver, "_library", Library)
    with pytest.raises(error, match=f"(?i){message}"):
        driver.call("cuMemAlloc_v2", what="12 MiB" if code == 2 else "a step")


@pytest.mark.parametrize("level", [*LEVELS, "sm_90a", "sm_120a"])
def test_every_card_has_a_peak(level: str) -> None:
    card: Any = SimpleNamespace(attribute=lambda number: {16: 10, 13: 1_000_000}[number])
    found = clocks.peaks(card, level)
    assert found["bf16"] == 2 * found["f32"] >= 1280


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ({"seq": (2, 128)}, {"q8_0", "bf16"}),
        ({"seq": (1, 1), "deterministic": True}, {"q8_0", "bf16"}),
        ({"seq": (2, 128), "precision": "exact"}, set()),
    ],
)
def test_which_activations_are_rounded(options: dict[str, Any], rounded: set[str]) -> None:
    """With precision "auto", where the model allows it; over weights in f32 never."""
    graph = rlx.Graph("linears")
    x = graph.input("x", [rlx.SEQ, 64])
    for name, dtype, bf16 in (("q8_0", Q8_0, False), ("bf16", BF16, True), ("kept", BF16, False), ("f32", F32, True)):
        graph.output(name, ops.linear(x, graph.weight(f"w.{name}", [32, 64], dtype), bf16=bf16))
    found = round_activations(graph, Options(**options))
    assert {name for name, node in found.outputs.items() if node.inputs[0].dtype is BF16} == rounded


def test_rounded_activations_compile(card: paper_card.PaperCard, goldens: Path) -> None:
    """Logits of a call of many rows are those of the reference device, but for the rounding."""
    options: dict[str, Any] = {**OPTIONS, "precision": "auto"}
    ids, found = [3 + i * i % 29 for i in range(70)], []
    for device in ("paper", "reference"):
        model = goldens / "llama-k256" / "model-Q4_K_M.gguf"
        with rlx.auto_runner(model, **options, device=device, cache=CompileCache(policy="off")) as runner:
            found.append(runner.predict_logits(ids).astype(np.float64))
    assert found[0] @ found[1] / np.sqrt((found[0] @ found[0]) * (found[1] @ found[1])) > 0.998
    (many,) = (each for each in card.manifests if each["bounds"]["SEQ"][1] > 64)
    names = [name for region in many["regions"] for _, name in region]
    assert sum(name.startswith("quantize") for name in names) == 1, "of the last layer, whose norm has two readers"
