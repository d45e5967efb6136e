"""/v1/files and /v1/batches, with OpenAI's client: what `rlx batch` does, behind requests of clients."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from exchanges import PATH, QUESTION

from rlx.serve import create_app, record
from rlx.serve.batch.jobs import Batch, BatchJobs
from rlx.serve.options import ServerOptions
from rlx.serve.record import RequestRecord

ENDED = ("completed", "failed", "cancelled")
HANGS = 120
KEYS = ("the-first-key", "the-second-key")


def lines(*bodies: dict[str, Any], url: str = PATH) -> bytes:
    """The requests a, b, c and so on."""
    rows = [
        {"custom_id": chr(97 + i), "method": "POST", "url": url, "body": {"max_tokens": 12, **body}}
        for i, body in enumerate(bodies)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def asked(client: openai.OpenAI, data: bytes, endpoint: Any = PATH, **more: Any) -> Any:
    """A new batch."""
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    """The batch when it has ended."""
    end = time.monotonic() + HANGS
    while batch.status not in ENDED:
        assert time.monotonic() < end, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def rows_of(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(file_id).text.splitlines())}


@pytest.fixture
def make(server: Any, serve: Any) -> Iterator[Callable[..., Any]]:
    """`make(files_mb=1)`: the address of another application over the same model."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            serve(create_app(server.model, ServerOptions(log="none", **options)))
        )


def test_a_wrong_query_is_named(server: Any) -> None:
    for path, wrong in (("/v1/files", "many"), ("/v1/batches", "1000000")):
        error = server.http.get(path, params={"limit": wrong}).json()["error"]
        assert error["param"] == "limit" and error["message"].startswith("limit: expected ")
        assert error["message"].endswith(f'found "{wrong}"')


def test_files(server: Any) -> None:
    client = server.openai
    made = client.files.create(file=("a name.jsonl", b'{"a": "\xc3\xa9"}\n' * 3), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.object) == ("a name.jsonl", 36, "batch", "file")
    other = client.files.create(file=Path(__file__), purpose="user_data")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == b'{"a": "\xc3\xa9"}\n' * 3
    assert client.files.content(other.id).content == Path(__file__).read_bytes()
    assert [each.id for each in client.files.list()][:2] == [other.id, made.id]
    assert [each.id for each in client.files.list(limit=1)][:2] == [other.id, made.id], "page by page"
    assert {each.id for each in client.files.list(purpose="user_data")} == {other.id}
    for each in (made, other):
        assert client.files.delete(each.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(made.id)


def test_a_batch(server: Any) -> None:
    client = server.openai
    data = lines({"messages": QUESTION, "temperature": 0}, {"messages": []}, {"messages": QUESTION, "n": 2}) + b"{no\n"
    batch = ended(client, asked(client, data, metadata={"for": "test"}))
    assert batch.status == "completed" and batch.metadata == {"for": "test"} and batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
    good, bad = rows_of(client, batch.output_file_id), rows_of(client, batch.error_file_id)
    assert set(good) == {"a", "c"} and set(bad) == {"b", None}
    body = good["a"]["response"]["body"]
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=12)
    assert body["choices"][0]["message"]["content"] == whole.choices[0].message.content
    assert len(good["c"]["response"]["body"]["choices"]) == 2 and good["a"]["error"] is None
    assert bad["b"]["response"]["status_code"] == 400 and bad[None]["error"]["code"] == "invalid_json_line"
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


