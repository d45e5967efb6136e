"""The state of a server and of its models: health, properties, slots, versions, `/v1/models`; metrics for Prometheus.

Server stage, beside the APIs. The fields follow OpenAI, llama-server and vLLM, whose clients and probes ask for them.
Requests are counted when they end; what the engine knows is read when somebody asks for the metrics, so a token costs
nothing here. Names and labels of metrics follow vLLM's, with the prefix `rlx:`; options repeat them as `vllm:`, and
under the names of llama-server, for dashboards and scripts that read those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

import rlx
from rlx.engine.loop.executor import GAP_BOUNDS
from rlx.errors import BusyError, RlxError
from rlx.serve.errors import ApiError, openai_body
from rlx.serve.http import json_response, new_router
from rlx.serve.model import ServedModel
from rlx.serve.ollama import created_at, tag
from rlx.serve.openai.completions import sampling_settings
from rlx.serve.record import Answered, RequestRecord

if TYPE_CHECKING:
    from rlx.engine.loop.record import ActiveRequest
    from rlx.serve.server import Server


LLAMA = "llamacpp:"

Value = Callable[[Mapping[str, float]], float]


def _per(count: float, other: float) -> float:
    return count / other if other else 0.0


def _computed(totals: Mapping[str, float]) -> float:
    return totals["prompt_tokens_total"] - totals["prompt_tokens_cached_total"]


#: Name -> meaning, and the value from the totals of the server's own metrics: a function of them, or their name.
_COUNTERS: dict[str, tuple[str, Value | str]] = {
    "prompt_tokens": ("Tokens of prompts that were computed", _computed),
    "prompt_tokens_cached": ("Tokens of prompts that the cache knew", "prompt_tokens_cached_total"),
    "prompt_seconds": ("Time of prompts", "request_prefill_time_seconds_sum"),
    "tokens_predicted": ("Tokens of answers", "generation_tokens_total"),
    "tokens_predicted_seconds": ("Time of answers", "request_decode_time_seconds_sum"),
    "n_decode": ("Calls of the engine", "engine_steps_total"),
    "spec_decode_num_drafts": ("Steps with drafts", "spec_decode_num_drafts_total"),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted", "spec_decode_num_draft_tokens_total"),
    "spec_decode_num_accepted_tokens": ("Drafts that were right", "spec_decode_num_accepted_tokens_total"),
}
_GAUGES: dict[str, tuple[str, Value | str]] = {
    "prompt_tokens_seconds": (
        "Tokens of prompts a second",
        lambda totals: _per(_computed(totals), totals["request_prefill_time_seconds_sum"]),
    ),
    "predicted_tokens_seconds": (
        "Tokens of answers a second",
        lambda totals: _per(totals["generation_tokens_total"], totals["request_decode_time_seconds_sum"]),
    ),
    "requests_processing": ("Choices that are computed", "num_requests_running"),
    "requests_deferred": ("Choices that wait for a slot", "num_requests_waiting"),
    "n_busy_slots_per_decode": (
        "Tokens of a call of the engine",
        lambda totals: _per(totals["engine_tokens_total"], totals["engine_steps_total"]),
    ),
}


def llama_metrics(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """The metrics of llama-server.

    Args:
        metrics: those of the server.
    """
    totals = defaultdict[str, float](float)
    for metric in metrics:
        for each in metric.samples:
            totals[each.name.removeprefix(PREFIX)] += each.value
    for family, rows in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, (text, of) in rows.items():
            yield family(LLAMA + name, text, value=totals[of] if isinstance(of, str) else of(totals))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Upper ends in seconds, from half a millisecond (a small model) to minutes (a long prompt).
SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
)  # fmt: skip
TOKENS = tuple(2.0**power for power in range(18))
PREFIX, ALIAS = "rlx:", "vllm:"

#: The metrics that vLLM has under the same name.
SHARED = frozenset(
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits "
    "prompt_tokens prompt_tokens_cached generation_tokens num_preemptions request_success spec_decode_num_drafts "
    "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens time_to_first_token_seconds "
    "inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
    "request_inference_time_seconds request_prompt_tokens request_generation_tokens request_params_n "
    "request_params_max_tokens".split()
)


class Metrics:
    """The metrics of a server, in a registry of its own.

    The name of a model is a label of each metric.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, descriptors and CPU time, as every exporter has them
        self._histograms = {
            name: Histogram(PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts, those that the cache knew included")
        self._cached = self._counter("prompt_tokens_cached", "Tokens of prompts that the cache knew")
        self._tokens = self._counter("generation_tokens", "Tokens of answers that clients were given")
        self._ends = self._counter("request_success", "Choices that ended, by reason", "finished_reason")
        self._requests = self._counter("http_requests", "Requests over HTTP", "method", "path", "status")
        self._gone = self._counter("http_requests_gone", "Requests whose client went away before the end")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self._registry)

    def count(self, found: RequestRecord) -> None:
        """Counts a request that has ended."""
        model = found.model or self._server.default_name
        self._requests.labels(model, found.method, found.route, str(found.status)).inc()
        if found.gone:
            self._gone.labels(model).inc()
        if found.answered:
            self._observe(model, "e2e_request_latency_seconds", found.seconds)
        for each in found.answered:
            self._count_answer(model, each)

    def _count_answer(self, model: str, each: Answered) -> None:
        first = each.first
        self._prompt.labels(model).inc(first.prompt_tokens)
        self._cached.labels(model).inc(first.cached_tokens)
        self._tokens.labels(model).inc(each.tokens)
        for reason in each.reasons:
            self._ends.labels(model, reason).inc()
        self._observe(model, "request_params_n", len(each.stats))
        self._observe(model, "request_prompt_tokens", first.prompt_tokens)
        self._observe(model, "request_generation_tokens", each.tokens)
        self._observe(model, "request_preparation_seconds", each.prepared)
        self._observe(model, "request_queue_time_seconds", first.queued_s)
        if each.max_tokens is not None:
            self._observe(model, "request_params_max_tokens", each.max_tokens)
        if each.first_token is None:
            return
        decode = max(one.decode_s for one in each.stats)
        self._observe(model, "time_to_first_token_seconds", each.first_token)
        self._observe(model, "request_prefill_time_seconds", first.prompt_s)
        self._observe(model, "request_decode_time_seconds", decode)
        self._observe(model, "request_inference_time_seconds", first.prompt_s + decode)
        for one in each.stats:
            if one.tokens > 1:
                self._observe(model, "request_time_per_output_token_seconds", one.decode_s / (one.tokens - 1))

    def _observe(self, model: str, name: str, value: float) -> None:
        self._histograms[name].labels(model).observe(value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        registry: Any = self  # all that is asked of it is `collect`
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics, and those of other servers that the options ask for."""
        own, options = [*self._engines(), *self._registry.collect()], self._server.options
        yield from own
        if options.vllm_metrics:
            yield from (_renamed(metric) for metric in own if metric.name.removeprefix(PREFIX) in SHARED)
        if options.llama_metrics:
            yield from llama_metrics(own)

    def _engines(self) -> Iterable[Metric]:
        """The counters of the engines, each with a sample a model. Those of the server have the first one's name."""
        found = dict[str, Metric]()
        for metric in self._of_each():
            if (known := found.setdefault(metric.name, metric)) is not metric:
                known.samples += metric.samples
        return found.values()

    def _of_each(self) -> Iterator[Metric]:
        label, limiter = self._server.default_name, self._server.limiter
        inside, dropped = "Requests that came in and are not answered", "Lines that the file of the log did not take"
        yield _metric(_GAUGE, "num_requests_inside", inside, limiter.inside, label)
        yield _metric(_GAUGE, "queue_limit", "How many requests may wait beside them", limiter.queue, label)
        yield _metric(_COUNT, "request_rejections", "Requests that got 429", limiter.rejected, label)
        yield _metric(_COUNT, "log_lines_dropped", dropped, self._server.log.dropped, label)
        info = GaugeMetricFamily(f"{PREFIX}build_info", "Versions", labels=["model_name", "version"])
        info.add_metric([label, rlx.__version__], 1)
        yield info
        for model in self._server.without_adapters:
            with suppress(BusyError):  # closed meanwhile
                yield from _of_runner(model.runner.stats(), model.name)


_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between two tokens of a choice", SECONDS),
    "e2e_request_latency_seconds": ("From the arrival of a request to the end of its answer", SECONDS),
    "request_preparation_seconds": ("From the arrival of a request until the engine has it", SECONDS),
    "request_queue_time_seconds": ("From there to the begin of the prompt, images included", SECONDS),
    "request_prefill_time_seconds": ("From there to the first token", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last", SECONDS),
    "request_inference_time_seconds": ("From the begin of the prompt to the last token", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt", TOKENS),
    "request_generation_tokens": ("Tokens of all choices of a request", TOKENS),
    "request_params_n": ("Choices of a request", TOKENS),
    "request_params_max_tokens": ("The limit of tokens that a request gives", TOKENS),
}


def _used(stats: Mapping[str, Any]) -> float:
    return stats["kv_used_bytes"] / stats["kv_bytes"] if stats["kv_bytes"] else 0


_GAUGE, _COUNT = GaugeMetricFamily, CounterMetricFamily
_Row = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, str | Callable[[Mapping[str, Any]], float]]
#: Kind, name, meaning, and where the statistics of an engine have the value: a path, or a function of them.
_ENGINE: tuple[_Row, ...] = (
    (_GAUGE, "slots", "How many choices the engine computes at once", "requests.slots"),
    (_GAUGE, "num_requests_running", "Choices that are computed", "requests.running"),
    (_GAUGE, "num_requests_waiting", "Choices that wait for a slot", "requests.queue"),
    (_GAUGE, "kv_cache_usage_perc", "Used part of the cache, 0 to 1", _used),
    (_GAUGE, "kv_cache_bytes", "Bytes of the cache that are in use", "kv_used_bytes"),
    (_GAUGE, "kv_cache_limit_bytes", "Bytes that the cache may take", "kv_bytes"),
    (_GAUGE, "paused_bytes", "Bytes of paused choices", "paused_bytes"),
    (_COUNT, "prefix_cache_queries", "Tokens of prompts that were looked up in the cache", "prefix_tokens_asked"),
    (_COUNT, "prefix_cache_hits", "Tokens of prompts that the cache knew", "prefix_tokens_hit"),
    (_COUNT, "prefix_cache_evictions", "Prefixes that made room", "prefix_evictions"),
    (_COUNT, "num_preemptions", "Choices that were paused to make room", "requests.paused"),
    (_COUNT, "engine_steps", "Calls of the engine", "requests.steps"),
    (_COUNT, "engine_tokens", "Tokens that were chosen", "requests.tokens"),
    (_COUNT, "engine_prompt_tokens", "Prompt tokens that were computed", "requests.prompt_tokens"),
    (_COUNT, "spec_decode_num_drafts", "Steps with drafts", "speculation.steps"),
    (_COUNT, "spec_decode_num_draft_tokens", "Tokens that were drafted", "speculation.drafted"),
    (_COUNT, "spec_decode_num_accepted_tokens", "Drafts that were right", "speculation.accepted"),
)
# States of prompts on disk, where there are some (`cache_kv`).
_DISK: tuple[_Row, ...] = (
    (_GAUGE, "disk_cache_bytes", "Bytes of the files with states of prompts", "cache_kv_used_bytes"),
    (_GAUGE, "disk_cache_limit_bytes", "Bytes that these files may take", "cache_kv_bytes"),
    (_COUNT, "disk_cache_tokens_hit", "Tokens of prompts that were read from disk", "cache_kv_tokens_hit"),
    (_COUNT, "disk_cache_read_bytes", "Bytes that were read from these files", "cache_kv_read_bytes"),
    (_COUNT, "disk_cache_written_bytes", "Bytes that were written to these files", "cache_kv_written_bytes"),
    (_COUNT, "disk_cache_evictions", "Files that made room", "cache_kv_evictions"),
    (_COUNT, "disk_cache_damaged", "Files that were damaged", "cache_kv_damaged"),
)


def _of_runner(stats: Mapping[str, Any], label: str) -> Iterator[Metric]:
    """The counters of one engine."""
    is_encoder = "kv_bytes" not in stats  # it has no caches
    for family, name, text, where in (*_ENGINE, *(_DISK if "cache_kv_bytes" in stats else ())):
        if not is_encoder or name in ("engine_steps", "engine_prompt_tokens"):
            value = where(stats) if callable(where) else reduce(getitem, where.split("."), stats)
            yield _metric(family, name, text, value, label)
    if not is_encoder:
        yield _gaps(stats["requests"], label)


def _metric(family: Any, name: str, text: str, value: Any, label: str) -> Metric:
    found: Metric = family(PREFIX + name, text, labels=["model_name"])
    found.add_metric([label], value)  # type: ignore[attr-defined]
    return found


def _gaps(requests: Mapping[str, Any], label: str) -> Metric:
    """The times between two tokens of a choice, as the engine counted them."""
    found = HistogramMetricFamily(
        f"{PREFIX}inter_token_latency_seconds", "Time between two tokens of a choice", labels=["model_name"]
    )
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, GAP_BOUNDS), "+Inf"), requests["gap_counts"], strict=True):
        total += count
        buckets.append((bound, total))
    found.add_metric([label], buckets, requests["gap_seconds"])
    return found


