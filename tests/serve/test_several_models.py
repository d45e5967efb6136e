"""Several models in one server: requests choose one by its name, and what describes the server has all of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from test_serve_process import process

from rlx import demo
from rlx.cli.main import cli
from rlx.errors import ArgumentError
from rlx.serve import ServedModel, ServerOptions, create_app
from rlx.serve.server import check_names

NAMES = ["demo", "demo-vision"]
QUESTION: Any = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"temperature": 0, "max_tokens": 12}

Serve = Callable[[Any], AbstractContextManager[str]]


def pair(server: Any, server_that_sees: Any) -> list[ServedModel]:
    """Both demo models, under the names of `NAMES` and one more of the first."""
    return [
        ServedModel(server.model.runner, "demo", ["gpt-4o"]),
        ServedModel(server_that_sees.model.runner, "demo-vision"),
    ]


@pytest.fixture(scope="module")
def both(server: Any, server_that_sees: Any, serve: Serve) -> Iterator[str]:
    """The address of a server with both demo models."""
    options = ServerOptions(log="none", llama_metrics=True)
    with serve(create_app(pair(server, server_that_sees), options)) as url:
        yield url


@pytest.fixture(scope="module")
def strict(server: Any, server_that_sees: Any, serve: Serve) -> Iterator[str]:
    with serve(create_app(pair(server, server_that_sees), ServerOptions(log="none", strict_model=True))) as url:
        yield url


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_request_is_answered_by_the_model_that_it_names(both: str, server: Any, server_that_sees: Any) -> None:
    client = client_of(both)
    alone = {"demo": server.openai, "demo-vision": server_that_sees.openai}
    said = {}
    for name in NAMES:
        found = client.chat.completions.create(model=name, messages=QUESTION, **GREEDY)
        expected = alone[name].chat.completions.create(model=name, messages=QUESTION, **GREEDY)
        assert found.model == name and found.choices[0].message.content == expected.choices[0].message.content
        said[name] = found.choices[0].message.content
    assert said["demo"] != said["demo-vision"]
    for name in ("gpt-4o", "unknown"):
        found = client.chat.completions.create(model=name, messages=QUESTION, **GREEDY)
        assert (found.model, found.choices[0].message.content) == ("demo", said["demo"]), "the default"


def test_a_batch_leaves_half_of_the_slots_of_its_model(both: str, server: Any) -> None:
    client = client_of(both)
    body = {"messages": QUESTION, "max_tokens": 900, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": str(i), **line}) for i in range(2 * server.model.slots)]
    file = client.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    found = client.chat.completions.create(model="demo", messages=QUESTION, **GREEDY)
    now = server.model.runner.stats()["requests"]
    client.batches.cancel(batch.id)
    assert found.choices[0].finish_reason == "length"
    assert now["running"] + now["queue"] <= server.model.slots // 2


def test_lists_have_both(both: str, server: Any, server_that_sees: Any) -> None:
    client = client_of(both)
    assert [each.id for each in client.models.list().data] == NAMES
    assert client.models.retrieve("demo-vision").id == "demo-vision"
    sees = {
        query: httpx.get(f"{both}/props{query}").json()["modalities"]["vision"] for query in ("", "?model=demo-vision")
    }
    assert sees == {"": False, "?model=demo-vision": True}
    slots = httpx.get(f"{both}/slots").json()
    count = server.model.slots + server_that_sees.model.slots
    assert [each["id"] for each in slots] == list(range(count)) and {each["model"] for each in slots} == set(NAMES)
    assert httpx.get(f"{both}/health").json() == {"status": "ok"}


def test_metrics_have_the_name_of_the_model(both: str) -> None:
    client = client_of(both)

    def totals() -> dict[tuple[str, str], float]:
        text = httpx.get(f"{both}/metrics").text
        kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(kinds) == len(set(kinds)), "each metric is declared once"
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return {(each.name, each.labels.get("model_name", "")): each.value for each in samples}

    client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=1)
    before = totals()
    used = client.chat.completions.create(model="demo-vision", messages=QUESTION, **GREEDY).usage
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo-vision", messages=QUESTION, stop=[""])
    after = totals()
    grown = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key)}
    assert grown["rlx:generation_tokens_total", "demo-vision"] == used.completion_tokens  # type: ignore[union-attr]
    assert ("rlx:generation_tokens_total", "demo") not in grown and ("rlx:engine_steps_total", "demo") not in grown
    assert grown["rlx:engine_steps_total", "demo-vision"] > 0
    both_tokens = [after["rlx:generation_tokens_total", name] for name in NAMES]
    assert after["llamacpp:tokens_predicted_total", ""] == sum(both_tokens), "over all models"
    assert {name for metric, name in after if metric == "rlx:slots"} == set(NAMES)


def test_while_the_second_model_loads(server: Any, server_that_sees: Any, serve: Serve) -> None:
    first, second = pair(server, server_that_sees)
    begun, go = threading.Event(), threading.Event()

    def opening() -> ServedModel:
        begun.set()
        assert go.wait(120)
        return second

    with serve(create_app([lambda: first, opening], ServerOptions(log="none"))) as url:
        assert begun.wait(120)
        assert httpx.get(f"{url}/health").json()["status"] == "loading"
        body = {"model": "demo", "messages": QUESTION, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200
        go.set()
        while httpx.get(f"{url}/health").status_code == 503:
            pass
        answers = [httpx.post(f"{url}/v1/chat/completions", json={**body, "model": name}) for name in NAMES]
        assert [each.json()["model"] for each in answers] == NAMES


def test_names_must_differ(server: Any) -> None:
    one, two = (ServedModel(server.model.runner, name, ["same"]) for name in ("a", "b"))
    with pytest.raises(ArgumentError, match="two models are called 'same'"):
        create_app([one, two])
    with pytest.raises(ArgumentError, match="there is no model"):
        create_app([])
    check_names([["a", "b", "a"], ["c"]])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "demo"], "two models are called 'demo'"),
        (["--alias", "x", "demo", "x=demo-vision"], "two models are called 'x'"),
        (["demo", "no.gguf"], "no.gguf: there is no such file"),
        (["--ray", "demo", "demo-vision"], "--ray serves one model a deployment"),
    ],
)
def test_what_cannot_be_served_is_said_before_the_server_listens(words: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *words])
    assert result.exit_code == 2 and said in result.stderr and "http://" not in result.stderr


def test_the_models_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool is half of its share of what the weights of all leave."""
    from rlx.cli.options import open_plan
    from rlx.engine.kv import pool as cache_pool
    from rlx.engine.opening.setup import pools_of

    monkeypatch.setattr(cache_pool, "MOST_SEQUENCES", 1 << 30)
    monkeypatch.setattr(cache_pool, "available_memory", lambda memory: 64 << 30)
    paths = [str(demo.path(name)) for name in NAMES]
    with open_plan(paths[0], {}) as one, open_plan(paths[1], {}) as two:
        (alone,), shared = pools_of([one]), pools_of([one, two])
    assert shared[0] == shared[1] < alone // 2 + 1
    assert alone - sum(shared) < 1 << 30, "less only by the weights of the other"
    with open_plan(paths[0], {"kv_bytes": "64MiB"}) as one, open_plan(paths[1], {}) as two:
        assert pools_of([one, two])[0] == 64 << 20


def test_the_command_serves_both(tmp_path: Path) -> None:
    with process("first=demo", "demo-vision", "--alias", "main", "--strict-model") as (_, client):
        models = client.get("/v1/models").json()["data"]
        assert [(each["id"], each["aliases"]) for each in models] == [("main", ["first"]), ("demo-vision", [])]
        body = {"messages": QUESTION, "max_tokens": 2}
        answers = [
            client.post("/v1/chat/completions", json={**body, "model": each}) for each in ("first", "demo-vision")
        ]
        assert [each.json()["model"] for each in answers] == ["main", "demo-vision"]
        assert client.post("/v1/chat/completions", json={**body, "model": "demo"}).status_code == 404
