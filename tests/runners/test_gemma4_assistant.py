"""Gemma 4's drafters: drafts are those of the equations in float64; whatever they are, the tokens are those without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gemma4_assistant as drafters
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.engine.speculation.drafts import Counters
from rlx.errors import ArgumentError, ConfigError, RlxError, WeightError
from rlx.runners import auto_runner
from rlx.sampling import SampleOpts
from tests.single_sequence import SingleEngine

PAIR = {"buckets": {"seq": [1, 32]}}
IDS = np.random.default_rng(7).integers(5, 500, 60).tolist()


@pytest.fixture(scope="module")
def model(goldens: Path) -> Path:
    return goldens / "gemma4-moe" / "hf"


@pytest.mark.parametrize(
    ("file", "sources", "ordered"),
    [
        ("gemma4-moe/hf", {"sliding": 2, "full": 3}, False),
        ("gemma4-e2b/model-f16.gguf", {"sliding": 3, "full": 4}, True),  # the last layers share caches
    ],
)
def test_drafts_are_those_of_the_equations(
    goldens: Path, tmp_path: Path, file: str, sources: dict[str, int], ordered: bool
) -> None:
    """Beyond the window, and after rejected drafts, whose keys the caches still hold."""
    w = drafters.random_drafter(ordered=ordered)
    engine = SingleEngine.open(goldens / file, precision="exact", max_seq=128, profile=PAIR)
    table = engine._weights.array("token_embd.weight").astype(np.float64) * drafters.WIDTH**0.5
    heard = list[Any]()
    drafts: Any = engine.drafting(f"model:{drafters.write(w, tmp_path / 'drafter')}")
    drafts = drafts.drafts(engine.current, [], "", Counters())
    hear, head = drafts._head.hear, drafts._drafter
    drafts._head.hear = lambda start, ids, hidden: (
        heard.append(hidden.read(np.float32, (len(ids), -1))),
        hear(start, ids, hidden),
    )
    length = 0
    for part, kept in ((IDS[:9], 9), (IDS[9:41], 32), (IDS[41:46], 2)):
        engine.forward(part)
        length += kept
        if kept < len(part):
            engine.trim(length)
            drafts.forget(length)
        head.observe(IDS[50])
        found = head.propose(3)
        assert len(found) == 3
        snapshot, hidden, token = engine.snapshot(), heard[-1][kept - 1].astype(np.float64), IDS[50]
        caches = {
            kind: tuple(snapshot.arrays[f"{name}.{source}"].astype(np.float64) for name in "kv")
            for kind, source in sources.items()
        }
        for draft in found:
            token, hidden = drafters.step(w, table[token], hidden, caches, length)
            assert draft == token
    drafts.close()
    engine.close()


@pytest.mark.parametrize("sample", [SampleOpts.greedy(), SampleOpts(temperature=1.2, seed=4, repetition_penalty=1.2)])
def test_the_tokens_are_those_without(model: Path, tmp_path: Path, sample: SampleOpts) -> None:
    path = drafters.write(drafters.random_drafter(ordered=True), tmp_path / "drafter")
    with auto_runner(model, precision="exact", profile=PAIR, max_seq=128) as runner:
        for prompt in (IDS[:9], [*IDS[:7], 1, 2], IDS[:30]):
            plain = runner.generate(prompt, 24, sample=sample, stop_at_eog=False)
            found = runner.generate(prompt, 24, sample=sample, stop_at_eog=False, speculative=f"model:{path}")
            assert found == plain
        assert runner.stats()["speculation"]["drafted"] >= 3


def without(name: str) -> Any:
    return lambda tensors, config: tensors.pop(name)


def config_of(**keys: Any) -> Any:
    return lambda tensors, config: config.update(keys)


def heads(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["text_config"]["head_dim"] = 16


def twice(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["masked_embedding.token_ordering"][3] = tensors["masked_embedding.token_ordering"][4]


BAD: list[tuple[Any, type[RlxError], str]] = [
    (
        config_of(backbone_hidden_size=32),
        ArgumentError,
        "of another model: it reads hidden states of 32, and .* have 64",
    ),
    (
        config_of(text_config={**drafters.TEXT, "vocab_size": 640}),
        ArgumentError,
        "it knows 640 tokens, and the model 512",
    ),
    (heads, ArgumentError, "its layer 0 has 4 heads of 16, the cache 2 of 32"),
    (config_of(num_centroids=100), ConfigError, "a divisor of the 512 tokens"),
    (without("pre_projection.weight"), WeightError, r"pre_projection.weight: the tensor is missing, .* \[32, 128\]"),
    (without("masked_embedding.token_ordering"), WeightError, r"token_ordering: the tensor is missing, .* \[512\]"),
    (twice, WeightError, "token_ordering: expected each token once"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_a_folder_that_is_no_drafter_of_this_model(
    model: Path, tmp_path: Path, change: Any, kind: type[RlxError], message: str
) -> None:
    path = drafters.write(drafters.random_drafter(ordered=True), tmp_path / "drafter")
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=message):
        auto_runner(model, max_seq=64, profile=PAIR, speculative=f"model:{path}")


def test_another_model_has_no_caches_for_it(goldens: Path, tmp_path: Path) -> None:
    path = drafters.write(drafters.random_drafter(), tmp_path / "drafter")
    with pytest.raises(ArgumentError, match="it drafts for Gemma 4, and the model is llama"):
        auto_runner(goldens / "llama" / "hf", max_seq=64, profile=PAIR, speculative=f"model:{path}")
