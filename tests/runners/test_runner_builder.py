"""Builders and devices: every choice reaches the engine or the runner, and a wrong one is named."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Opened, install

import rlx
from rlx.engine.opening.options import RunnerOptions
from rlx.errors import ConfigError, TargetError
from rlx.runners.builder import RunnerBuilder

pytestmark = pytest.mark.any_machine


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return install(monkeypatch, lambda path: FakeEngine(family="qwen3"))


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
