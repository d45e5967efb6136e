"""Counters for Prometheus: what the server has done, and how long its requests took.

Server stage. Requests are counted when they end; what the engine knows is read when somebody asks for the metrics, so
a token costs nothing here. Names and labels follow vLLM's, with the prefix `rlx:`; options repeat them as `vllm:`, and
under the names of llama-server, for dashboards and scripts that read those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

import rlx
from rlx.engine.request.record import GAP_BOUNDS
from rlx.errors import BusyError
from rlx.serve.admission import ConcurrencyLimiter
from rlx.serve.record import Answered, RequestRecord
from rlx.serve.registry import Registry

LLAMA = "llamacpp:"

Totals = Mapping[str, float]
Value = Callable[[Totals], float]


def _ratio(above: str, below: str) -> Value:
    return lambda totals: totals.get(above, 0.0) / below_ if (below_ := totals.get(below, 0.0)) else 0.0


def _of(name: str) -> Value:
    return lambda totals: totals.get(name, 0.0)


def _computed(totals: Totals) -> float:
    return totals.get("prompt_tokens_total", 0.0) - totals.get("prompt_tokens_cached_total", 0.0)


def _prompt_rate(totals: Totals) -> float:
    seconds = totals.get("request_prefill_time_seconds_sum", 0.0)
    return _computed(totals) / seconds if seconds else 0.0


#: Name -> meaning, and the value from the totals of the server's own metrics.
_COUNTERS: dict[str, tuple[str, Value]] = {
    "prompt_tokens": ("Tokens of prompts that were computed", _computed),
    "prompt_tokens_cached": ("Tokens of prompts that the cache knew", _of("prompt_tokens_cached_total")),
    "prompt_seconds": ("Time of prompts", _of("request_prefill_time_seconds_sum")),
    "tokens_predicted": ("Tokens of answers", _of("generation_tokens_total")),
    "tokens_predicted_seconds": ("Time of answers", _of("request_decode_time_seconds_sum")),
    "n_decode": ("Calls of the engine", _of("engine_steps_total")),
    "spec_decode_num_drafts": ("Steps with drafts", _of("spec_decode_num_drafts_total")),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted", _of("spec_decode_num_draft_tokens_total")),
    "spec_decode_num_accepted_tokens": ("Drafts that were right", _of("spec_decode_num_accepted_tokens_total")),
}
_GAUGES: dict[str, tuple[str, Value]] = {
    "prompt_tokens_seconds": ("Tokens of prompts a second", _prompt_rate),
    "predicted_tokens_seconds": (
        "Tokens of answers a second",
        _ratio("generation_tokens_total", "request_decode_time_seconds_sum"),
    ),
    "requests_processing": ("Choices that are computed", _of("num_requests_running")),
    "requests_deferred": ("Choices that wait for a slot", _of("num_requests_waiting")),
    "n_busy_slots_per_decode": ("Tokens of a call of the engine", _ratio("engine_tokens_total", "engine_steps_total")),
}


def llama_metrics(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """The metrics of llama-server.

    Args:
        metrics: those of the server.
    """
    totals: dict[str, float] = {}
    for metric in metrics:
        for each in metric.samples:
            name = each.name.removeprefix(PREFIX)
            totals[name] = totals.get(name, 0.0) + each.value
    for name, (text, value) in _COUNTERS.items():
        yield CounterMetricFamily(LLAMA + name, text, value=value(totals))
    for name, (text, value) in _GAUGES.items():
        yield GaugeMetricFamily(LLAMA + name, text, value=value(totals))


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

    Args:
        models: of the server; the name of one is a label of each metric.
        limiter: counts requests inside, and those that were refused.
        aliases: whether the metrics are also there under vLLM's names.
        llama: whether they are there under llama-server's names.
    """

    def __init__(
        self, models: Registry, limiter: ConcurrencyLimiter, *, aliases: bool = False, llama: bool = False
    ) -> None:
        self._models, self._aliases, self._llama = models, aliases, llama
        self._registry = CollectorRegistry()
        self._registry.register(_Engines(models, limiter))
        ProcessCollector(registry=self._registry)  # memory, descriptors and CPU time, as every exporter has them
        self._histograms = {name: self._histogram(name, text, of) for name, (text, of) in _HISTOGRAMS.items()}
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts, those that the cache knew included")
        self._cached = self._counter("prompt_tokens_cached", "Tokens of prompts that the cache knew")
        self._tokens = self._counter("generation_tokens", "Tokens of answers that clients were given")
        self._ends = self._counter("request_success", "Choices that ended, by reason", "finished_reason")
        self._requests = self._counter("http_requests", "Requests over HTTP", "method", "path", "status")
        self._gone = self._counter("http_requests_gone", "Requests whose client went away before the end")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self._registry)

    def count(self, found: RequestRecord) -> None:
        """Counts a request that has ended."""
        model = found.model or self._models.default_name
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
        registry: Any = _WithAliases(self._registry, vllm=self._aliases, llama=self._llama)
        return generate_latest(registry)


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


