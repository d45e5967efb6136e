"""Requests and answers of OpenAI's paths, as the tests send and read them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

HANGS = 60  # seconds: only against a hang
PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is 27 + 45?"}]
STORY = [{"role": "user", "content": "Tell me a story about a brave fox."}]


def chunks_of(server: Any, path: str = PATH, **body: Any) -> list[dict[str, Any]]:
    """The data of a raw stream, `[DONE]` checked and taken off."""
    answer = server.post(path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [part for part in answer.text.split("\n\n") if part and not part.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def error_of(server: Any, status: int = 400, path: str = PATH, **body: Any) -> dict[str, Any]:
    answer = server.post(path, **body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    found: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(found) and found["message"]
    return found


def until(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true."""
    end = time.monotonic() + HANGS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()
