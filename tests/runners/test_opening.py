"""What opening a model needs: how its weights lie is known without a program, so none is made that does not run; what
tells models apart; and `runner.programs`, what is ready.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx
from rlx import auto_runner, demo
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.compiler.tensors import Tensors
from rlx.engine import engine as engine_module
from rlx.engine.engine import Engine
from rlx.engine.kv.pool import CachePool
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import SAMPLES, Plan, identity, open_model
from rlx.engine.programs.background import BackgroundCompiler
from rlx.engine.programs.programs import DECODE, GREEDY, ProgramSpec
from rlx.errors import ArgumentError, UnsupportedModelError
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.text import loads
from rlx.models.variants import EmbeddedRows
from rlx.passes import pipeline
from rlx.passes.capabilities import Layouts
from rlx.passes.layout import weight_table
from rlx.profile import CompileProfile, PhaseProfile
from rlx.runners import Model
from rlx.store.cache import CompileCache
from rlx.store.store import Store
from rlx.weights import open_weights

WANTED = (
    DECODE,
    GREEDY,
    ProgramSpec((2, 16)),
    ProgramSpec((2, 16), hidden=True),
    ProgramSpec((2, 16), embeds=EmbeddedRows()),
    ProgramSpec((1, 4), "chosen"),
)
_NOTHING = PhaseProfile(fusions=(), passes=())
PLAIN = CompileProfile(prefill=_NOTHING, decode=_NOTHING)
FILES = ("llama/hf", "qwen3moe/hf", "qwen35/model-f16.gguf", "gemma3n/hf", "gemma4-e2b/model-f16.gguf")
PROMPT = list(range(1, 33))


def said_by(program: Any) -> dict[str, dict[str, Any]]:
    """Each weight that a program reads, as its graph after all passes has it."""
    packed = {n.inputs[0].name: n["layout"] for n in program.load}
    leaves = program.graph.leaves("weight").values()
    return {
        n.name: {"dtype": n.dtype.name, "shape": [str(d) for d in n.shape], "layout": packed.get(n.name, "rows")}
        for n in leaves
    }


@pytest.mark.parametrize("profile", [CompileProfile(), PLAIN], ids=["all passes", "no passes"])
@pytest.mark.parametrize("file", FILES)
def test_the_table_of_weights_is_that_of_every_program(goldens: Path, file: str, profile: CompileProfile) -> None:
    with open_weights(goldens / file) as loader:
        graph = Plan.of(loader, EngineOptions(precision="auto", profile=profile)).graph
        table = weight_table(graph, Layouts())
        for wanted in WANTED:
            options = wanted.options(profile)
            said = said_by(pipeline.lower(wanted.variant(graph), options))
            assert said.items() <= table.items(), wanted
            missing = {name for name in table.keys() - said.keys() if name not in graph.constants}
            assert not missing or wanted.embeds, "only a table of embeddings may go unread, where those are given"


@pytest.mark.parametrize(("watched", "output"), [(False, "token"), (True, "logits")])
def test_a_cold_run_makes_the_programs_that_it_runs(
    demo_model: Path, tmp_path: Path, watched: bool, output: str
) -> None:
    """Nobody watches: the program that chooses by itself decodes. Somebody does: the one that gives logits."""
    store = Store(tmp_path / "cache")
    with rlx.auto_runner(demo_model, max_seq=64, cache=CompileCache(store=store)) as runner:
        assert {row.key.kind for row in store.entries() if row.key} == {"runtime", "pack"}
        runner.generate(PROMPT, 3, (lambda token: None) if watched else None, stop_at_eog=False)
    entries = [store.open(row.digest) for row in store.entries() if row.key and row.key.kind == "program"]
    found = [(e.key.phase, *json.loads(e.read("manifest.json"))["outputs"]) for e in entries]
    assert sorted(found) == [("decode" if watched else "greedy", output), ("prefill", "logits")]


@pytest.mark.parametrize("part", ["Tensors", "CachePool", "ModelRunner"])
def test_an_engine_that_cannot_be_made_closes_its_parts(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Not the collector, whenever it comes: workers, tensors, the pool, and the thread that compiles ahead."""
    made, closed = list[str](), list[str]()

    def watch(owner: Any, name: str) -> None:
        start, close = owner.__init__, owner.close
        monkeypatch.setattr(owner, "__init__", lambda self, *a, **k: (made.append(name), start(self, *a, **k))[1])
        monkeypatch.setattr(owner, "close", lambda self: (closed.append(name), close(self))[1])

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("refused")

    for owner in (WorkerPool, Tensors, CachePool, BackgroundCompiler):
        watch(owner, owner.__name__)
    with open_weights(demo_model) as loader:
        before = set(loader.tensors)
        monkeypatch.setattr(engine_module, part, refuse)
        with pytest.raises(OSError, match="refused"):
            Engine.of(loader, EngineOptions(load=False))
        assert sorted(closed) == sorted(made) and "WorkerPool" in made
        assert before == set(loader.tensors) and loader.raw(next(iter(before))).size, "the file stays open"


