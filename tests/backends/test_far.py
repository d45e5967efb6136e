"""Everything runs on a device whose memory the host does not see: families, sequences, drafts, images, the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import far
import numpy as np
import pytest
from golden_checks import check_golden, golden
from heads import random_head, with_head
from starlette.testclient import TestClient

import rlx
from rlx.backends.memory import DeviceArray
from rlx.engine.kv.disk_kv_cache import DiskKVCache
from rlx.engine.model_runner import Segment
from rlx.runners import Model
from rlx.serve import ServedModel, create_app
from rlx.store.cache import CompileCache
from rlx.store.store import Store

FAMILIES = {  # and the file of each
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4-moe", "llama", "qwen2", "qwen3"), "hf"),
    **dict.fromkeys(("qwen3moe", "qwen35"), "hf"),
    **dict.fromkeys(("qwen35moe", "gemma4-e2b"), "model-f16.gguf"),
}
QUANTIZED = dict.fromkeys(("llama-k256", "gemma4-k256", "qwen35-k256"), "model-Q4_K_M.gguf")
#: One of each kind of state: full caches, windows, recurrent states.
KINDS = ("llama", "gemma3", "qwen35")
OPTIONS: dict[str, Any] = {
    "precision": "exact", "max_seq": 96, "profile": {"buckets": {"seq": [1, 32]}}, "compile_ahead": False,
}  # fmt: skip
TOLERANCE = 3e-5


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[far.Far]:
    with far.registered() as found:
        yield found


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(policy="off")


@pytest.fixture
def opened(goldens: Path, cache: CompileCache, device: far.Far) -> Iterator[Any]:
    """family -> its runner; nothing of its memory is left at the end."""
    runners: list[Model] = []
    before = device.memory.blocks

    def open_one(family: str, **more: Any) -> Model:
        path = goldens / family / {**FAMILIES, **QUANTIZED}[family]
        runners.append(rlx.auto_runner(path, **{**OPTIONS, "device": "far", "cache": cache, **more}))
        return runners[-1]

    yield open_one
    for runner in runners:
        runner.close()
    assert device.memory.blocks == before, "all memory was released"


def prompt(goldens: Path, family: str) -> list[int]:
    return golden(goldens, family)["tokens"].tolist()


def test_the_host_does_not_see_its_memory(device: far.Far) -> None:
    buffer = device.memory.allocate(8)
    assert buffer.view() is None
    buffer.part(2, 4).write(np.arange(4, dtype=np.uint8))
    assert buffer.read().tolist() == [0, 0, 0, 1, 2, 3, 0, 0]
    buffer.close()


def test_rows_of_an_array_on_the_device(device: far.Far) -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = device.memory.adopt(numbers.reshape(-1).view(np.uint8))
    array = DeviceArray(buffer, "f4", (3, 4))
    np.testing.assert_array_equal(np.asarray(array), numbers)
    for index in (0, 2, -1, slice(1, 3), slice(2, None), slice(1, 1)):
        np.testing.assert_array_equal(np.array(array[index]), numbers[index])
    assert len(array) == 3 and array[1:][0].shape == (4,) and np.asarray(array[1], np.float64).dtype == np.float64
    with pytest.raises(IndexError):
        array[3]
    buffer.close()


def test_logits_stay_on_the_device(opened: Any, goldens: Path, device: far.Far) -> None:
    """What is computed to choose tokens is copied by whoever needs the numbers."""
    engine, ids = opened("llama")._engine, prompt(goldens, "llama")[:9]
    sequences = [engine.open_sequence(shared=False) for _ in range(3)]
    segments = [Segment(each, ids[at:], "last") for at, each in enumerate(sequences[:2])]
    found = [*engine.compute(segments), *engine.compute([Segment(sequences[2], ids[2:])])]
    assert all(isinstance(rows, DeviceArray) and rows.shape == (engine.config.vocab_size,) for rows in found)
    (alone,) = engine.step([Segment(engine.open_sequence(shared=False), ids[2:])])
    np.testing.assert_array_equal(np.asarray(found[2]), alone)
    assert isinstance(alone, np.ndarray)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(opened: Any, goldens: Path, family: str) -> None:
    check_golden(opened(family), golden(goldens, family), TOLERANCE, greedy=4)


@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized_weights(opened: Any, goldens: Path, family: str) -> None:
    found = [opened(family, device=name).predict_logits(prompt(goldens, family)) for name in ("reference", "far")]
    assert np.abs(found[0] - found[1]).max() <= TOLERANCE * np.abs(found[0]).max()


@pytest.mark.parametrize("family", KINDS)
def test_many_sequences_prefixes_and_snapshots(opened: Any, goldens: Path, family: str, tmp_path: Path) -> None:
    runner, ids = opened(family), prompt(goldens, family)
    alone = [runner.generate(each, 4, stop_at_eog=False) for each in (ids[:24], ids, ids[3:20], ids[:1])]
    together = runner.generate_batch([ids[:24], ids, ids[3:20], ids[:1]], 4, stop_at_eog=False)
    assert together == alone
    assert runner.stats()["reused_tokens"] > 0
    runner.prefill_logits(ids[:24])
    runner.snapshot().save(tmp_path / "snapshot")
    other = opened(family, max_seq=128)
    other.restore(rlx.Snapshot.load(tmp_path / "snapshot"))
    assert other.generate(ids, 4, stop_at_eog=False) == alone[1]
    assert other.stats()["reused_tokens"] == 24
    sampled = {"sample": rlx.SampleOpts(temperature=0.8, seed=3), "stop_at_eog": False}
    assert other.generate(ids, 4, **sampled) == runner.generate(ids, 4, **sampled)


@pytest.mark.parametrize("family", KINDS)
def test_the_pool_is_small(opened: Any, goldens: Path, family: str) -> None:
    """Sequences pause and go on, and the states of prompts come back from the disk."""
    ids = prompt(goldens, family)
    expected = opened(family).generate_batch([ids, ids[5:], ids[9:]], 6, stop_at_eog=False)
    small = opened(family, kv_bytes=2 * opened(family)._engine.pool.sizes.sequence_bytes(96))
    assert small.generate_batch([ids, ids[5:], ids[9:]], 6, stop_at_eog=False) == expected


def test_drafts(opened: Any, goldens: Path, tmp_path: Path, cache: CompileCache) -> None:
    """Drafts of the text so far, and of a head with random weights."""
    ids = prompt(goldens, "qwen35")
    expected = opened("qwen35").generate(ids, 6, stop_at_eog=False)
    model = with_head(goldens, tmp_path / "hf", random_head())
    with rlx.auto_runner(model, **OPTIONS, device="far", cache=cache) as runner:
        for way in ("prompt-lookup", "mtp"):
            assert runner.generate(ids, 6, stop_at_eog=False, speculative=way) == expected
        assert runner.stats()["speculation"]["drafted"] > 0


@pytest.mark.parametrize("family", KINDS)
def test_states_on_disk(goldens: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What prompts have in common comes back from files, pages and recurrent states alike."""
    monkeypatch.setattr(DiskKVCache, "_pays", lambda *args: True)
    ids, found, read = prompt(goldens, family), [], 0
    options = {**OPTIONS, "max_seq": 192, "device": "far", "cache_kv": tmp_path}
    for _ in range(2):
        with rlx.auto_runner(goldens / family / FAMILIES[family], **options) as runner:
            requests = [rlx.Request([*ids, *ids, *ids[: number + 1]], 3, stop_at_eog=False) for number in range(3)]
            found.append([list(runner.submit(request).result()) for request in requests])
            read = runner.stats()["cache_kv_tokens_hit"]
    assert found[0] == found[1] and read >= 64


