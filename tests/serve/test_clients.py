"""Official clients against the server: what programs that are written for OpenAI's API do."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import openai
import pytest
from exchanges import QUESTION, STORY
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

TIMEOUT = 120


def client_of(server: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT, **options)


# ---------------------------------------------------------------------------------------------------- openai


def test_fields_of_other_servers_go_through_the_client(server: Any) -> None:
    found = server.openai.chat.completions.create(
        model="demo", messages=QUESTION, extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1}, max_tokens=3
    )
    assert found.usage.completion_tokens == 3


def test_many_requests_at_the_same_time_give_the_same_answers(server: Any) -> None:
    """Alone, beside 15 others, and after the prompt is known."""
    mine = {"model": "demo", "messages": STORY, "temperature": 0.9, "seed": 3, "max_tokens": 40, "logprobs": True}

    def others(i: int) -> dict[str, Any]:
        content = " ".join(["What is 27 + 45?", "Tell me about the owl.", "And then?"][i % 3 :])
        body = {"messages": [{"role": "user", "content": content * (1 + i)}], "temperature": 0.5 + i / 20, "seed": i}
        return {"model": "demo", "max_tokens": 30 + i, **body}

    async def run() -> list[Any]:
        async with client_of(server, max_retries=0) as client:
            create = client.chat.completions.create
            alone = await create(**mine)
            crowd = [create(**others(i)) for i in range(15)]
            beside, *_ = await asyncio.gather(create(**mine), *crowd)
            return [alone, beside, await create(**mine)]

    choices = [found.choices[0].model_dump() for found in asyncio.run(run())]
    assert choices[0] == choices[1] == choices[2]
    assert len(choices[0]["logprobs"]["content"]) == 40 or choices[0]["finish_reason"] == "stop"


class _Flaky(BaseHTTPRequestHandler):
    """Refuses the first request as a full server does, and hands the next ones on."""

    target, refused = "", 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if type(self).refused == 0:
            type(self).refused += 1
            self.send_response(429)
            self.send_header("Retry-After", "0.01")
            self.end_headers()
            return
        answer = httpx.post(self.target + self.path, content=body, headers={"content-type": "application/json"})
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def test_the_client_retries_when_the_server_is_full(server: Any) -> None:
    handler = type("Flaky", (_Flaky,), {"target": server.url, "refused": 0})
    front = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{front.server_port}/v1", api_key="none", max_retries=2)
        found = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
        assert found.choices[0].message.content == "27 + 45 = 72." and handler.refused == 1  # type: ignore[attr-defined]
    finally:
        front.shutdown()
        front.server_close()


# ---------------------------------------------------------------------------------------------------- langchain


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    degrees: int = Field(ge=-50, le=60)


@pytest.fixture
def chat(server: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key=SecretStr("none"), temperature=0, max_completion_tokens=80,
        timeout=TIMEOUT, max_retries=0, stream_usage=True,
    )  # fmt: skip


def test_langchain_answers_and_streams(chat: ChatOpenAI) -> None:
    answer = chat.invoke("What is 27 + 45?")
    assert answer.content == "27 + 45 = 72." and answer.usage_metadata["output_tokens"] > 0  # type: ignore[index]
    assert "".join(str(piece.content) for piece in chat.stream("What is 27 + 45?")) == answer.content
    assert [each.content for each in chat.batch(["What is 27 + 45?"] * 3)] == [answer.content] * 3


def test_langchain_calls_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([Weather], tool_choice="required")
    (call, *_) = bound.invoke("How is the weather in Paris?").tool_calls
    assert call["name"] == "Weather" and Weather(**call["args"])
