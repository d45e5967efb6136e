"""Builders and devices: every choice reaches the engine or the runner, and a wrong one is named."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Opened, install

import rlx
from rlx.compiler.limits import ContextWarning
from rlx.engine.opening.options import RunnerOptions
from rlx.errors import ArgumentError, ConfigError, TargetError
from rlx.runners.auto import RUNNERS
from rlx.runners.builder import RunnerBuilder
from rlx.sampling import SampleOpts

pytestmark = pytest.mark.any_machine


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return install(monkeypatch, lambda path: FakeEngine(family="qwen3"))


def test_every_family_has_one() -> None:
    for runner in RUNNERS.values():
        assert repr(runner.builder().max_seq(7)) == f"{runner.__name__}.builder().max_seq(7)"


def test_choices_reach_the_engine(opened: Opened) -> None:
    cache = rlx.CompileCache()
    builder = rlx.Qwen3Runner.builder().weights("m.gguf").max_seq(64).threads(1).kv_dtype("q8_0").cache(cache)
    builder.profile({"buckets": {"seq": [1, 8]}}).packed(False).device("cpu").build()
    profile = {"buckets": {"seq": [1, 8]}}
    expected = {"max_seq": 64, "threads": 1, "kv_dtype": "q8_0", "cache": cache, "profile": profile}
    expected |= {"precision": "exact", "device": "cpu", "compile_ahead": False}  # the last as RLX_COMPILE_AHEAD says
    assert opened.calls == [(Path("m.gguf"), expected)]


def test_every_option_has_a_method_and_every_method_an_option() -> None:
    methods = vars(RunnerBuilder).keys() - {"weights", "build"}
    options = {field.name for field in fields(RunnerOptions)}
    assert options <= methods
    builder = rlx.Qwen3Runner.builder()
    for name in methods:
        if not name.startswith("_"):
            getattr(builder, name)(None)
    assert builder._options.keys() == options
    assert str(inspect.signature(RunnerBuilder.threads)) == "(self, value: 'int | None') -> 'Self'"
    assert rlx.Qwen3Runner.builder().keep_packed()._options == {"keep_packed": True}


def test_choices_that_are_the_runner_s(opened: Opened) -> None:
    seen: list[int] = []
    runner = rlx.Qwen3Runner.builder().weights("m.gguf").stream(seen.append).sample(SampleOpts(seed=3)).build()
    assert runner.device is rlx.Device.CPU
    tokens = runner.generate([1, 2], 5)
    assert seen == tokens
    assert runner.generate([1, 2], 5) == tokens, "the seed"
    assert runner.generate([1, 2], 5, sample=SampleOpts.greedy()) != tokens


REPEATING = [1, 2, 3] * 6


def test_a_runner_may_guess_by_habit(opened: Opened) -> None:
    plain = rlx.Qwen3Runner.from_path("m.gguf")
    runner = rlx.Qwen3Runner.from_path("m.gguf", speculative="prompt-lookup")
    assert runner.generate(REPEATING, 5) == plain.generate(REPEATING, 5)
    assert [step.token for step in runner.stream(REPEATING, 5)] == plain.generate(REPEATING, 5)
    assert runner.stats()["speculation"]["steps"] > 0 == plain.stats()["speculation"]["steps"]
    runner.disable_decode_compile_cache()  # the reference does not guess
    assert runner.generate(REPEATING, 5) == plain.generate(REPEATING, 5)
    with pytest.raises(ArgumentError, match="speculative is 'guess'"):
        rlx.Qwen3Runner.from_path("m.gguf", speculative="guess")


def test_the_builder_s_mtp_asks_for_the_model_s_head(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FakeEngine] = []

    def head_drafts(engine: FakeEngine, sequence: object, counters: object) -> None:
        asked.append(engine)

    monkeypatch.setattr(FakeEngine, "head_drafts", head_drafts, raising=False)
    for enabled in (True, False):
        runner = rlx.Qwen3Runner.builder().weights("m.gguf").mtp(enabled).build()
        assert len(list(runner.stream(REPEATING, 3))) == 3
        assert asked == opened.engines[:1]


def test_without_weights() -> None:
    with pytest.raises(ArgumentError, match=r"Qwen35Runner.builder\(\).weights\(path\) first"):
        rlx.Qwen35Runner.builder().max_seq(8).build()


def test_devices() -> None:
    assert rlx.devices()[:2] == [rlx.Device.CPU, rlx.Device.REFERENCE] == ["cpu", "reference"]
    assert rlx.devices()[2:] in ([], [rlx.Device.CUDA])


@pytest.mark.parametrize(("name", "hint"), [("rocm", "There is cpu"), ("cpus", "Did you mean 'cpu'")])
def test_a_device_that_is_not_there(name: str, hint: str, opened: Opened) -> None:
    with pytest.raises(TargetError, match=hint):
        rlx.Qwen3Runner.from_path("m.gguf", device=name)
    assert not opened.calls


def test_weights_without_their_config(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "qwen3" / "hf"
    (weights,) = folder.glob("*.safetensors")
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    with pytest.raises(ConfigError, match="missing"):
        rlx.Qwen3Runner.from_path(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for given in (folder / "config.json", config):
        with rlx.Qwen3Runner.builder().weights(tmp_path).config(given).packed(False).build() as runner:
            assert runner.vocab_size == config["vocab_size"]


def test_a_model_s_own_recommendation_is_asked_for(opened: Opened) -> None:
    greedy = rlx.Qwen3Runner.from_path("m.gguf").generate([1, 2], 5)
    opened.engines[0].recommended = SampleOpts(seed=3)
    for options, drawn in (({}, False), ({"sample": "recommended"}, True)):
        runner = rlx.Qwen3Runner(opened.engines[0], **options)  # type: ignore[arg-type]
        assert (runner.generate([1, 2], 5) != greedy) == drawn
        assert runner.generate([1, 2], 5, sample=SampleOpts.greedy()) == greedy


def test_a_context_longer_than_the_model_s_is_warned_of(goldens: Path) -> None:
    with pytest.warns(ContextWarning, match=r"a context of 100000 tokens is longer than the model's \d+"):
        rlx.auto_runner(goldens / "qwen3" / "model-f16.gguf", max_seq=100_000, load=False).close()


def test_a_gguf_file_has_its_config(goldens: Path) -> None:
    path = goldens / "qwen3" / "model-f16.gguf"
    with pytest.raises(ConfigError, match="model_type"):
        rlx.Qwen3Runner.from_path(path, config={})
