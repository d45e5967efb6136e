"""Embedding models and rerankers behind the server: all shapes of vectors and scores, and what they refuse."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import rlx
from rlx.serve import ServedModel, create_app

TEXTS = ["the first text", "no", "yes yes yes"]


@pytest.fixture(scope="module")
def http(goldens: Path, serve: Any) -> Iterator[httpx.Client]:
    with (
        rlx.auto_runner(goldens / "bert" / "hf", threads=2, compile_ahead=True) as embedder,
        rlx.auto_runner(goldens / "bert-reranker" / "hf", threads=2) as ranker,
        serve(create_app([ServedModel(embedder, "bert"), ServedModel(ranker, "ranker")])) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def vectors(goldens: Path) -> np.ndarray:
    with rlx.auto_runner(goldens / "bert" / "hf", threads=2) as runner:
        return runner.embed(TEXTS)


def test_vectors_in_openais_shape(http: httpx.Client, vectors: np.ndarray) -> None:
    found = http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "float"}).json()
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], vectors, atol=1e-7)
    assert found["model"] == "bert" and found["usage"]["prompt_tokens"] > 3
    packed = http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()["data"][0]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), vectors[0], atol=1e-7)
    short = http.post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 8}).json()["data"][0]["embedding"]
    assert len(short) == 8 and abs(np.linalg.norm(short) - 1) < 1e-6
    mean = http.post("/v1/embeddings", json={"input": TEXTS[0], "pooling": "mean"}).json()["data"][0]["embedding"]
    assert np.abs(np.array(mean) - vectors[0]).max() > 1e-3


def test_vectors_in_ollamas_shape(http: httpx.Client, vectors: np.ndarray) -> None:
    found = http.post("/api/embed", json={"model": "bert", "input": TEXTS}).json()
    np.testing.assert_allclose(found["embeddings"], vectors, atol=1e-7)
    shown = http.post("/api/show", json={"model": "bert"}).json()
    assert shown["capabilities"] == ["embedding"]
    long = {"model": "bert", "input": "yes " * 400}
    assert http.post("/api/embed", json=long).status_code == 400
    assert len(http.post("/api/embed", json={**long, "truncate": True}).json()["embeddings"]) == 1


def test_documents_in_the_shape_of_jina_and_cohere(http: httpx.Client, goldens: Path) -> None:
    body = {"model": "ranker", "query": "what is yes", "documents": [*TEXTS[:2], {"text": TEXTS[2]}], "top_n": 2}
    found = http.post("/v1/rerank", json=body).json()
    with rlx.auto_runner(goldens / "bert-reranker" / "hf", threads=2) as runner:
        ranked = runner.rerank(body["query"], TEXTS)
        scores = 1 / (1 + np.exp(-np.array(ranked)))
        pairs = [runner.tokenizer.encode_pair(body["query"], text) for text in TEXTS]
    assert found["usage"]["prompt_tokens"] == ranked.tokens == sum(len(ids) for pair in pairs for ids in pair)
    best = np.argsort(-scores)[:2]
    assert [each["index"] for each in found["results"]] == best.tolist()
    np.testing.assert_allclose([each["relevance_score"] for each in found["results"]], scores[best], atol=1e-6)
    assert found["results"][0]["document"] == {"text": TEXTS[best[0]]}
    for path in ("/rerank", "/reranking", "/v2/rerank"):
        plain = http.post(path, json={**body, "return_documents": False}).json()
        assert "document" not in plain["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "generates no text"),
        ("/v1/completions", {"prompt": "hi"}, "generates no text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "makes vectors"),
        ("/v1/embeddings", {"model": "ranker", "input": "a"}, "scores pairs"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "at most 64"),
    ],
)
def test_what_a_model_cannot_do_is_named(http: httpx.Client, path: str, body: dict[str, Any], what: str) -> None:
    found = http.post(path, json=body)
    assert found.status_code == 400 and what in found.json()["error"]["message"]


def test_it_is_described(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()
    assert [each["id"] for each in models["data"]] == ["bert", "ranker"]
    assert "rlx" in http.get("/metrics").text
    assert http.get("/slots").status_code == 200 and http.get("/props").json()["family"] == "bert"
    assert http.get("/ready").status_code in (200, 404)
