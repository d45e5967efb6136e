"""Costly and hostile grammars over HTTP: an error of one request, while others are answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from exchanges import PATH, error_of

from rlx.grammar import trial

pytestmark = pytest.mark.usefixtures("small_budget")

BODY = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8, "temperature": 0}
WAITING = 45  # more than the worker threads of the event loop


def chain(count: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a"'])


def references(count: int) -> dict[str, Any]:
    inner = {f"r{i}": {"anyOf": [{"$ref": f"#/$defs/r{i + 1}"}]} for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": {**inner, f"r{count}": {"type": "integer"}}}


HOSTILE = {
    "guided_grammar": chain(2_700),
    "json_schema": references(3_000),
    "guided_json": {"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(30)]},
    "grammar": "start: T\nT: " + " & ".join(f"/.*y{i}.*/" for i in range(30)),
    "guided_regex": "((a{1000}){1000}){1000}",
    "guided_choice": [f"text {i}" for i in range(20_000)],
}


@pytest.mark.parametrize("field", HOSTILE)
def test_a_hostile_grammar_is_an_error_of_its_request(server: Any, field: str) -> None:
    assert error_of(server, **BODY, **{field: HOSTILE[field]})["param"] == field
    assert server.post(PATH, **BODY).status_code == 200


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars take until the event is set."""
    released, call = threading.Event(), trial._CHILD.call
    monkeypatch.setattr(trial._CHILD, "call", lambda request: released.wait(60) and call(request))
    yield released
    released.set()


def test_nobody_waits_for_the_grammars_of_others(server: Any, held: threading.Event) -> None:
    """Neither a plain chat, nor a grammar that is known, nor a health check."""
    paths = [PATH, "/v1/responses", "/v1/messages", "/api/chat"]

    def ask(number: int) -> httpx.Response:
        path, schema = paths[number % 4], {"const": f"waits {number}"}
        form: dict[str, Any] = {
            PATH: BODY | {"json_schema": schema},
            "/v1/responses": {
                "input": "Hi",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
            },
            "/v1/messages": BODY | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "/api/chat": {"messages": BODY["messages"], "format": schema, "stream": False},
        }[path]
        return httpx.post(server.url + path, json={"model": "demo", **form}, timeout=120)

    with ThreadPoolExecutor(WAITING) as pool:
        waiting = [pool.submit(ask, number) for number in range(WAITING)]
        late = httpx.post(
            server.url + PATH, json=BODY | {"json_schema": {"const": "late"}, "timeout": 0.2}, timeout=120
        )
        assert late.status_code == 408, late.text
        assert server.post(PATH, **BODY).status_code == 200
        plain = server.post("/api/chat", model="demo", messages=BODY["messages"], stream=False)
        assert plain.status_code == 200
        assert server.http.get("/health").status_code == 200
        assert not any(each.done() for each in waiting)
        held.set()
        texts = [each.result() for each in waiting]
    assert [each.status_code for each in texts] == [200] * WAITING
    assert all(f"waits {number}" in each.text for number, each in enumerate(texts))
