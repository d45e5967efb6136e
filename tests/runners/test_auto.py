"""From a path to a runner: which class, with which options, and what is refused by name. No engine is made here."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, Opened, install
from gguf import GGUFWriter
from golden_folder import PACKED
from safetensors.numpy import save_file

import rlx
from rlx.engine.engine import Engine
from rlx.engine.opening.options import RunnerOptions
from rlx.errors import ArgumentError, ConfigError, ModelFileError, UnsupportedModelError
from rlx.runners import (
    GemmaRunner,
    Llama32Runner,
    LmRunner,
    Model,
    Qwen3Runner,
    Qwen35Runner,
    auto_runner,
)

FAMILIES = {
    "llama": Llama32Runner,
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe"), Qwen3Runner),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen35-k256"), Qwen35Runner),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4-e2b", "gemma4-moe"), GemmaRunner),
}
FILES = sorted(path.relative_to(PACKED) for path in PACKED.glob("*/model-*.gguf.xz"))
FILES += sorted(path.parent.relative_to(PACKED) for path in PACKED.glob("*/hf/model.safetensors.xz"))


def gguf(folder: Path, arch: str | None) -> Path:
    """A GGUF file with an architecture and one tensor."""
    path = folder / "model.gguf"
    writer = GGUFWriter(path, arch or "none")
    if arch is None:
        writer.kv_data[0].clear()
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Engines that are not made; each has the family of the golden folder it was opened from."""
    return install(monkeypatch, lambda path: FakeEngine(family=str(FAMILIES[golden_name(path)].FAMILY)))


def golden_name(path: Path) -> str:
    return next(name for name in path.parts[::-1] if name in FAMILIES)


@pytest.mark.parametrize("file", [file for file in FILES if file.parts[0] in FAMILIES], ids=str)
def test_the_architecture_decides(opened: Opened, goldens: Path, file: Path) -> None:
    path = goldens / str(file).removesuffix(".xz")
    runner = auto_runner(str(path))
    assert type(runner) is FAMILIES[file.parts[0]]
    assert isinstance(runner, Model) and isinstance(runner, LmRunner)
    assert opened.calls[0][0] == path


def test_options_reach_the_engine(opened: Opened, goldens: Path) -> None:
    path, progress = goldens / "qwen3" / "hf", [].append
    auto_runner(path)
    assert opened.options == {"compile_ahead": False}, "as the variable says in tests"
    options: dict[str, Any] = {
        "threads": 3, "max_seq": 99, "kv_dtype": "bf16", "precision": "exact", "profile": "p.toml", "cache": "off",
        "progress": lambda *args: progress(args), "dump_ir": "ir", "load": False,
        "keep_packed": True, "compile_ahead": [3],
    }  # fmt: skip
    auto_runner(path, **options)
    assert opened.options == options
    Qwen3Runner.from_path(path, max_seq=7)
    assert opened.options == {"max_seq": 7, "compile_ahead": False}


def test_the_arguments_of_everything_that_opens_a_model_are_the_options() -> None:
    """With their types, for `help` and editors; the documentation of each is part of the docstring."""
    options = [field.name for field in fields(RunnerOptions)]
    for function in (auto_runner, Qwen3Runner.from_path, Engine.open):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["path", *options[: len(parameters) - 1]]
        assert parameters["threads"].annotation == "int | None"
        assert "    threads: worker threads; by default the physical cores" in str(function.__doc__)


def test_the_wrong_family_s_runner_gives_its_engine_back(opened: Opened, goldens: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Llama32Runner runs the family 'llama32'.*rlx\.auto_runner"):
        Llama32Runner.from_path(goldens / "qwen3" / "hf")
    assert opened.engines[0].closed


@pytest.mark.parametrize("runner", [Llama32Runner, rlx.Qwen3Runner, rlx.EncoderRunner])
def test_a_path_in_place_of_an_opened_model_names_from_path(runner: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"Write {runner.__name__}\.from_path\('model\.gguf'\)"):
        runner(Path("model.gguf"))


@pytest.mark.parametrize("arch", ["minimax", "llama4", "chatglm", "phi2"])
def test_a_known_architecture_that_is_not_there_yet(tmp_path: Path, opened: Opened, arch: str) -> None:
    said = rf"model\.gguf: the architecture '{arch}' \(general\.architecture\) is known but not supported yet: .*"
    with pytest.raises(UnsupportedModelError, match=said + "Supported: .*llama.*qwen3"):
        auto_runner(gguf(tmp_path, arch))
    assert not opened.calls


@pytest.mark.parametrize("value", [None, "", 7])
def test_a_model_that_does_not_say_what_it_is(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'model_type' is {value!r}, expected the name of an architecture"):
        auto_runner(hf(tmp_path, {"model_type": value} if value is not None else {}))
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        auto_runner(gguf(tmp_path, None))


@pytest.mark.parametrize(("name", "said"), [("gone.gguf", "no such file"), ("", "holds no model.safetensors")])
def test_no_model_at_the_path(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        auto_runner(tmp_path / name)


# -------------------------------------------------------------------------------------------------- what is no path


@pytest.mark.parametrize("path", [5, True, b"demo", ["demo"], 1.5, object()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"model: expected a path or a name, found .*Give a \.gguf file"):
        rlx.auto_runner(path)
