"""The model's names: in lists, requests and answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from rlx import demo
from rlx.serve import ServedModel, create_app
from rlx.serve.options import ServerOptions
from rlx.serve.server import names_of

QUESTION = [{"role": "user", "content": "What is 27 + 45?"}]


@pytest.fixture(scope="module")
def strict(server: Any, serve: Any) -> Iterator[str]:
    """The address of a server that answers to the model's names only: "demo" and "gpt-4o"."""
    with serve(create_app(server.model, ServerOptions(strict_model=True, log="none"))) as url:
        yield url


@pytest.mark.parametrize("name", ["demo", "gpt-4o", "x", "org/any-model:7b"])
def test_it_answers_to_any_name(server: Any, name: str) -> None:
    """With its own, as llama-server does; Ollama's API repeats the name."""
    answer = server.openai.chat.completions.create(model=name, messages=QUESTION, max_tokens=30)
    assert answer.choices[0].message.content and answer.model == "demo"
    assert server.openai.completions.create(model=name, prompt="Once", max_tokens=1).model == "demo"
    assert server.openai.responses.create(model=name, input="Hi", max_output_tokens=1).model == "demo"
    assert server.openai.models.retrieve(name).id == "demo"
    body = {"model": name, "messages": QUESTION, "max_tokens": 1}
    assert server.post("/v1/messages", **body).json()["model"] == "demo"
    options = {"num_predict": 1}
    assert (
        server.post("/api/chat", model=name, messages=QUESTION, options=options, stream=False).json()["model"] == name
    )


def test_clients_of_anthropic_list_the_models(server: Any) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", _strict_response_validation=True)
    assert [each.display_name for each in client.models.list()] == ["demo"] and client.models.retrieve(
        "demo"
    ).id == "demo"


def test_a_strict_server_knows_its_names_only(strict: str) -> None:
    clients = openai.OpenAI(base_url=f"{strict}/v1", api_key="none", max_retries=0)
    for name in ("demo", "gpt-4o"):
        assert clients.chat.completions.create(model=name, messages=QUESTION, max_tokens=1).model == "demo"
    with pytest.raises(openai.NotFoundError, match="does not exist here") as missing:
        clients.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        clients.responses.create(model="gpt-9", input="Hi")
    with pytest.raises(openai.NotFoundError):
        clients.models.retrieve("gpt-9")
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        anthropic.Anthropic(base_url=strict, api_key="none", max_retries=0).messages.create(
            model="gpt-9", max_tokens=1, messages=QUESTION
        )
    with pytest.raises(ollama.ResponseError, match="does not exist here") as found:
        ollama.Client(strict).chat("gpt-9", messages=QUESTION)
    assert found.value.status_code == 404


def test_no_name_shows_a_folder(server: Any, serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "tiny-model.gguf"
    file.write_bytes(b"")
    names = names_of(file, str(file), ["mine"])
    assert names == ["mine", "tiny-model", "tiny-model.gguf"]
    assert names_of("/cache/x/m.gguf", "org/repo:Q4") == ["m", "org/repo:Q4"]
    assert names_of(demo.path(demo.TEXT), None) == ["demo"]
    model = ServedModel(server.model.runner, names[0], names[1:])
    path = str(demo.path(demo.TEXT).parent)
    with serve(create_app(model, ServerOptions(strict_model=True, log="none"))) as url:
        answers = [
            httpx.get(f"{url}/{each}") for each in ("v1/models", "props", "api/tags", "api/ps", "v1/models/other")
        ]
        answers.append(httpx.post(f"{url}/api/show", json={"model": "mine"}))
    for answer in answers:
        assert str(tmp_path) not in answer.text and path not in answer.text
    assert answers[-2].status_code == 404 and "tiny-model.gguf" in answers[-2].text
