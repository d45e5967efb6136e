"""Models without weights: their programs have the keys of the file that comes later, whatever writes it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rlx
from rlx.compiler.compile import Compiler
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.errors import ArgumentError, ConfigError, UnsupportedModelError, WeightError
from rlx.export.convert import header_of_config, header_of_shape
from rlx.models.shapes import SHAPES
from rlx.store.store import Store
from rlx.weights import WeightLoader, open_weights

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = [name for name in SHAPES if name.startswith("tiny-")]
CHECKPOINTS = ["gemma", "gemma2", "gemma3", "gemma3n", "gemma4-moe", "llama", "qwen2", "qwen3", "qwen35", "qwen3moe"]
GGUFS = ["gemma", "gemma2", "gemma3", "gemma4-e2b", "llama", "qwen2", "qwen3", "qwen35", "qwen35moe"]


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))  # as for a script that lies there
    yield importlib.import_module("make_model")
    sys.path.remove(str(BENCHMARKS))


def keys(loader: WeightLoader) -> list[str]:
    """Of the programs that are compiled for an open model."""
    with loader:
        plan = Plan.of(loader, EngineOptions(profile={}))
        compiler, profile = Compiler(plan.setup.target, plan.setup.cache), plan.setup.profile
        return [compiler.program_key(plan.graph, profile.options(bucket)).digest for bucket in profile.ranges]


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_config_has_the_keys_of_its_checkpoint(goldens: Path, family: str) -> None:
    folder = goldens / family / "hf"
    assert keys(header_of_config(folder / "config.json")) == keys(open_weights(folder))


@pytest.mark.parametrize("family", GGUFS)
def test_a_config_has_the_keys_of_the_converted_file(goldens: Path, family: str) -> None:
    """The files are those of the reference converter."""
    path = goldens / family / "model-f16.gguf"
    assert keys(header_of_config(goldens / family / "hf" / "config.json", "f16")) == keys(open_weights(path))


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0"])
def test_a_config_has_the_keys_of_the_quantized_file(goldens: Path, tmp_path: Path, kind: str) -> None:
    from rlx.export.convert import convert
    from rlx.export.quantize import quantize

    folder = goldens / "qwen3" / "hf"
    convert(folder, tmp_path / "m-bf16.gguf", "BF16")
    quantize(tmp_path / "m-bf16.gguf", tmp_path / "m.gguf", kind)
    assert keys(header_of_config(folder / "config.json", kind)) == keys(open_weights(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", TINY)
def test_a_shape_has_the_keys_of_its_file(maker: ModuleType, tmp_path: Path, name: str) -> None:
    for kind in ("Q4_K_M", "BF16"):
        maker.write_model(tmp_path / f"{kind}.gguf", name, SHAPES[name], kind)
        assert keys(header_of_shape(name, kind)) == keys(open_weights(tmp_path / f"{kind}.gguf"))
    assert keys(header_of_shape(name)) == keys(header_of_shape(name, "q4_k_m"))


def test_the_programs_of_a_header_serve_the_model_that_comes(maker: ModuleType, tmp_path: Path) -> None:
    profile = {"buckets": {"seq": [1, 32]}}
    cache = rlx.CompileCache(store=Store(tmp_path / "cache"))
    with rlx.auto_runner(header_of_shape("tiny-qwen3", "Q8_0"), profile=profile, cache=cache, load=False) as runner:
        records = runner.compile()
        assert not any(record.cached for record in records)
        with pytest.raises(WeightError, match=r"there are no weights.*name a model file"):
            runner.predict_logits([1, 2])
    maker.write_model(tmp_path / "m.gguf", "tiny-qwen3", SHAPES["tiny-qwen3"], "Q8_0")
    cache = rlx.CompileCache(store=Store(tmp_path / "cache"), policy="readonly")
    with rlx.auto_runner(tmp_path / "m.gguf", profile=profile, cache=cache) as runner:
        runner.generate([1, 2, 3], 4)
        assert runner.stats()["cache"].compiles == 0


def test_what_a_configuration_cannot_say(goldens: Path, tmp_path: Path) -> None:
    config = json.loads((goldens / "qwen3" / "hf" / "config.json").read_text())
    path = tmp_path / "config.json"

    def written(**changes: object) -> Path:
        path.write_text(json.dumps({**config, **changes}))
        return path

    with pytest.raises(ArgumentError, match=r"'Q9' is not a file type.*Choose one of F32"):
        header_of_config(written(), "Q9")
    with pytest.raises(ConfigError, match="the type of the checkpoint is 'int7'"):
        header_of_config(written(dtype="int7"))
    with pytest.raises(UnsupportedModelError, match="quantized, and the configuration does not say which"):
        header_of_config(written(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}))
    with pytest.raises(UnsupportedModelError, match="model_type"):
        header_of_config(written(model_type="nobody"))
    with pytest.raises(ArgumentError, match=r"'qwen3-0.6' is not a known shape\. Did you mean qwen3-0.6b"):
        header_of_shape("qwen3-0.6")
    with pytest.raises(ArgumentError, match=r"There is qwen3-0\.6b, qwen3-1\.7b"):
        header_of_shape("zzz")
