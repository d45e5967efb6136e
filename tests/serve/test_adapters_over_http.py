"""LoRA adapters in a server: each is a model with a name of its own, over the runner of the model that it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from adapter_files import Pairs, write_peft
from click.testing import CliRunner

import rlx
from rlx import demo
from rlx.cli.main import cli
from rlx.serve import ServedModel, ServerOptions, create_app

Serve = Callable[[Any], AbstractContextManager[str]]
QUESTION = [{"role": "user", "content": "Tell me a story about a brave fox."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the demo model with random values."""
    rng = np.random.default_rng(3)
    pairs: Pairs = {
        f"model.layers.{i}.mlp.down_proj": (
            rng.standard_normal((4, 768)).astype(np.float32) * np.float32(0.1),
            rng.standard_normal((256, 4)).astype(np.float32) * np.float32(0.1),
        )
        for i in range(6)
    }
    with rlx.auto_runner(demo.path(), load=False) as runner:
        info = runner.weights.info("blk.0.ffn_down.weight")
        n, k = info.shape
    fitted = {name: (np.resize(a, (4, k)), np.resize(b, (n, 4))) for name, (a, b) in pairs.items()}
    return write_peft(tmp_path_factory.mktemp("adapter"), fitted)


@pytest.fixture(scope="module")
def runner(adapter: Path) -> Iterator[rlx.LmRunner]:
    # deterministic: on AMX a prompt found in the cache has other bits than one computed at once
    with rlx.auto_runner(demo.path(), adapters={"fables": adapter}, deterministic=True) as made:
        yield made


@pytest.fixture(scope="module")
def client(runner: Any, serve: Serve) -> Iterator[httpx.Client]:
    app = create_app(ServedModel(runner, "demo"), ServerOptions(log="none", strict_model=True))
    with serve(app) as url, httpx.Client(base_url=url, timeout=120) as made:
        yield made


def chat(client: httpx.Client, model: str) -> str:
    body = client.post("/v1/chat/completions", json={"model": model, "messages": QUESTION, **GREEDY}).json()
    assert body["model"] == model
    return str(body["choices"][0]["message"]["content"])


def test_the_model_of_a_request_is_an_adapter(runner: Any, client: httpx.Client) -> None:
    expected = {
        name: runner.chat(QUESTION, 16, temperature=0, adapter=adapter).text
        for name, adapter in (("demo", None), ("fables", "fables"))
    }
    assert expected["demo"] != expected["fables"]
    for name in ("demo", "fables", "demo"):
        assert chat(client, name) == expected[name]
    body = {"model": "fables", "messages": QUESTION, "stream": False, "options": {"temperature": 0, "num_predict": 16}}
    assert client.post("/api/chat", json=body).json()["message"]["content"] == expected["fables"]
    answer = client.post("/v1/messages", json={"model": "fables", "messages": QUESTION, **GREEDY}).json()
    assert answer["content"][0]["text"] == expected["fables"]


def test_a_server_lists_its_adapters_and_counts_its_model_once(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["demo", "fables"]
    assert len(client.get("/slots").json()) == client.get("/props").json()["total_slots"]
    lines = client.get("/metrics").text.splitlines()
    assert len([line for line in lines if line.startswith("vllm:num_requests_running")]) <= 1
    assert client.post("/v1/chat/completions", json={"model": "other", "messages": QUESTION}).status_code == 404


def test_vectors_and_log_probabilities(runner: Any, client: httpx.Client) -> None:
    ids = runner.tokenizer.encode("A brave fox.")
    for model, adapter in (("demo", None), ("fables", "fables")):
        found = client.post("/v1/embeddings", json={"model": model, "input": "A brave fox."}).json()["data"][0]
        np.testing.assert_allclose(found["embedding"], runner.embed(ids, adapter=adapter), atol=1e-6)
        body = {"model": model, "prompt": "A brave fox.", "echo": True, "logprobs": 1, "max_tokens": 1}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        expected = runner.score(ids, adapter=adapter)
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1 : len(ids)], expected, atol=1e-6)


def test_the_command_line(adapter: Path) -> None:
    """`rlx run` answers with the adapter that is named."""
    asked = ["run", "Tell me a story about a brave fox.", "--max-tokens", "16", "--temperature", "0", "--no-stream"]
    plain, adapted = (CliRunner().invoke(cli, [*asked, *more]) for more in ((), ("--adapter", f"fables={adapter}")))
    assert plain.exit_code == adapted.exit_code == 0
    assert plain.stdout != adapted.stdout
    for wrong, message in (
        (["--adapter", "fables"], "'fables' is no NAME=PATH"),
        (["--adapter", "a=x", "--adapter", "a=y"], "two adapters have the same name"),
        (["--adapter", "a=x", "--adapter", "b=y"], "one adapter answers: name one"),
        (["--adapter", "a=/nowhere"], "there is no adapter"),
    ):
        result = CliRunner().invoke(cli, [*asked, *wrong])
        assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    result = CliRunner().invoke(cli, ["serve", str(demo.path()), "demo-vision", "--adapter", "a=x"])
    assert result.exit_code == 2 and "--adapter is of one model" in result.stderr
