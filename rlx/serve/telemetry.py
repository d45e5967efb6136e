"""Spans for OpenTelemetry: one a request, with the attributes of the GenAI conventions.

Server stage, beside the log. A request that brings the header `traceparent` continues that trace. Only servers that
send spans import this module, which needs the extra `otel`. Conventions:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

import rlx
from rlx.arguments import without_none
from rlx.serve.record import RequestRecord

_SYSTEM = "rlx"


class Telemetry:
    """Sends spans to a collector by HTTP.

    Args:
        endpoint: its address, such as http://localhost:4318.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({"service.name": "rlx", "service.version": rlx.__version__})
        self._provider = TracerProvider(resource=resource)
        path = endpoint.rstrip("/")
        exporter = OTLPSpanExporter(path if path.endswith("/v1/traces") else f"{path}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rlx.serve", rlx.__version__)

    def span(self, found: RequestRecord, headers: Headers) -> None:
        """Sends the span of a request that has ended, if something was generated in it."""
        if not found.answered:
            return
        end = time.time_ns()
        operation = "chat" if "chat" in found.path or "messages" in found.path else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {found.model}",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=end - int(1e9 * found.seconds),
            attributes=attributes(found, operation),
        )
        if found.error is not None:
            span.set_status(Status(StatusCode.ERROR, found.error))
        span.end(end)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def attributes(found: RequestRecord, operation: str) -> dict[str, Any]:
    """The attributes of a request's span."""
    first = found.answered[0]
    values: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _SYSTEM,
        "gen_ai.request.model": found.model,
        "gen_ai.response.model": found.model,
        "gen_ai.response.id": found.id,
        "gen_ai.request.choice.count": sum(len(each.stats) for each in found.answered),
        "gen_ai.response.finish_reasons": [reason for each in found.answered for reason in each.reasons],
        "gen_ai.usage.input_tokens": sum(each.first.prompt_tokens for each in found.answered),
        "gen_ai.usage.output_tokens": sum(each.tokens for each in found.answered),
        "gen_ai.usage.cache_read.input_tokens": sum(each.first.cached_tokens for each in found.answered),
        "gen_ai.server.time_to_first_token": first.first_token,
        "gen_ai.request.max_tokens": first.max_tokens,
        "http.response.status_code": found.status,
        "url.path": found.path,
        "rlx.prepare_seconds": first.prepared,
        "rlx.queue_seconds": first.first.queued_s,
        "rlx.prompt_seconds": first.first.prompt_s,
        "rlx.decode_seconds": max(each.decode_s for each in first.stats),
    }
    return without_none(**values)