def _renamed(metric: Metric) -> Metric:
    name = ALIAS + metric.name.removeprefix(PREFIX)
    found = Metric(name, metric.documentation, metric.type)
    found.samples = [
        Sample(ALIAS + each.name.removeprefix(PREFIX), {**each.labels, "engine": "0"}, each.value, each.timestamp)
        for each in metric.samples
    ]
    return found


PROBES = frozenset({"/health", "/v1/health", "/ping", "/metrics", "/slots", "/favicon.ico"})
"""Paths that are asked all the time: the log has them only where they fail."""


def router(server: Server) -> APIRouter:
    """`GET /health`, which a load balancer asks: 200 if new requests are computed."""
    found = new_router(tags=["status"])

    @found.get("/health")
    async def health() -> Response:
        """Whether requests are answered at once; 503 while the model loads or compiles, and while the server ends."""
        return _health(server)

    return found


def _health(server: Server) -> Response:
    """The answer to a probe. An error has its word in `status`, too."""
    problem = server.unready()
    if problem is None:
        return json_response({"status": "ok"})
    return json_response({"status": problem.code, **openai_body(problem)}, problem.status, problem.headers)


def unversioned(server: Server) -> APIRouter:
    """`/ping`, `/version`, `/props`, `/slots` and `/metrics`."""
    found = new_router(tags=["status"])

    @found.get("/ping")
    async def ping() -> Response:
        """As `/health`."""
        return _health(server)

    @found.get("/version")
    async def version() -> dict[str, str]:
        """The version of rlx."""
        return {"version": rlx.__version__}

    @found.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """The default model, or that of `?model=`, and how its requests are answered that give no options."""
        return properties(server.named(model))

    @found.get("/slots")
    async def slots(fail_on_no_slot: bool = False) -> list[dict[str, Any]]:
        """The work in each slot of each model, without texts. With `?fail_on_no_slot=1` 503 if none is free."""
        if not server.options.slots_endpoint:
            raise _off("/slots", "--no-slots-endpoint")
        every = slots_of([each for each in server.models if each.adapter is None])
        if fail_on_no_slot and all(each["is_processing"] for each in every):
            raise ApiError(503, "no slot is free", code="no_slot")
        return every

    @found.get("/metrics", response_class=Response)
    def metrics() -> Response:  # in a worker thread: it asks the engine
        """Counters and histograms in Prometheus' text format."""
        if not server.options.metrics:
            raise _off("/metrics", "--no-metrics")
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    return found


