"""Encoders: the vectors and scores of transformers, the same bits alone and packed, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import ArgumentError, ConfigError, PromptError, UnsupportedModelError
from rlx.runners.auto import runner_class
from rlx.runners.encoder import EncoderRunner
from rlx.text import rerank
from rlx.weights import open_weights

TOLERANCE = 2e-5  # of a unit vector, and of a score
VECTORS = [
    ("bert", "hf"),
    ("bert", "model-f16.gguf"),
    ("modernbert", "hf"),
    ("nomic-bert", "model-f16.gguf"),
    ("embeddinggemma", "hf"),
    ("qwen3-embedding", "hf"),
]
SCORES = [("bert-reranker", "hf"), ("xlm-roberta-reranker", "model-f16.gguf"), ("qwen3-reranker", "model-f16.gguf")]


def opened(path: Path, **options: Any) -> EncoderRunner:
    found: Any = rlx.auto_runner(path, precision="exact", threads=2, **options)
    assert isinstance(found, EncoderRunner)
    return found


@pytest.fixture(scope="module")
def bert(goldens: Path) -> Iterator[EncoderRunner]:
    with opened(goldens / "bert" / "hf") as runner:
        yield runner


def texts_of(golden: Any) -> list[str]:
    return [str(golden["prefix"]) + text for text in json.loads(str(golden["texts"]))]


@pytest.mark.parametrize(("family", "file"), VECTORS)
def test_vectors(goldens: Path, family: str, file: str) -> None:
    golden = np.load(goldens / family / "golden.npz")
    texts = texts_of(golden)
    with opened(goldens / family / file) as runner:
        for i, text in enumerate(texts):
            assert runner.tokenizer.encode(text) == golden[f"ids_{i}"].tolist()
        found = runner.embed(texts)
        assert found.dtype == np.float32 and np.abs(found - golden["embeddings"]).max() < TOLERANCE
        raw = runner.embed(texts, normalize=False)
        assert np.abs(raw - golden["pooled"]).max() < TOLERANCE * np.abs(golden["pooled"]).max()
        np.testing.assert_array_equal(np.stack([runner.embed(text) for text in texts]), found)
        np.testing.assert_array_equal(runner.embed(texts[::-1])[::-1], found)
        assert runner.embed([]).shape == (0, runner.width)
        assert np.isfinite(runner.embed("")).all()


@pytest.mark.parametrize("family", ["modernbert", "embeddinggemma"])
def test_vectors_of_rounded_activations(goldens: Path, family: str) -> None:
    golden = np.load(goldens / family / "golden.npz")
    with rlx.auto_runner(goldens / family / "hf", precision="auto", threads=2) as runner:
        assert np.einsum("ij,ij->i", runner.embed(texts_of(golden)), golden["embeddings"]).min() > 0.998


@pytest.mark.parametrize(("family", "file"), SCORES)
def test_scores(goldens: Path, family: str, file: str) -> None:
    golden = np.load(goldens / family / "golden.npz")
    pairs = json.loads(str(golden["pairs"]))
    with opened(goldens / family / file) as runner:
        found = [runner.rerank(query, [document])[0] for query, document in pairs]
        assert np.abs(np.array(found) - golden["scores"]).max() < TOLERANCE
        documents = [document for _, document in pairs]
        together = runner.rerank(pairs[0][0], documents)
        assert together[0] == found[0] and runner.rerank(pairs[0][0], documents[::-1]) == together[::-1]
        assert runner.rerank("a query", []) == []
        with pytest.raises(UnsupportedModelError, match="scores pairs"):
            runner.embed("a text")


def test_tokenizers_of_both_kinds_of_file_agree(goldens: Path) -> None:
    folder = goldens / "xlm-roberta-reranker"
    checkpoint, gguf = (rlx.load_tokenizer(folder / file) for file in ("hf/tokenizer.json", "model-f16.gguf"))
    for text in ("yes", "ｆｕｌｌ width", "  two   spaces ", "", "unknown \u2603 <s>"):
        assert checkpoint.encode(text) == gguf.encode(text)
        assert checkpoint.encode_pair(text, "no") == gguf.encode_pair(text, "no")


def test_many_texts_are_packed_without_padding(bert: EncoderRunner) -> None:
    """In several calls, each text as it is alone."""
    texts = [f"document {i} " * (1 + i % 17) for i in range(150)]
    seen: list[tuple[str, int, int]] = []
    found = bert.embed(texts, progress=lambda *step: seen.append(step))
    for i in (0, 16, 77, 149):
        np.testing.assert_array_equal(bert.embed(texts[i]), found[i])
    assert len(seen) > 1 and seen[-1] == ("embedding texts", 150, 150)


def test_dimensions_prompts_and_poolings(bert: EncoderRunner, goldens: Path) -> None:
    text = "a text"
    whole, raw = bert.embed(text), bert.embed(text, normalize=False)
    short = raw[:16].astype(np.float64)
    np.testing.assert_allclose(bert.embed(text, dimensions=16), short / np.linalg.norm(short), atol=1e-7)
    prompt = bert.prompts["query"]
    np.testing.assert_array_equal(bert.embed(text, prompt_name="query"), bert.embed(prompt + text))
    np.testing.assert_array_equal(bert.embed(text, prompt=prompt), bert.embed(prompt + text))
    others = [bert.embed(text, pooling=name) for name in ("mean", "last", "max")]
    assert all(np.abs(other - whole).max() > 1e-3 for other in others)
    for wrong in ({"dimensions": 65}, {"dimensions": 0}, {"prompt_name": "passage"}, {"pooling": "median"}):
        with pytest.raises(ArgumentError):
            bert.embed(text, **wrong)
    with pytest.raises(ArgumentError, match="text 1"):
        bert.embed(["a", 3])  # type: ignore[list-item]


def test_an_encoder_opened_as_a_model_that_generates(goldens: Path) -> None:
    for file in ("hf", "model-f16.gguf"):
        refused = pytest.raises(UnsupportedModelError, match=r"a text encoder: it generates no text.*rlx embed")
        with open_weights(goldens / "bert" / file) as loader, refused:
            runner_class(loader)


def test_what_the_folder_lacks(goldens: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(goldens / "bert" / "hf", folder)
        return folder

    folder = copy("no pooling")
    (folder / "1_Pooling" / "config.json").unlink()
    with opened(folder) as runner:
        with pytest.raises(ArgumentError, match=r"1_Pooling/config\.json is missing"):
            runner.embed("a text")
        assert runner.embed("a text", pooling="cls").shape == (64,)
    folder = copy("another pooling")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_weightedmean_tokens": true}')
    with pytest.raises(UnsupportedModelError, match="weightedmean"):
        opened(folder)
    folder = copy("another module")
    (folder / "modules.json").write_text('[{"path": "1_CNN", "type": "sentence_transformers.models.CNN"}]')
    with pytest.raises(UnsupportedModelError, match="'CNN'"):
        opened(folder)
    (folder / "modules.json").write_text('[{"path": "../other", "type": "sentence_transformers.models.Pooling"}]')
    with pytest.raises(ConfigError, match=r"the path '\.\./other' leads out of the folder"):
        opened(folder)
    (folder / "modules.json").write_text(f'[{{"path": "{"a" * 300}", "type": "Pooling"}}]')
    with pytest.raises(ConfigError, match=r"modules\.json: the folder 'aaa.* cannot be read: File name too long"):
        opened(folder)
    (folder / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"modules\.json"):
        opened(folder)
    folder = copy("another length")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    with pytest.raises(ConfigError, match="'max_seq_length' is 'long', expected a number above 0"):
        opened(folder)
    folder = copy("another prompt")
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": {}}')
    with pytest.raises(ConfigError, match=r"'default_prompt_name' is \{\}, which is none of the prompts"):
        opened(folder)
    dense = tmp_path / "dense"
    shutil.copytree(goldens / "embeddinggemma" / "hf", dense)
    (dense / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(rlx.ModelFileError, match="3_Dense"):
        opened(dense)


@pytest.mark.parametrize(("given", "said"), [
    ((5, ["a"]), "query: expected a text, found a int"),
    (("a", "abc"), "documents: expected a list of texts, found a str"),
    (("a", 5), "documents: expected a list of texts, found a int"),
    (("a", ["b", 5]), "document 1: expected a text"),
    (("a", {"a": "b"}), "expected a list of texts, found a dict"),
])  # fmt: skip
def test_what_is_no_text(given: Any, said: str, goldens: Path, bert: EncoderRunner) -> None:
    with (
        opened(goldens / "bert-reranker" / "hf") as encoder,
        rlx.auto_runner(goldens / "qwen3" / "hf") as decoder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(rerank, "answer_ids", lambda tokenizer: (20, 30))
        for ranker in (encoder, decoder):
            with pytest.raises(ArgumentError, match=said):
                ranker.rerank(*given)
    for texts in (5, None, {"a": 1}, b"a"):
        with pytest.raises(ArgumentError, match="texts: expected a list of texts, found a"):
            bert.embed(texts)
    with pytest.raises(ArgumentError, match="text 1: expected a text, found a int"):
        bert.embed(["a", 5])
    with pytest.raises(ArgumentError, match="prompt: expected a text, found a int"):
        bert.embed("a", prompt=5)


def test_a_decoder_embeds_texts_and_ranks_documents(goldens: Path) -> None:
    with rlx.auto_runner(goldens / "qwen3" / "hf", precision="exact", threads=2) as runner:
        found = runner.embed(["yes", "no"])
        np.testing.assert_array_equal(found[1], runner.embed(runner.tokenizer.encode("no")))
        np.testing.assert_array_equal(found[0], runner.embed("yes"))
    refused = pytest.raises(UnsupportedModelError, match="rank no documents")
    with rlx.auto_runner(goldens / "llama" / "hf", threads=2) as other, refused:
        other.rerank("a query", ["a document"])


def test_a_decoder_ranks_short_documents_together(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits that each has alone, and those of its prompt's logits."""
    monkeypatch.setattr(rerank, "answer_ids", lambda tokenizer: (20, 30))  # small vocabularies lack yes and no
    monkeypatch.setattr(rerank, "QWEN3", "{query}: {document}?")
    documents = ["a", "no " * 30, "yes", "fox " * 9, "owl"]
    with rlx.auto_runner(goldens / "qwen3" / "hf", precision="exact", threads=2, max_seq=100) as runner:
        found = runner.rerank("a query", documents)
        assert list(found) == [runner.rerank("a query", [each])[0] for each in documents]
        prompts = [runner.tokenizer.encode_parts(f"a query: {each}?", False) for each in documents]
        logits = [runner.predict_logits(ids).astype(np.float64) for ids in prompts]
        assert list(found) == [1 / (1 + np.exp(row[30] - row[20])) for row in logits]
        assert found.tokens == sum(map(len, prompts)) and runner.rerank("a query", []) == []
        with pytest.raises(PromptError, match="document 1: it has"):
            runner.rerank("a query", ["a", "fox " * 200])
        with pytest.warns(UserWarning, match="1 of 2 documents were cut to 100 tokens"):
            assert len(runner.rerank("a query", ["a", "fox " * 200], truncate=True)) == 2
        with pytest.raises(PromptError, match="the query alone has"):
            runner.rerank("fox " * 200, ["a"], truncate=True)
