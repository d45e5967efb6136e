"""`rlx.serve.batch`: nothing is lost or done twice, whatever the input holds and wherever a run ends."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import BatchError
from rlx.serve.batch.results import Progress, Results, answer_all
from rlx.serve.batch.source import BatchRequest, LineProblem, Source
from rlx.serve.http import MAX_VALUES
from rlx.serve.prefixes import PIECE

CHAT = "/v1/chat/completions"


def a_line(custom_id: str, prompt: str = "Hi", **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": prompt}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **more})


def a_file(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Echo:
    """Answers with the prompt; the requests named in `never` are never answered."""

    def __init__(self, never: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.never, self.asked, self.now, self.most = never, [], 0, 0

    async def __call__(self, request: BatchRequest, request_id: str) -> tuple[int, Any]:
        self.asked.append(request.custom_id)
        self.now += request.answers
        self.most = max(self.most, self.now)
        await asyncio.sleep(3600 if request.custom_id in self.never else 0)
        self.now -= request.answers
        return 200, {"text": request.body, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def run(path: str, out: Path, echo: Echo, at_once: int = 4, salt: str = "demo") -> Progress:
    with Source.open(path, salt) as source, Results(str(out), source) as results:
        return asyncio.run(asyncio.wait_for(answer_all(source, results, echo, at_once), 30))


def test_every_line_gets_a_line(tmp_path: Path) -> None:
    lines = [
        a_line("a"), "{nonsense", "", a_line("b"), a_line("a", "again"), "[1]", a_line("c", method="GET"),
        a_line("d", url="/v1/files"), a_line("e", body={"stream": True}), a_line("f", body=3), a_line("g", extra=1),
        json.dumps({"method": "POST"}), "[" * 100_000, a_line("h"),
    ]  # fmt: skip
    out = tmp_path / "out.jsonl"
    progress = run(a_file(tmp_path, *lines), out, Echo())
    found = read(out)
    assert len(found) == progress.done == progress.total == 13, "one a line; the empty one does not count"
    answered = {row["custom_id"]: row for row in found if row["error"] is None}
    assert set(answered) == {"a", "b", "h"}
    assert answered["a"]["response"]["status_code"] == 200
    assert answered["a"]["response"]["body"]["text"]["messages"][0]["content"] == "Hi", "the first of two is answered"
    errors = sorted((row["error"]["code"], row["custom_id"] or "") for row in found if row["error"])
    assert errors == [
        ("duplicate_custom_id", "a"), ("invalid_json_line", ""), ("invalid_json_line", ""), ("invalid_json_line", ""),
        ("invalid_method", "c"), ("invalid_request", "e"), ("invalid_url", "d"), ("missing_required_parameter", ""),
        ("missing_required_parameter", "f"), ("unknown_parameter", "g"),
    ]  # fmt: skip
    assert progress.failed == len(errors)
    assert (progress.prompt_tokens, progress.tokens) == (9, 6)
    assert len({row["id"] for row in found}) == len(found)


@given(st.data())
def test_wherever_a_run_ends_the_next_one_goes_on(data: st.DataObject) -> None:
    """The output is cut at any byte, as after a crash: whole lines stay, half a line is cut and done again."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        names = [f"n{i}" for i in range(6)]
        path, out = a_file(Path(folder), *map(a_line, names)), Path(folder) / "out.jsonl"
        run(path, out, Echo())
        whole = out.read_bytes()
        kept = whole[: data.draw(st.integers(0, len(whole)))]
        out.write_bytes(kept)
        echo = Echo()
        progress = run(path, out, echo)
        before = kept.count(b"\n")
        assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
        assert sorted(row["custom_id"] for row in read(out)) == names
        assert len(echo.asked) == 6 - before and progress.before == before


def test_a_line_takes_as_many_places_as_it_has_answers(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"n": 3}, {}, {"n": 2}, {"prompt": ["a", [1, 2]], "n": 2}, {}, {"prompt": [1, 2]}]
    bodies += [{"best_of": 4}, {"n": "two"}]
    lines = [a_line(str(i), body={"messages": [], **body}) for i, body in enumerate(bodies)]
    assert [BatchRequest.parse(each.encode()).answers for each in lines] == [3, 1, 2, 4, 1, 1, 4, 1]
    path, echo = a_file(tmp_path, *lines, a_line("all", body={"n": 9})), Echo()
    assert run(path, tmp_path / "out.jsonl", echo, at_once=4).done == 9
    assert echo.most == 9, "one with more answers than there are places is alone"
    small = Echo()
    assert run(a_file(tmp_path, *lines), tmp_path / "small.jsonl", small, at_once=4).done == 8
    assert small.most == 4


