"""The relay in front of the replicas, with replicas that are lost at any point. Needs no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from rlx.ray.relay import ATTEMPTS, Relay
from rlx.serve.asgi import call, messages, scope_of
from rlx.serve.prefixes import PIECE, PrefixTable, prefix_keys

START = {"type": "http.response.start", "status": 200}
PIECES = [b"one ", b"two ", b"three"]


class Lost(Exception):
    """A replica is gone."""


class Full(Exception):
    """All replicas are busy."""


class Replicas:
    """Each attempt is a list of messages, and an exception where the replica is lost."""

    def __init__(self, *attempts: list[Any]) -> None:
        self.attempts, self.asked, self.closed = list(attempts), 0, 0

    async def __call__(self, scope: dict[str, Any], body: bytes, keys: list[int]) -> AsyncGenerator[Any, None]:
        self.asked += 1
        found = self.attempts[min(self.asked, len(self.attempts)) - 1]
        try:
            for each in found:
                await asyncio.sleep(0)
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.closed += 1


def relay(replicas: Replicas, most: int = 1_000) -> Relay:
    return Relay(replicas, (Lost,), Full, most)


def answer(media: bytes = b"application/json", *, until: int = 99, then: list[Any] | None = None) -> list[Any]:
    parts = [{"type": "http.response.body", "body": piece, "more_body": piece != PIECES[-1]} for piece in PIECES]
    return [{**START, "headers": [(b"content-type", media)]}, *parts][:until] + (then or [])


def ask(app: Relay, path: str = "/v1/chat/completions", body: Any = None) -> tuple[int, Any]:
    return asyncio.run(asyncio.wait_for(call(app, path, body or {"prompt": "Hi"}), 30))


@pytest.mark.parametrize("lost_after", [0, 1])
def test_a_request_that_had_not_begun_is_asked_again(lost_after: int) -> None:
    replicas = Replicas(answer(until=lost_after, then=[Lost()]), [Lost()], answer())
    assert ask(relay(replicas)) == (200, "one two three")
    assert replicas.asked == replicas.closed == 3


@pytest.mark.parametrize(
    ("path", "media", "end"),
    [
        ("/v1/chat/completions", b"text/event-stream; charset=utf-8", "data: {}\n\ndata: [DONE]\n\n"),
        ("/v1/messages", b"text/event-stream", "event: error\ndata: {}\n\n"),
        ("/api/chat", b"application/x-ndjson", "{}\n"),
    ],
)
def test_a_stream_that_had_begun_ends_with_an_error(path: str, media: bytes, end: str) -> None:
    replicas = Replicas(answer(media, until=3, then=[Lost()]), answer(media))
    status, text = ask(relay(replicas), path)
    assert status == 200 and text.startswith("one two ") and replicas.asked == 1
    before, after = end.split("{}")
    said = text.removeprefix("one two ")
    assert said.startswith(before) and said.endswith(after)
    assert "replica" in json.dumps(json.loads(said.removeprefix(before).removesuffix(after)))


def test_an_answer_in_one_form_that_had_begun_is_cut() -> None:
    with pytest.raises(ConnectionError):
        ask(relay(Replicas(answer(until=2, then=[Lost()]))))


def test_a_request_that_every_replica_dies_of_ends() -> None:
    replicas = Replicas([Lost()])
    status, body = ask(relay(replicas))
    assert (status, body["error"]["code"], replicas.asked) == (503, "replica_lost", ATTEMPTS)


def test_a_full_queue_is_429() -> None:
    status, body = ask(relay(Replicas([Full()])))
    assert (status, body["error"]["code"]) == (429, "queue_full")


def test_a_body_that_is_too_large_is_not_passed_on() -> None:
    replicas = Replicas(answer())
    status, body = ask(relay(replicas), body={"prompt": "x" * 1_000})
    assert (status, body["error"]["code"], replicas.asked) == (413, "body_too_large", 0)


def test_a_client_that_goes_away_closes_the_replicas_answer() -> None:
    never = [*answer(until=2), *[{"type": "http.response.body", "body": b"", "more_body": True}] * 10_000]
    replicas = Replicas(never)

    async def leave() -> None:
        found = messages(relay(replicas), scope_of("/v1/chat/completions"), b"{}")
        async for message in found:
            if message["type"] == "http.response.body":
                break
        await found.aclose()
        assert replicas.closed == 1

    asyncio.run(asyncio.wait_for(leave(), 30))


# ---------------------------------------------------------------------------------------------- the table of prefixes

LONG = "".join(chr(97 + i % 26) for i in range(4 * PIECE))


def test_a_prompt_goes_where_its_longest_prefix_is() -> None:
    table: PrefixTable[str] = PrefixTable(imbalance=4)
    table.remember(prefix_keys(LONG), "a")
    table.remember(prefix_keys(LONG[: 2 * PIECE] + "b" * 3 * PIECE), "b")
    loads = {"a": 3, "b": 0, "c": 0}
    assert table.ranked(prefix_keys(LONG + "and more"), loads)[0] == "a"
    assert table.ranked(prefix_keys(LONG[: 2 * PIECE] + "b" * PIECE), loads)[0] == "b"
    assert table.ranked(prefix_keys("x" * PIECE), loads)[0] in "bc", "nobody has it: the least busy ones"


def test_a_busy_engine_gives_its_prefix_away() -> None:
    """At first to one that is idle; then both have it, and share the load."""
    table: PrefixTable[str] = PrefixTable(imbalance=4)
    keys = prefix_keys(LONG)
    table.remember(keys, "a")
    assert table.ranked(keys, {"a": 4, "b": 0})[0] == "a"
    assert table.ranked(keys, {"a": 5, "b": 0})[0] == "b"
    table.remember(keys, "b")
    assert table.ranked(keys, {"a": 3, "b": 2, "c": 0})[0] == "b", "of those that have it, the least busy one"