def _off(path: str, option: str) -> ApiError:
    return ApiError(501, f"{path} is switched off", code="not_supported", hint=f"start the server without {option}")


def properties(model: ServedModel) -> dict[str, Any]:
    """The body of `/props`."""
    runner, tokenizer = model.runner, model.tokenizer
    stats = runner.stats()
    return {
        "default_generation_settings": {"n_ctx": runner.max_seq, "params": _sampling(model)},
        "total_slots": model.slots,
        "model_alias": model.name,
        "model_aliases": list(model.aliases),
        "model_path": Path(model.file.path).name,  # its folder would tell clients about the machine
        "family": runner.family,
        "n_vocab": runner.vocab_size,
        "chat_template": tokenizer.chat_template or "",
        "bos_token": _token(model, tokenizer.bos_id),
        "eos_token": _token(model, tokenizer.eos_id),
        "modalities": {"vision": runner.supports_multimodal, "audio": False},
        "build_info": f"rlx {rlx.__version__}",
        "device": runner.device,
        "target": stats["target"],
        "threads": stats["threads"],
        "precision": stats["precision"],
        "kv_dtype": stats["kv_dtype"],
        "deterministic": stats["deterministic"],
    }


def _sampling(model: ServedModel) -> dict[str, Any]:
    """The sampling options of requests that give none, also under llama-server's names."""
    params = {**sampling_settings(model.default_sample), "n_predict": model.limit(None) or -1}
    source = "server" if model.options.sample else "default" if model.runner.recommended_sample is None else "model"
    return {**params, "source": source}


