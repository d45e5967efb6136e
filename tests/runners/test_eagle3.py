"""EAGLE-3 heads: drafts are those of the equations in float64; whatever they are, the tokens are those without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import eagle3
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.backends import backend
from rlx.engine.request import Request
from rlx.engine.speculation.drafts import Counters
from rlx.engine.speculation.heads import HeadDrafter
from rlx.errors import ArgumentError, RlxError, UnsupportedModelError, WeightError
from rlx.runners import Model, auto_runner
from rlx.sampling import SampleOpts
from tests.single_sequence import SingleEngine

CEILING = 1e-4  # of the largest element: float32 through the model's layers and the head's
PAIR = {"buckets": {"seq": [1, 32]}}
IDS = np.random.default_rng(7).integers(0, 500, 40).tolist()
SWITCHES: list[dict[str, bool]] = [{}, {"norm_before_fc": True, "norm_output": True}]
SWITCHES += [{"fc_norm": True, "norm_before_residual": True}]


@pytest.fixture(scope="module")
def folder(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle3.model(goldens, tmp_path_factory.mktemp("eagle3") / "model")


@pytest.fixture(scope="module")
def plain_map(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle3.model(goldens, tmp_path_factory.mktemp("eagle3") / "map", layers=False)


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[Model]:
    with auto_runner(model, precision="exact", profile=PAIR, max_seq=128, **options) as runner:
        yield runner


@contextmanager
def following(engine: SingleEngine, head: Path) -> Iterator[HeadDrafter]:
    """A head follows the engine's own sequence."""
    drafts: Any = engine.drafting(f"model:{head}").drafts(engine.current, [], "", Counters())
    yield drafts._drafter
    drafts.close()


def with_norms(head: dict[str, Any], switches: dict[str, bool]) -> dict[str, Any]:
    rng = np.random.default_rng(9)
    wide = {"input_norm": 3 * eagle3.HIDDEN} if switches.get("norm_before_fc") else {}
    each = {f"fc_norm.{i}": eagle3.HIDDEN for i in range(3)} if switches.get("fc_norm") else {}
    return head | {n: rng.standard_normal(size).astype(np.float32) for n, size in (wide | each).items()}


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda each: " ".join(each) or "none")
@pytest.mark.parametrize("speculators", [False, True], ids=["authors", "speculators"])
def test_drafts_are_those_of_the_equations(
    folder: Path, tmp_path: Path, speculators: bool, switches: dict[str, bool]
) -> None:
    head = with_norms(eagle3.random_head(), switches)
    path = eagle3.write(head, tmp_path / "head", speculators=speculators, **switches)
    check_drafts(folder, path, head, switches)


def test_the_embeddings_may_be_the_output_matrix_of_the_model(goldens: Path, tmp_path: Path) -> None:
    """They lie in memory in the form of matrices then."""
    folder, head = eagle3.model(goldens, tmp_path / "model", tied=True), eagle3.random_head()
    check_drafts(folder, eagle3.write(head, tmp_path / "head"), head, {})


def check_drafts(folder: Path, path: Path, head: dict[str, Any], switches: dict[str, bool]) -> None:
    """After a prompt in several calls, and drafts of drafts."""
    engine = SingleEngine.open(folder, precision="exact", max_seq=128, profile=PAIR)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    with following(engine, path) as drafter:
        for part in (IDS[:16], IDS[16:17], IDS[17:29]):
            engine.forward(part)
        drafter.observe(IDS[29])
        found = drafter.propose(3)
        read, tokens, own = eagle3.read_by_head(folder, IDS[:29]), IDS[1:30], list[Any]()
        for token in found:
            states = eagle3.head_states(head, table, tokens, read, own, **switches)
            own.append(states[-1])
            assert token == eagle3.draft(head, states[-1], **switches)
            tokens = [*tokens, token]
        first = read[-1:].astype(np.float64)
        if switches.get("norm_before_fc"):
            first = eagle3.normed(first, head["input_norm"])
        if switches.get("fc_norm"):
            parts = np.split(first, 3, -1)
            first = np.concatenate([eagle3.normed(p, head[f"fc_norm.{i}"]) for i, p in enumerate(parts)], -1)
        given = backend().memory.adopt((first @ head["fc"].T).astype(np.float32).reshape(-1).view(np.uint8))
        program, extents = drafter.predictor.fed(28, [IDS[29]], given)
        program.run(**extents)
        state = program.output("next_hidden")[0]
        assert np.abs(state - own[0]).max() <= CEILING * np.abs(own[0]).max()
    engine.close()


def test_two_heads_of_a_model_have_weights_of_their_own(folder: Path, tmp_path: Path) -> None:
    engine, names = SingleEngine.open(folder, max_seq=128), set[str]()
    for seed in (6, 7):
        head = with_norms(eagle3.random_head(seed=seed), {"fc_norm": True})
        with following(engine, eagle3.write(head, tmp_path / f"{seed}", fc_norm=True)) as drafter:
            names.add(drafter.predictor.head.reads.name)
    assert len(names) == 2
    engine.close()


