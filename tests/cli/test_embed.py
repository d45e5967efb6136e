"""`rlx embed` and `rlx rerank`: files in and out, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import rlx
from rlx.cli.main import cli


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


def test_vectors_of_lines(goldens: Path, tmp_path: Path) -> None:
    model, texts, out = goldens / "bert" / "hf", tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("the first text\n\nyes\n")
    done = call("embed", texts, model, "--out", out)
    assert done.exit_code == 0 and "3 vectors of 64 numbers" in done.stderr
    with rlx.auto_runner(model) as runner:
        want = runner.embed(["the first text", "", "yes"])
        np.testing.assert_array_equal(np.load(out), want)
        lines = tmp_path / "texts.jsonl"
        lines.write_text('"yes"\n{"text": "yes", "id": 3}\n')
        done = call("embed", lines, model, "--prompt-name", "query", "--dimensions", 8)
        found = [json.loads(line)["embedding"] for line in done.stdout.splitlines()]
        np.testing.assert_allclose(found, [runner.embed("yes", prompt_name="query", dimensions=8)] * 2, atol=1e-7)
    done = call("embed", lines, model, "--out", tmp_path / "out.jsonl")
    assert done.exit_code == 0 and len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_model_that_generates_makes_vectors_too(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("yes\n")
    done = call("embed", texts, "demo", "--pooling", "last")
    assert done.exit_code == 0 and len(json.loads(done.stdout)["embedding"]) > 8
    texts.write_text("yes\n\nno\n")
    refused = call("embed", texts, "demo")
    assert refused.exit_code == 2 and f"{texts}, line 2: it is empty. Take this line out.\n" in refused.stderr
    refused = call("embed", texts, "demo", "--dimensions", 8)
    assert refused.exit_code == 2 and "--dimensions: only an embedding model has that" in refused.stderr


def test_documents_in_order(goldens: Path, tmp_path: Path) -> None:
    model, texts = goldens / "bert-reranker" / "hf", tmp_path / "texts.txt"
    texts.write_text("the first text\nno\nyes yes yes\n")
    with rlx.auto_runner(model) as runner:
        scores = runner.rerank("a query", texts.read_text().split("\n")[:3])
    done = call("rerank", "a query", texts, model, "--json", "--top", 2)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["index"] for each in found] == np.argsort(-np.array(scores))[:2].tolist()
    shown = call("rerank", "a query", texts, model)
    assert len(shown.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "words", "what"),
    [
        ("a", ("--out", "vectors.txt"), "expected a name that ends in .npy or .jsonl"),
        ("a\n" + "yes " * 300, (), "texts.txt, line 2: it has 302 tokens, the model's positions end at 256"),
        ("a", ("--prompt-name", "passage"), "there is no prompt 'passage'"),
        ("a", ("--pooling", "median"), "pooling is 'median'"),
    ],
)
def test_what_is_refused(goldens: Path, tmp_path: Path, text: str, words: tuple[str, ...], what: str) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(text)
    done = call("embed", file, goldens / "bert" / "hf", *words)
    assert done.exit_code == 2 and what in " ".join(done.stderr.split())