def _token(model: ServedModel, token: int | None) -> str:
    return "" if token is None else model.tokenizer.vocabulary.tokens[token]


def slots_of(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """The body of `/slots`: of each model the active requests in order of their arrival, then the free slots."""
    try:
        every = [slot for model in models for slot in _slots(model)]
    except RlxError as error:
        raise ApiError(503, str(error), code="unavailable") from error
    return [{"id": number, **slot} for number, slot in enumerate(every)]


def _slots(model: ServedModel) -> list[dict[str, Any]]:
    requests, own = model.runner.stats()["requests"], {"model": model.name, "n_ctx": model.runner.max_seq}
    free = [{"is_processing": False}] * (requests["slots"] - len(requests["active"]))
    return [{**own, **slot} for slot in (*map(_busy, requests["active"]), *free)]


def _busy(each: ActiveRequest) -> dict[str, Any]:
    """A slot that computes a request."""
    left = each.limit - each.tokens
    return {
        "is_processing": True,
        "id_task": each.number,
        "speculative": each.drafts,
        "n_prompt_tokens": each.prompt_tokens,
        "n_prompt_tokens_cache": each.cached_tokens,
        "n_prompt_tokens_processed": each.done_tokens,
        "is_paused": each.paused,
        "params": {"n_predict": each.limit},
        "next_token": {"has_next_token": left > 0, "n_remain": left, "n_decoded": each.tokens},
    }


def models_router(server: Server) -> APIRouter:
    """`GET /models` and `GET /models/NAME`."""
    found = new_router(tags=["models"])

    @cache
    def rows(models: tuple[ServedModel, ...]) -> dict[str, Any]:
        data, ends = [*map(described, models)], {"first_id": models[0].name, "last_id": models[-1].name}
        return {"object": "list", "data": data, "models": [*map(listed, models)], "has_more": False, **ends}

    @found.get("/models")
    async def models() -> dict[str, Any]:
        """The models that are served; `models` has them in the form of Ollama, as llama-server does."""
        return rows(server.models)

    @found.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return described(server.named(name))

    return found


def described(model: ServedModel) -> dict[str, Any]:
    """A model as the clients of OpenAI, Anthropic (from `type` on), vLLM (`max_model_len`) and llama-server (`meta`)
    expect it.
    """
    runner = model.runner
    config, (parameters, nbytes) = runner.config, model.sizes
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "rlx",
        "aliases": list(model.aliases),
        "root": model.name,
        "type": "model",
        "display_name": model.name,
        "created_at": created_at(model),
        "lifecycle": "active",
        "max_input_tokens": runner.max_seq,
        "max_model_len": runner.max_seq,
        "meta": {
            "family": runner.family,
            "n_vocab": runner.vocab_size,
            "n_ctx": runner.max_seq,
            "n_ctx_train": config.context,
            "n_embd": config.hidden,
            "n_params": parameters,
            "size": nbytes,
            "images": runner.supports_multimodal,
        },
    }


def listed(model: ServedModel) -> dict[str, Any]:
    """A model as Ollama's clients expect it, with what it can do in llama-server's words."""
    sees = ["multimodal"] if model.runner.supports_multimodal else []
    return {**tag(model, model.name), "type": "model", "capabilities": [*model.capabilities, *sees]}
