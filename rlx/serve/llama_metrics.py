"""The counters of `/metrics` under the names of llama-server, for dashboards and scripts that read those.

Server stage, over `metrics.py`: every value is one of the server's own metrics, or made of some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "llamacpp:"

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


def llama_metrics(metrics: Iterable[Metric], prefix: str) -> Iterator[Metric]:
    """The metrics of llama-server.

    Args:
        metrics: those of the server.
        prefix: what their names begin with.
    """
    totals: dict[str, float] = {}
    for metric in metrics:
        for each in metric.samples:
            name = each.name.removeprefix(prefix)
            totals[name] = totals.get(name, 0.0) + each.value
    for name, (text, value) in _COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=value(totals))
    for name, (text, value) in _GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=value(totals))
