"""What happens around a stream: comments while nothing comes, errors in the middle, other requests meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
from exchanges import PATH, QUESTION, STORY


@pytest.fixture
def blocked(server: Any) -> Any:
    """While it is not set, the engine computes something else."""
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        free.wait(60)

    thread = threading.Thread(target=lambda: server.model.runner._loop.call(hold))
    thread.start()
    held.wait(60)
    yield free
    free.set()
    thread.join()


def test_comments_keep_a_silent_stream_open(server: Any, blocked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.serve.answers.PROGRESS_SECONDS", 0.02)
    body = {"messages": QUESTION, "temperature": 0, "stream": True, "sse_ping_interval": 0.05}
    lines: list[str] = []
    with server.http.stream("POST", PATH, json=body) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if sum(line.startswith(":") for line in lines) == 3:
                blocked.set()
    assert sum(line.startswith(": ") for line in lines) >= 3
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    texts = [choice["delta"].get("content", "") for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(texts) == "27 + 45 = 72."


def test_the_server_answers_others_while_the_engine_computes(server: Any, blocked: Any) -> None:
    assert server.http.get("/v1/models").status_code == 200
    assert server.post("/tokenize", content="The fox").status_code == 200
    assert server.post(PATH, messages=QUESTION, temperature="x").status_code == 400


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_an_error_in_the_middle_of_a_stream(server: Any, path: str) -> None:
    """The status has been sent: the error is an event, and the stream ends as always."""
    prompt = {"messages": STORY} if path == PATH else {"prompt": "Once upon a time"}
    answer = server.post(path, **prompt, stream=True, ignore_eos=True, max_tokens=900, timeout=0.02)
    assert answer.status_code == 200
    *_, error, done = [event[6:] for event in answer.text.split("\n\n") if event.startswith("data: ")]
    assert done == "[DONE]"
    found = json.loads(error)["error"]
    assert (found["type"], found["code"]) == ("timeout_error", "deadline_exceeded")


@pytest.mark.parametrize("reads", [False, True])
def test_an_answer_that_nobody_has_any_more_is_aborted_without_the_garbage_collector(server: Any, reads: bool) -> None:
    """As when a client goes away while its request is handed over: the result of that call is dropped."""

    async def begun() -> list[Any]:
        asked = server.model.asked(server.model.tokenizer.encode("Once"), stop_at_eog=False)
        found = await asyncio.to_thread(server.model.submit, [asked])
        if reads:
            await found.batch()
        return list(found._together.handles)

    gc.disable()
    try:
        handles = asyncio.run(begun())
        assert handles and all(handle.is_over for handle in handles)
    finally:
        gc.enable()
