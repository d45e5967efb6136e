"""Metrics, log, slots, properties and traces of a server."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers

import rlx
from rlx import demo
from rlx.runners import RequestStats
from rlx.serve import ServedModel, create_app
from rlx.serve.options import ServerOptions
from rlx.serve.record import Answered, Log, RequestRecord
from rlx.serve.status import SHARED
from rlx.text import chat
from rlx.text.confined import Confined

CHAT = "/v1/chat/completions"
SHORT = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 7, "ignore_eos": True}


@pytest.fixture
def logged(server: Any, serve: Any, tmp_path: Path) -> Iterator[tuple[httpx.Client, Path]]:
    log = tmp_path / "log.jsonl"
    options = ServerOptions(log=log, log_prompts=True, vllm_metrics=True, llama_metrics=True, slots_endpoint=False)
    with serve(create_app(server.model, options)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, log


def values(text: str) -> dict[str, float]:
    """Name of a sample, with the labels besides the model -> its value, as Prometheus' own parser reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name + "".join(f",{name}={value}" for name, value in sorted(labels.items()))] = sample.value
    return found


def test_metrics_count_what_was_asked(logged: tuple[httpx.Client, Path]) -> None:
    client, _ = logged
    usage = [client.post(CHAT, json=SHORT).json()["usage"] for _ in range(3)]
    assert client.post(CHAT, json={**SHORT, "max_tokens": "many"}).status_code == 400
    found = values(client.get("/metrics").text)
    assert found["rlx:prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usage)
    assert found["rlx:generation_tokens_total"] == sum(each["completion_tokens"] for each in usage) == 21
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    assert found["rlx:prompt_tokens_cached_total"] == cached > 0
    assert found["rlx:request_success_total,finished_reason=length"] == 3
    assert found[f"rlx:http_requests_total,method=POST,path={CHAT},status=200"] == 3
    assert found[f"rlx:http_requests_total,method=POST,path={CHAT},status=400"] == 1
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"rlx:{name}_seconds_count"] == 3
        assert found[f"rlx:{name}_seconds_bucket,le=+Inf"] == 3
    assert found["rlx:time_to_first_token_seconds_sum"] <= found["rlx:e2e_request_latency_seconds_sum"]
    assert found["rlx:inter_token_latency_seconds_count"] >= 3 * 6
    assert found["rlx:num_requests_running"] == found["rlx:num_requests_waiting"] == 0
    assert not sys.platform.startswith("linux") or found["process_resident_memory_bytes"] > 1 << 20
    assert "rlx:inter_token_latency_seconds_bucket,le=0.0005" in found
    for name in SHARED:
        ours = {key.removeprefix("rlx:") for key in found if re.match(rf"rlx:{name}(_|,|$)", key)}
        theirs = {key.removeprefix("vllm:") for key in found if re.match(rf"vllm:{name}(_|,|$)", key)}
        assert ours == theirs, name
    assert found["llamacpp:prompt_tokens_total"] == found["rlx:prompt_tokens_total"] - cached
    assert found["llamacpp:prompt_tokens_cached_total"] == cached
    assert found["llamacpp:tokens_predicted_total"] == 21 and found["llamacpp:requests_processing"] == 0
    assert found["llamacpp:predicted_tokens_seconds"] == pytest.approx(
        21 / found["llamacpp:tokens_predicted_seconds_total"]
    )
    assert found["llamacpp:n_decode_total"] > 0 and found["llamacpp:n_busy_slots_per_decode"] > 0