class _Engines(Collector):
    """The statistics of the engines of all models, when somebody asks."""

    def __init__(self, models: Registry, limiter: ConcurrencyLimiter) -> None:
        self._models, self._gate = models, limiter

    def collect(self) -> Iterator[Metric]:
        """The metrics, each with a sample for every model. Those of the whole server have the default model's name."""
        found = dict[str, Metric]()
        for metric in self._of_each():
            if (known := found.setdefault(metric.name, metric)) is not metric:
                known.samples += metric.samples
        yield from found.values()

    def _of_each(self) -> Iterator[Metric]:
        label = [self._models.default_name]
        yield self._gauge("num_requests_inside", "Requests that came in and are not answered", self._gate.inside, label)
        yield self._gauge("queue_limit", "How many requests may wait beside them", self._gate.queue, label)
        yield self._count("request_rejections", "Requests that got 429", self._gate.rejected, label)
        info = GaugeMetricFamily(f"{PREFIX}build_info", "Versions", labels=["model_name", "version"])
        info.add_metric([*label, rlx.__version__], 1)
        yield info
        for model in self._models.models:
            with suppress(BusyError):  # closed meanwhile
                yield from self._of_runner(model.runner.stats(), [model.name])

    def _of_runner(self, stats: Mapping[str, Any], label: list[str]) -> Iterator[Metric]:
        requests, drafts = stats["requests"], stats["speculation"]
        used, total = stats["kv_used_bytes"], stats["kv_bytes"]
        yield self._gauge("slots", "How many choices the engine computes at once", requests["slots"], label)
        yield self._gauge("num_requests_running", "Choices that are computed", requests["running"], label)
        yield self._gauge("num_requests_waiting", "Choices that wait for a slot", requests["queue"], label)
        yield self._gauge("kv_cache_usage_perc", "Used part of the cache, 0 to 1", used / total if total else 0, label)
        yield self._gauge("kv_cache_bytes", "Bytes of the cache that are in use", used, label)
        yield self._gauge("kv_cache_limit_bytes", "Bytes that the cache may take", total, label)
        yield self._gauge("paused_bytes", "Bytes of paused choices", stats["paused_bytes"], label)
        asked, hit = stats["prefix_tokens_asked"], stats["prefix_tokens_hit"]
        yield self._count("prefix_cache_queries", "Tokens of prompts that were looked up in the cache", asked, label)
        yield self._count("prefix_cache_hits", "Tokens of prompts that the cache knew", hit, label)
        yield self._count("prefix_cache_evictions", "Prefixes that made room", stats["prefix_evictions"], label)
        if "cache_kv_bytes" in stats:
            yield from self._of_disk(stats, label)
        yield self._count("num_preemptions", "Choices that were paused to make room", requests["paused"], label)
        yield self._count("engine_steps", "Calls of the engine", requests["steps"], label)
        yield self._count("engine_tokens", "Tokens that were chosen", requests["tokens"], label)
        yield self._count("engine_prompt_tokens", "Prompt tokens that were computed", requests["prompt_tokens"], label)
        yield self._count("spec_decode_num_drafts", "Steps with drafts", drafts["steps"], label)
        yield self._count("spec_decode_num_draft_tokens", "Tokens that were drafted", drafts["drafted"], label)
        yield self._count("spec_decode_num_accepted_tokens", "Drafts that were right", drafts["accepted"], label)
        yield _gaps(requests, label)

    def _of_disk(self, stats: Mapping[str, Any], label: list[str]) -> Iterator[Metric]:
        """States of prompts on disk (`cache_kv`)."""
        used, limit = stats["cache_kv_used_bytes"], stats["cache_kv_bytes"]
        yield self._gauge("disk_cache_bytes", "Bytes of the files with states of prompts", used, label)
        yield self._gauge("disk_cache_limit_bytes", "Bytes that these files may take", limit, label)
        for name, text in (
            ("tokens_hit", "Tokens of prompts that were read from disk"),
            ("read_bytes", "Bytes that were read from these files"),
            ("written_bytes", "Bytes that were written to these files"),
            ("evictions", "Files that made room"),
            ("damaged", "Files that were damaged"),
        ):
            yield self._count(f"disk_cache_{name}", text, stats[f"cache_kv_{name}"], label)

    def _gauge(self, name: str, text: str, value: float, label: list[str]) -> Metric:
        found = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        found.add_metric(label, value)
        return found

    def _count(self, name: str, text: str, value: float, label: list[str]) -> Metric:
        found = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        found.add_metric(label, value)
        return found


def _gaps(requests: Mapping[str, Any], label: list[str]) -> Metric:
    """The times between two tokens of a choice, as the engine counted them."""
    found = HistogramMetricFamily(
        f"{PREFIX}inter_token_latency_seconds", "Time between two tokens of a choice", labels=["model_name"]
    )
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, GAP_BOUNDS), "+Inf"), requests["gap_counts"], strict=True):
        total += count
        buckets.append((bound, total))
    found.add_metric(label, buckets, requests["gap_seconds"])
    return found


class _WithAliases:
    """A registry whose metrics are also there under the names of other servers."""

    def __init__(self, registry: CollectorRegistry, *, vllm: bool, llama: bool) -> None:
        self._registry, self._vllm, self._llama = registry, vllm, llama

    def collect(self) -> Iterable[Metric]:
        own = list(self._registry.collect())
        for metric in own:
            yield metric
            if self._vllm and metric.name.removeprefix(PREFIX) in SHARED:
                yield _renamed(metric)
        if self._llama:
            yield from llama_metrics(own)


def _renamed(metric: Metric) -> Metric:
    name = ALIAS + metric.name.removeprefix(PREFIX)
    found = Metric(name, metric.documentation, metric.type)
    found.samples = [
        Sample(ALIAS + each.name.removeprefix(PREFIX), {**each.labels, "engine": "0"}, each.value, each.timestamp)
        for each in metric.samples
    ]
    return found