@pytest.mark.parametrize("sample", [SampleOpts.greedy(), SampleOpts(temperature=1.2, seed=4, repetition_penalty=1.2)])
def test_the_tokens_are_those_without(folder: Path, tmp_path: Path, sample: SampleOpts) -> None:
    path = eagle3.write(eagle3.random_head(), tmp_path / "head")
    with opened(folder) as runner:
        for prompt in (IDS[:9], [*IDS[:7], 1, 2], IDS[:30]):
            plain = runner.generate(prompt, 24, sample=sample, stop_at_eog=False)
            found = runner.generate(prompt, 24, sample=sample, stop_at_eog=False, speculative=f"model:{path}")
            assert found == plain
        assert runner.stats()["speculation"]["drafted"] >= 3
        watched = list[int]()
        runner.generate(IDS[:30], 7, watched.append, sample=sample, stop_at_eog=False, speculative=f"model:{path}")
        assert watched == plain[:7]


@pytest.mark.parametrize("speculators", [False, True], ids=["authors", "speculators"])
def test_a_head_that_is_right_is_always_accepted(plain_map: Path, tmp_path: Path, speculators: bool) -> None:
    """In native rounds and step by step; of several requests at the same time one has the head."""
    head = eagle3.right_head(plain_map)
    path = eagle3.write(head, tmp_path / "head", speculators=speculators, norm_before_residual=True)
    drafted: dict[str, Any] = {"stop_at_eog": False, "speculative": f"model:{path}"}
    with opened(plain_map) as runner:
        plain = runner.generate(IDS[:5], 40, stop_at_eog=False)
        assert len(set(plain)) > 8
        assert runner.generate(IDS[:5], 40, **drafted) == plain
        counters = runner.stats()["speculation"]
        assert counters["accepted"] == counters["drafted"] > 30
        watched = list[int]()
        runner.generate(IDS[:5], 40, watched.append, **drafted)
        assert watched == plain
        counters = runner.stats()["speculation"]
        assert counters["accepted"] == counters["drafted"] > 60
        assert counters["steps"] + counters["accepted"] == 2 * 39
        handles = [runner.submit(Request(IDS[:5], 20, **drafted)) for _ in "ab"]
        assert [[step.token for step in handle] for handle in handles] == [plain[:20]] * 2


def without(name: str) -> Any:
    return lambda tensors, config: tensors.pop(name)


def config_of(**keys: Any) -> Any:
    return lambda tensors, config: config.update(keys)


def wrong_labels(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + 500


def tied(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["lm_head.weight"]
    config["tie_word_embeddings"] = True


def first_eagle(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["midlayer.hidden_norm.weight"]


IDS_KEY = "eagle_aux_hidden_state_layer_ids"
BAD: list[tuple[Any, type[RlxError], str]] = [
    (config_of(target_hidden_size=32), ArgumentError, "of another model: it reads hidden states of 32, and .* have 64"),
    (config_of(vocab_size=600), ArgumentError, "of another model: it knows 600 tokens, and the model 512"),
    (config_of(**{IDS_KEY: [1, 2, 5]}), ArgumentError, "it reads layers 1, 2, 5, and the model has 4.* trained with"),
    (config_of(eagle_config=None), ArgumentError, "it reads layers 2, 2, 1, and the model has 4"),
    (config_of(speculators_model_type="dflash"), UnsupportedModelError, "a draft head of the kind 'dflash'.* EAGLE-3"),
    (first_eagle, UnsupportedModelError, "a draft head of the kind 'eagle'"),
    (tied, UnsupportedModelError, r"no output matrix of its own \(tie_word_embeddings\)"),
    (without("fc.weight"), WeightError, "fc.weight: the tensor is missing"),
    (without("midlayer.self_attn.o_proj.weight"), WeightError, r"the tensor is missing, expected shape \[64, 128\]"),
    (without("lm_head.weight"), WeightError, r"lm_head.weight: the tensor is missing, expected shape \[100, 64\]"),
    (config_of(norm_before_fc=True), WeightError, r"input_norm.weight: the tensor is missing, expected shape \[192\]"),
    (config_of(fc_norm=True), WeightError, r"fc_norm.0.weight: the tensor is missing, expected shape \[64\]"),
    (without("d2t"), WeightError, r"d2t: the tensor is missing, expected shape \[100\]"),
    (wrong_labels, WeightError, "it gives tokens from 5.. to 9.., and there are 512"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_a_folder_that_is_no_head_of_this_model(
    folder: Path, tmp_path: Path, change: Any, kind: type[RlxError], message: str
) -> None:
    path = eagle3.write(eagle3.random_head(), tmp_path / "head")
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=message):
        auto_runner(folder, max_seq=64, profile=PAIR, speculative=f"model:{path}")
