"""What chat and completions have in common: from a body to a `GenerationSpec`, and what answers say beside the text.

Server stage, under OpenAI's paths.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

import rlx
from rlx.serve.errors import invalid
from rlx.serve.generation import Progress, Timings, TokenInfo, Usage
from rlx.serve.openai.sampling import ending, sample_opts
from rlx.serve.streaming import json_bytes

if TYPE_CHECKING:
    from rlx.runners import TokenLogprob
    from rlx.serve.app import Server
    from rlx.serve.model import ServedModel
    from rlx.serve.openai.bodies import CommonFields

FINGERPRINT = f"rlx-{rlx.__version__}"


@dataclass(frozen=True)
class Call:
    """One request to chat or completions.

    Attributes:
        server: what it came to.
        request: over HTTP.
        body: what it asks for.
        model: the one that it names.
        kind: the beginning of ids of answers.
        noun: what an answer is called, `chat.completion` or `text_completion`.
    """

    server: Server
    request: Request
    body: CommonFields
    model: ServedModel
    kind: str
    noun: str

    @cached_property
    def id(self) -> str:
        return f"{self.kind}-{self.body.request_id or uuid.uuid4().hex}"

    @cached_property
    def created(self) -> int:
        return int(time.time())

    def head(self, noun: str) -> dict[str, Any]:
        """The fields that every answer and every piece of a stream begins with."""
        return {
            "id": self.id,
            "object": noun,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": FINGERPRINT,
        }

    @property
    def ping_seconds(self) -> float:
        """How long a stream may be silent."""
        return self.body.sse_ping_interval or self.server.options.ping

    def spec_fields(self) -> dict[str, Any]:
        """The fields of a `GenerationSpec` that chat and completions give in the same way.

        Raises:
            ApiError: a value is out of its range.
        """
        body, model = self.body, self.model
        check_stream_options(body)
        limits = [value for value in (body.timeout, self.server.options.timeout) if value is not None]
        return {
            "sample": sample_opts(body, model.default_sample, model.tokenizer, model.runner.vocab_size),
            "n": body.n or 1,
            "priority": -(body.priority or 0),  # vLLM's are the other way round
            "timeout": min(limits, default=None),
            "request_id": body.request_id or self.request.headers.get("x-request-id", ""),
            "cache_salt": uuid.uuid4().hex if body.cache_prompt is False else body.cache_salt or "",
            **ending(body, model.runner.vocab_size),
        }

    def kept(self, keep_ids: frozenset[int]) -> frozenset[int]:
        """Control tokens that texts have: those that are read, and all if the body asks for them."""
        return keep_ids if self.body.skip_special_tokens is not False else self.model.tokenizer.special_ids


def check_stream_options(body: CommonFields) -> None:
    """Refuses options of a stream where there is none."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it needs stream", "set stream to true, or leave it out")


def json_response(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Numbers of tokens as OpenAI's clients read them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "audio_tokens": 0},
    }


def timings_dict(timings: Timings) -> dict[str, Any]:
    """Times as llama-server gives them."""
    return {
        "queue_ms": round(timings.queue_ms, 3),
        "cache_n": timings.cached_tokens,
        "prompt_n": timings.prompt_tokens,
        **_rates("prompt", timings.prompt_ms, timings.prompt_tokens),
        "predicted_n": timings.decode_tokens,
        **_rates("predicted", timings.decode_ms, timings.decode_steps),
    }


def progress_dict(progress: Progress) -> dict[str, Any]:
    """How much of a prompt is computed, as llama-server says it."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.ms, 3),
    }


def _rates(name: str, ms: float, tokens: int) -> dict[str, float]:
    """A time, and how it relates to the tokens that were computed in it."""
    return {
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / tokens, 4) if tokens else 0.0,
        f"{name}_per_second": round(1000 * tokens / ms, 2) if ms else 0.0,
    }


def token_dict(found: TokenLogprob, as_id: bool) -> dict[str, Any]:
    """A token with its log-probability.

    Args:
        as_id: write `token_id:15` in place of its text.
    """
    text = f"token_id:{found.token}" if as_id else found.text
    return {"token": text, "logprob": found.logprob, "bytes": list(found.bytes)}


def logprob_dicts(infos: list[TokenInfo] | tuple[TokenInfo, ...], as_id: bool) -> list[dict[str, Any]]:
    """The entries of chat's `logprobs.content`."""
    return [
        {**token_dict(info.chosen, as_id), "top_logprobs": [token_dict(each, as_id) for each in info.top]}
        for info in infos
    ]