# --------------------------------------------------------------------------------------------------------- identity


class Loader:
    """As much of an open file as is looked at."""

    def __init__(self, tensors: int = 600, **changes: np.ndarray[Any, Any]) -> None:
        self.tensors = {f"blk.{i}.weight": None for i in range(tensors)} | dict.fromkeys(changes)
        self._changes, self.read = changes, 0

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        self.read += 1
        return self._changes.get(name, np.arange(1000, dtype=np.uint8))


def model(eps: float = 1e-6, constant: float = 1.0) -> Graph:
    graph = Graph("model")
    x = graph.input("x", [SEQ, 4])
    graph.output("y", ops.rms_norm(x, graph.constant("scale", np.full(4, constant)), eps=eps))
    return graph


def of(graph: Graph, loader: Any) -> str:
    return identity(graph, loader)


def test_one_model_has_one_identity() -> None:
    assert of(model(), Loader()) == of(model(), Loader())
    assert len(of(model(), Loader())) == 64


def test_other_models_have_others() -> None:
    other = np.full(1000, 7, np.uint8)
    found = {
        of(model(), Loader()),
        of(model(eps=1e-5), Loader()),
        of(model(constant=2.0), Loader()),
        of(model(), Loader(599)),
        of(model(), Loader(1, **{"blk.0.weight": other})),
        of(model(), Loader(1)),
        of(model(), Loader(0)),
    }
    assert len(found) == 7


def test_files_of_many_tensors_are_sampled() -> None:
    loader = Loader(5000)
    of(model(), loader)
    assert 200 < loader.read <= SAMPLES


# -------------------------------------------------------------------------------------------------- runner.programs


@pytest.fixture(scope="module")
def runner() -> Iterator[Model]:
    with auto_runner(demo.path(), load=False) as found:
        assert not found.programs
        found.compile(phase="decode")
        yield found


def test_a_program_shows_its_stages(runner: Model) -> None:
    program = runner.programs["decode"]
    assert program.record == runner.programs[0].record == runner.programs["decode-1-1"].record
    assert "linear-pick" not in str(program.explain()) and "gated-silu" in str(program.explain())
    assert {report.name for report in program.explain().passes} == {*program.stages} - {"graph"}
    assert loads(program.ir("fuse")).outputs.keys() == {"logits"}
    symbol = next(name for name in program.kernels if name.startswith("attention"))
    assert symbol in program.source(symbol) and f"@{symbol}(" in program.llvm(symbol)
    assert f"{symbol}:" in program.asm(symbol)
    assert repr(program) == f"<Program decode-1-1: {program.record.kernels} kernels, {program.record.digest[:12]}>"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"phase": "decoding"}, r"no program is of phase 'decoding'\. The programs are: decode 1-1, prefill 2-16"),
        (
            {"phase": "prefill", "rows": 9999},
            r"no program takes 9999 rows\. The programs are: prefill 2-16",
        ),
    ],
)
def test_a_program_that_there_is_not(runner: Model, chosen: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        runner.compile(**chosen)


def test_a_head_in_the_file_counts_whatever_the_configuration_says(goldens: Path, tmp_path: Path) -> None:
    """Parts of a model may disagree about `tie_word_embeddings`, as in checkpoints that transformers 5 writes."""
    source = goldens / "qwen2" / "hf"
    config = {**json.loads((source / "config.json").read_text()), "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with open_weights(tmp_path) as loader:
        assert not open_model(loader)[0].tied


@pytest.mark.parametrize(
    ("name", "harmless"),
    [
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.1.mlp.adapter.weight", False),
        ("model.layers.0.mlp.experts.0.w1.bias", False),
        ("model.layers.0.mlp.experts.1.w1.bias", True),  # zeros
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.layers.0.self_attn.k_proj.k_scale", True),
        ("model.layers.77.self_attn.q_norm.weight", True),  # behind the last layer
        ("vision_tower.encoder.layers.0.self_attn.q_norm.weight", True),
    ],
)
def test_a_tensor_of_a_layer_that_would_be_left_out(goldens: Path, tmp_path: Path, name: str, harmless: bool) -> None:
    """Without it rlx would compute another model, and nobody would see it."""
    source = goldens / "llama" / "hf"
    values = np.zeros(4, np.float32) if ".1.w1" in name else np.ones(4, np.float32)
    tensors = {**load_file(source / "model.safetensors"), name: values}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with open_weights(tmp_path) as loader, nullcontext() if harmless else pytest.raises(UnsupportedModelError) as error:
        Plan.of(loader, EngineOptions())
    assert harmless or (name in str(error.value) and "has no place in the model" in str(error.value))


def test_experts_that_the_configuration_does_not_have(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "granitemoe-shared" / "hf"
    config = {**json.loads((source / "config.json").read_text()), "shared_intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with open_weights(tmp_path) as loader, pytest.raises(UnsupportedModelError, match=r"shared_mlp.* has no place"):
        Plan.of(loader, EngineOptions())
