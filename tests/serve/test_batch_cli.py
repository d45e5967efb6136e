"""`rlx batch` as a process: killed in the middle it loses nothing, and answers as the server does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlx.cli.main import cli

COUNT = 14
LOOKS, TIMEOUT = 60_000, 900  # against a hang only: on a busy machine a start takes minutes


def requests(count: int = COUNT, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"What is {i} + {2 * i}?"}],
                "max_tokens": 60, "temperature": 0, **more,
            },
        }
        for i in range(count)
    ]  # fmt: skip


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


def started(source: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlx", "batch", str(source), str(out), "demo", "--slots", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended_after(process: subprocess.Popen[str], out: Path, lines: int, number: int) -> None:
    """Sends a signal when there are so many answers."""
    for _ in range(LOOKS):
        if out.exists() and out.read_bytes().count(b"\n") >= lines:
            os.kill(process.pid, number)
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    raise AssertionError(process.communicate())


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", requests()), tmp_path / "out.jsonl"
    process = started(source, out)
    ended_after(process, out, 3, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    before = out.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < COUNT

    process = started(source, out)
    ended_after(process, out, whole.count(b"\n") + 2, signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, said
    assert "Interrupted. To go on: rlx batch" in said and "were answered before" in said and "Traceback" not in said
    assert out.read_bytes().startswith(whole)

    again = tmp_path / "again.jsonl"
    for target in (out, again):
        done = CliRunner().invoke(cli, ["batch", str(source), str(target), "demo"])
        assert done.exit_code == 0, done.output
    assert sorted(row["custom_id"] for row in read(out)) == sorted(f"q{i}" for i in range(COUNT))
    assert texts(read(again)) == texts(read(out)), "the answers are those of a run that nobody interrupted"


def test_it_answers_as_the_server_does(tmp_path: Path, server: Any) -> None:
    rows = requests(3, model="gpt-4o")
    rows.append({"custom_id": "unknown", "method": "POST", "url": "/v1/chat/completions", "body": {"unknown": 1}})
    rows += [{"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}]
    source, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    done = CliRunner().invoke(cli, ["batch", str(source), str(out), "demo", "--deterministic"])
    assert done.exit_code == 0, done.output
    assert "answered 5 of 5 requests" in done.stderr and "2 with an error" in done.stderr
    found = {row["custom_id"]: row["response"] for row in read(out)}
    for row in rows:
        over_http = server.post(row["url"], **row["body"])
        mine = found[row["custom_id"]]
        assert mine["status_code"] == over_http.status_code
        expected, body = over_http.json(), mine["body"]
        for part in (expected, body):
            for varies in ("id", "created", "timings"):
                part.pop(varies, None)
            part.get("usage", {}).pop("prompt_tokens_details", None)  # what the cache had is another thing
        assert body == expected
    again = CliRunner().invoke(cli, ["batch", str(source), str(out), "demo"])
    assert again.exit_code == 0 and "all 5 requests were answered before" in again.stderr


def test_mistakes_are_told_before_a_model_is_opened(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", requests(1))
    for words, text in [
        ([str(source), str(source)], "the same file"),
        ([str(tmp_path / "none"), str(tmp_path / "out")], "cannot be read"),
        ([str(source), str(tmp_path / "no" / "out")], "cannot be written"),
        ([str(source), str(tmp_path)], "cannot be written"),
    ]:
        done = CliRunner().invoke(cli, ["batch", *words, "missing.gguf"])
        assert done.exit_code == 2 and text in done.stderr, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_opens_is_not_held_back(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after: list[str] = []

    def opening(*_: Any) -> None:
        signal.raise_signal(number)
        after.append("opened all the same")

    monkeypatch.setattr("rlx.cli.batch.open_runner", opening)
    source, out = written(tmp_path / "in.jsonl", requests(1)), tmp_path / "out.jsonl"
    done = CliRunner().invoke(cli, ["batch", str(source), str(out), "demo"])
    assert (done.exit_code, after) == (130, []) and "Interrupted. To go on" in done.stderr