def test_packed_weights_on_disk(goldens: Path, tmp_path: Path) -> None:
    found, ids, file = [], prompt(goldens, "llama"), goldens / "llama" / FAMILIES["llama"]
    for _ in range(2):
        cache = CompileCache(store=Store(tmp_path))
        with rlx.auto_runner(file, **OPTIONS, device="far", cache=cache, keep_packed=True) as runner:
            found.append(runner.predict_logits(ids))
    assert np.array_equal(*found)


def test_images(goldens: Path, cache: CompileCache) -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    features, answers = [], []
    for name in ("reference", "far"):
        path = goldens / "qwen3vl-mm" / "model-f16.gguf"
        with rlx.auto_runner(path, **{**OPTIONS, "device": name, "cache": cache}) as runner:
            token = runner._images.encoder.config.image_token
            features.append(runner.image_features(image))
            answers.append(list(runner.generate(rlx.Prompt([7, token, 8, 9], [image]), 4, stop_at_eog=False)))
    assert np.array_equal(*features)
    assert answers[0] == answers[1] and len(answers[0]) == 4


def test_the_server(cache: CompileCache) -> None:
    body = {"model": "far", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    with (
        rlx.auto_runner(**{**OPTIONS, "device": "far", "cache": cache, "max_seq": 128}) as runner,
        TestClient(create_app(ServedModel(runner, "far")), "http://localhost") as client,
    ):
        found = client.post("/v1/completions", json=body).json()
        ids = runner.generate(runner.tokenizer.encode("Once"), 4)
        assert found["choices"][0]["text"] == runner.tokenizer.decode(ids)


def test_a_compiled_graph(cache: CompileCache) -> None:
    graph = rlx.Graph("product")
    x = graph.input("x", [rlx.SEQ, 64])
    graph.output("y", rlx.ops.linear(x, graph.weight("w", [32, 64])))
    rng = np.random.default_rng(1)
    values, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 64), (32, 64)))
    with rlx.compile(graph, {"w": weight}, device="far", cache=cache) as exe:
        np.testing.assert_allclose(exe(values)["y"], values @ weight.T, rtol=1e-5, atol=1e-5)