def test_a_limit_that_no_metric_can_count_is_that_of_the_context(logged: tuple[httpx.Client, Path]) -> None:
    client, _ = logged
    answer = client.post(CHAT, json={"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 10**400})
    assert answer.status_code == 200
    assert 0 < values(client.get("/metrics").text)["rlx:request_params_max_tokens_sum"] < 1e6


def test_the_log_has_a_line_a_request(logged: tuple[httpx.Client, Path]) -> None:
    client, log = logged
    usage = client.post(CHAT, json=SHORT, headers={"X-Request-Id": "one"}).json()["usage"]
    client.post(CHAT, json={**SHORT, "max_tokens": "many"}, headers={"X-Request-Id": "two"})
    client.get("/health")
    for _ in range(200):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        if len(lines) == 2:
            break
        client.get("/health")
    one, two = lines
    assert (one["id"], one["status"], one["path"], one["model"]) == ("one", 200, CHAT, "demo")
    assert one["prompt_tokens"] == usage["prompt_tokens"] and one["completion_tokens"] == 7
    assert one["finish"] == ["length"] and one["first_token_ms"] <= one["ms"]
    assert "Tell me a story" in one["prompts"][0] and len(one["answers"]) == 1
    assert (two["id"], two["status"]) == ("two", 400) and "max_tokens" in two["error"]


def test_the_log_has_no_prompts_unless_asked(server: Any, serve: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with serve(create_app(server.model, ServerOptions(log=log))) as url:
        assert httpx.post(f"{url}{CHAT}", json=SHORT, timeout=60).status_code == 200
    assert "story" not in log.read_text() and log.read_text().count("\n") == 1


@pytest.mark.system("full")
def test_lines_that_a_full_disk_does_not_take_are_counted(server: Any, serve: Any) -> None:
    with serve(create_app(server.model, ServerOptions(log="/dev/full"))) as url:
        assert httpx.post(f"{url}{CHAT}", json=SHORT, timeout=60).status_code == 200
        for _ in range(200):  # a thread writes them
            found = values(httpx.get(f"{url}/metrics").text)["rlx:log_lines_dropped_total"]
            if found:
                break
    assert found == 1


@pytest.mark.system("full")
def test_a_log_moves_on_from_a_full_disk(tmp_path: Path) -> None:
    target = tmp_path / "log.jsonl"
    target.symlink_to("/dev/full")
    log = Log(target)
    log.write({"line": 1})
    while not log.dropped:
        time.sleep(0.001)
    target.unlink()
    log.reopen()
    log.write({"line": 2})
    log.close()
    assert json.loads(target.read_text())["line"] == 2 and log.dropped == 1
    full = Log("/dev/full")
    full.write({"line": 3})
    full.close()


def test_slots_say_what_is_computed_without_texts(server: Any, logged: tuple[httpx.Client, Path]) -> None:
    ids = server.model.tokenizer.encode("Tell me a story")
    with server.model.runner.submit(rlx.Request(ids, 900, stop_at_eog=False)) as handle:
        handle.step(0)  # the engine computes some tokens more, and waits
        found = server.http.get("/slots")
    every = found.json()
    assert [each["id"] for each in every] == list(range(server.model.slots))
    assert sum(each["is_processing"] for each in every) == 1 and every[0]["is_processing"]
    assert every[0]["next_token"]["n_decoded"] + every[0]["next_token"]["n_remain"] == 900
    assert every[0]["n_prompt_tokens"] == every[0]["n_prompt_tokens_processed"] and "story" not in found.text
    for value, status in (("1", 200), ("false", 200), ("x", 400)):
        assert server.http.get("/slots", params={"fail_on_no_slot": value}).status_code == status
    off = logged[0].get("/slots")
    assert off.status_code == 501 and off.json()["error"]["type"] == "not_supported_error"


def test_a_request_becomes_a_span_of_the_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    module = pytest.importorskip("rlx.serve.telemetry")
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(module, "OTLPSpanExporter", lambda endpoint: exporter)
    telemetry = module.Telemetry("http://localhost:4318")
    found = RequestRecord("id-1", "POST", CHAT, status=200, model="demo")
    found.answered = [Answered([RequestStats(9, 4, 7, 0.1, 0.2, 0.3)], ["stop"], 0.05, 7)]
    trace = "0af7651916cd43dd8448eb211c80319c"
    telemetry.span(found, Headers({"traceparent": f"00-{trace}-b7ad6b7169203331-01"}))
    telemetry.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat demo" and f"{span.context.trace_id:032x}" == trace
    assert span.attributes["gen_ai.usage.input_tokens"] == 9 and span.attributes["gen_ai.usage.output_tokens"] == 7
    assert span.attributes["gen_ai.server.time_to_first_token"] == pytest.approx(0.35)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_the_process_of_chat_templates_runs_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a tenth of a second to start, and every request asks it: the template says what ends a turn."""
    renderer = Confined("dialect.py", memory=chat._MEMORY)
    monkeypatch.setattr(chat, "_RENDERER", renderer)
    with rlx.auto_runner(demo.path()) as runner:
        create_app(ServedModel(runner, "demo"))
        process = renderer._process
        assert process is not None and not process.has_ended()
        runner.generate([1], 1)
        assert renderer._process is process


def test_a_server_that_is_ready_keeps_what_is_there_out_of_garbage_collections(serve: Any) -> None:
    """All answers would wait for each of them: 0.1 to 0.3 s with a vocabulary of 150,000 tokens."""
    gc.unfreeze()
    with rlx.auto_runner(demo.path()) as runner, serve(create_app(ServedModel(runner, "m"))):
        end = time.monotonic() + 60
        while not gc.get_freeze_count():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert gc.get_freeze_count() > 1000
    assert not gc.get_freeze_count(), "what comes after the server collects as before"
