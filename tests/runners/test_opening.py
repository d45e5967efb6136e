"""What opening a model needs: how its weights lie is known without a program, so none is made that does not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.backends.cpu.launch.threads import WorkerPool
from rlx.compiler.tensors import Tensors
from rlx.engine import engine as engine_module
from rlx.engine.engine import Engine
from rlx.engine.kv.pool import CachePool
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan
from rlx.engine.programs.background import BackgroundCompiler
from rlx.engine.programs.programs import DECODE, GREEDY, ProgramSpec
from rlx.models.variants import EmbeddedRows
from rlx.passes import pipeline
from rlx.passes.capabilities import Layouts
from rlx.passes.layout import weight_table
from rlx.profile import CompileProfile, PhaseProfile
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