def test_a_file_with_too_many_lines_fails(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.serve.batch.jobs.MOST_LINES", 3)
    batch = ended(server.openai, asked(server.openai, lines(*[{"messages": QUESTION}] * 4)))
    assert batch.status == "failed" and "more than 3 lines" in batch.errors.data[0].message


def test_mistakes(server: Any) -> None:
    client = server.openai
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.batches.create(input_file_id="file-x", endpoint=PATH, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint: expected one of"):
        client.batches.create(input_file_id="file-x", endpoint="/v1/moderations", completion_window="24h")
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            call("batch_x")
    assert server.http.post("/v1/files", json={}).status_code == 415
    for form in (
        {"data": {"purpose": "batch"}, "files": {"other": b"x"}}, {"files": {"file": b"x"}},
        {"data": {"purpose": ""}, "files": {"file": b"x"}}, {"data": {"purpose": "other"}, "files": {"file": b"x"}},
    ):  # fmt: skip
        assert server.http.post("/v1/files", **form).status_code == 400
    broken = {"content-type": "multipart/form-data"}
    assert server.http.post("/v1/files", content=b"--x", headers=broken).status_code == 400


def test_files_are_bounded(make: Callable[..., Any]) -> None:
    client = openai.OpenAI(base_url=f"{make(files_mb=0.001)}/v1", api_key="none", max_retries=0)
    client.files.create(file=("a", b"x" * 900), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="no room for the file") as found:
        client.files.create(file=("b", b"x" * 200), purpose="batch")
    assert found.value.status_code == 413
    small = openai.OpenAI(base_url=f"{make(files_mb=0.001)}/v1", api_key="none", max_retries=0)
    batch = ended(small, asked(small, lines({"messages": QUESTION}, {"messages": QUESTION}, {"messages": QUESTION})))
    assert batch.status == "failed" and batch.errors.data[0].code == "storage_full", "answers count, too"


def test_a_key_sees_its_own(make: Callable[..., Any]) -> None:
    url = make(api_key=KEYS)
    mine, other = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in KEYS)
    batch = ended(mine, asked(mine, lines({"messages": QUESTION})))
    assert batch.request_counts.completed == 1, "its requests have the key of the client"
    assert not list(other.files.list()) and not list(other.batches.list())
    for call, name in ((other.files.content, batch.output_file_id), (other.batches.retrieve, batch.id)):
        with pytest.raises(openai.NotFoundError):
            call(name)
    assert httpx.get(f"{url}/v1/files").status_code == 401


def test_it_can_be_cancelled(make: Callable[..., Any], server: Any) -> None:
    client = openai.OpenAI(base_url=f"{make()}/v1", api_key="none", max_retries=0)
    endless = {"messages": QUESTION, "max_tokens": 900, "ignore_eos": True, "temperature": 1}
    first = asked(client, lines({"messages": QUESTION}, *[endless] * 24))
    second = asked(client, lines({"messages": QUESTION}))
    assert client.batches.cancel(second.id).status == "cancelled", "it has not begun"
    assert client.batches.cancel(first.id).status in ("cancelling", "cancelled")
    found = ended(client, first)
    assert found.status == "cancelled" and found.cancelled_at
    with pytest.raises(openai.ConflictError, match="the batch is cancelled"):
        client.batches.cancel(first.id)


def test_requests_of_clients_go_first(server: Any) -> None:
    asked = server.model.asked(server.model.tokenizer.encode("Hi"), 1)

    def priority(background: bool) -> int:
        record.begin(RequestRecord("id", "POST", PATH, background=background))
        (found,) = server.model._requests(asked)
        return int(found.priority)

    assert priority(False) == 0 > -(2**32) > priority(True)


def test_a_full_queue_is_no_answer(tmp_path: Path) -> None:
    """Requests for which the server has no place are sent again."""
    import asyncio

    from rlx.serve.batch import jobs
    from rlx.serve.batch.jobs import FileStore

    store, answers = FileStore(10**6), [(429, {}), (503, {}), (200, {"choices": []})]
    source = store.add("", "in.jsonl", "batch", lines({"messages": QUESTION}))
    sent: list[Any] = []

    async def call(path: str, body: Any, headers: Any, /) -> tuple[int, Any]:
        sent.append((path, dict(headers)))
        return answers.pop(0)

    async def run() -> Batch:
        found = BatchJobs(store, call, lambda: 2)
        batch = found.start(Batch("", PATH, source, (("authorization", "Bearer k"),)))
        while batch.status not in ENDED:
            await asyncio.sleep(0.01)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "AGAIN_SECONDS", 0)
        batch = asyncio.run(run())
    assert batch.status == "completed" and len(sent) == 3 and sent[0][1]["authorization"] == "Bearer k"
    store.close()
    assert not source.path.exists(), "nothing is left"