def test_a_cancelled_run_keeps_what_it_has(tmp_path: Path) -> None:
    path, out = a_file(tmp_path, *(a_line(f"n{i}") for i in range(20))), tmp_path / "out.jsonl"

    async def interrupted() -> None:
        with Source.open(path, "demo") as source, Results(str(out), source) as results:
            seen = asyncio.Event()
            echo = Echo({"n18", "n19"})
            work = answer_all(source, results, echo, 3, lambda p: seen.set() if p.done == 18 else None)
            task = asyncio.create_task(work)
            await asyncio.wait_for(seen.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert echo.most <= 3

    asyncio.run(interrupted())
    assert len(read(out)) == 18
    echo = Echo()
    run(path, out, echo)
    assert sorted(echo.asked) == ["n18", "n19"] and len(read(out)) == 20


@pytest.mark.parametrize("content", ["something else", "something else\n", '{"id": "batch_req_1_0000000000000000"}\n'])
def test_an_output_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(BatchError, match=r"line 1 is no answer to a request of .*Name another file"):
        run(a_file(tmp_path, a_line("a")), out, Echo())
    assert out.read_text() == content


def test_an_output_of_another_model_or_input_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(a_file(tmp_path, a_line("a")), out, Echo())
    with pytest.raises(BatchError, match="no answer"):
        run(a_file(tmp_path, a_line("a")), out, Echo(), salt="another")
    with pytest.raises(BatchError, match="no answer"):
        run(a_file(tmp_path, a_line("b")), out, Echo())
    progress = run(a_file(tmp_path, a_line("a"), a_line("b")), out, Echo())
    assert (progress.before, progress.done) == (1, 2), "lines may be added to an input"


@pytest.mark.system("locks")
def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with (
        Source.open(a_file(tmp_path, a_line("a")), "demo") as source,
        Results(str(tmp_path / "out"), source),
        pytest.raises(BatchError, match="another process writes"),
    ):
        Results(str(tmp_path / "out"), source)


@pytest.mark.parametrize("part", [b"[],", b"{},", "\u0122,[],".encode("utf-16-le")])
def test_the_values_of_a_line_are_bounded(part: bytes) -> None:
    """As those of a body: what a line becomes in memory is known before it is parsed."""
    source = Source(io.BytesIO(b'{"body": [' + part * (MAX_VALUES + 1)), "demo")
    with pytest.raises(LineProblem, match=r"more than|no JSON"):
        source.request(0)


def test_an_input_has_a_limit_of_lines() -> None:
    line = a_line("a").encode() + b"\n"
    assert len(Source(io.BytesIO(line * 3), "demo", most=3)) == 3
    for content in (line * 4, b"\n" * 10_000, b"{}\n" * 10_000):
        with pytest.raises(BatchError, match="more than 3 lines"):
            Source(io.BytesIO(content), "demo", most=3)


def test_a_line_that_is_too_long_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.serve.batch.source.MAX_LINE", 400)
    source = Source(io.BytesIO(f"{a_line('a')}\n{a_line('b', 'x' * 5000)}\n{a_line('c')}\n".encode()), "demo")
    assert len(source) == 3 and source.request(2).custom_id == "c"
    with pytest.raises(Exception, match="more than"):
        source.request(1)


def test_requests_with_a_common_prefix_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across windows, too: groups in the order of their first lines, and sorted by the whole prompt inside."""
    monkeypatch.setattr("rlx.serve.batch.source.WINDOW", 3)
    system = {name: f"You are {name}. " * PIECE for name in "AB"}
    prompts = [system["B"] + "2", system["A"] + "1", "short", system["B"] + "1", system["A"] + "0", system["B"] + "3"]
    lines = [a_line(f"{i}", prompt) for i, prompt in enumerate(prompts)]
    source = Source(io.BytesIO("\n".join(lines).encode()), "demo")
    order = list(source.ordered(bytearray(6)))
    assert order == [3, 0, 5, 1, 2, 4] or order == [3, 0, 5, 4, 1, 2]
    assert list(source.ordered(bytearray([1, 0, 1, 0, 1, 1]))) == [3, 1]
