"""The answer in the shapes of Anthropic's Messages API: the message, its content blocks, and the events of a stream.

Server stage. The shapes are those of the types in `anthropic.types`. An answer in one piece and a stream are
made by the same `MessageWriter`, so that they agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from rlx.serve.answers import JsonObject, ObjectWriter
from rlx.serve.errors import ApiError
from rlx.serve.events import Asked, Delta, End, Finished, Progress

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


TOO_LONG = "context_length_exceeded"


class MessageWriter(ObjectWriter):
    """Writes a message, or the events of a stream.

    Args:
        model: the model's name.
        prompt_tokens: of the prompt.
        asked: what is to be generated.

    Attributes:
        message: the message as it is now.
    """

    def __init__(self, model: str, prompt_tokens: int, asked: Sequence[Asked] = ()) -> None:
        super().__init__(asked)
        self.message: JsonObject = {
            "id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": usage_json(Finished(prompt_tokens)),
        }  # fmt: skip
        self._open = False
        self._arguments = ""
        self._end: End | None = None

    def begin(self) -> Iterator[JsonObject]:
        yield {"type": "message_start", "message": {**self.message, "content": []}}
        yield {"type": "ping"}

    def delta(self, delta: Delta) -> Iterator[JsonObject]:
        if delta.thinking:
            yield from self._text("thinking", delta.thinking)
        if delta.text:
            yield from self._text("text", delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def end(self, end: End) -> tuple[()]:
        self._end = end
        return ()

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield error_json(error)

    def waiting(self, progress: Progress) -> bytes:
        return self.written({"type": "ping"})

    def whole(self) -> JsonObject:
        return self.message

    def _text(self, kind: str, text: str) -> Iterator[JsonObject]:
        """More reasoning or text."""
        if not self._open or self._block["type"] != kind:
            yield from self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._block[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: Any) -> Iterator[JsonObject]:
        """More of a tool call: its first piece has the name."""
        if call.name:
            yield from self._start({"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": {}})
        if call.arguments:
            self._arguments += call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    @property
    def _block(self) -> JsonObject:
        """The content block that is being written."""
        found: JsonObject = self.message["content"][-1]
        return found

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": len(self.message["content"]) - 1, "delta": delta}

    def _start(self, block: JsonObject) -> Iterator[JsonObject]:
        yield from self._stop()
        self.message["content"].append(block)
        self._open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": len(self.message["content"]) - 1, "content_block": {**block}}

    def _stop(self) -> Iterator[JsonObject]:
        if not self._open:
            return
        self._open = False
        if self._block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})  # the sign that the reasoning is complete
        elif self._block["type"] == "tool_use":
            self._block["input"] = json.loads(self._arguments or "{}")
        yield {"type": "content_block_stop", "index": len(self.message["content"]) - 1}

    def finished(self, numbers: Finished) -> Iterator[JsonObject]:
        yield from self._stop()
        end = self._end
        reason, stop = (_STOPS[end.finish_reason], end.stop) if end is not None else ("end_turn", None)
        if isinstance(stop, str):
            reason = "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": stop if isinstance(stop, str) else None}
        self.message |= {**ended, "usage": usage_json(numbers)}
        yield {"type": "message_delta", "delta": ended, "usage": self.message["usage"]}
        yield {"type": "message_stop"}


def usage_json(usage: Finished) -> JsonObject:
    """Numbers of tokens. Those of the prompt that were found in the cache count apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def tool_use_id(call_id: str) -> str:
    """The id of a call as Anthropic's clients know them."""
    return f"toolu_{call_id.removeprefix('call_')}"


def error_json(error: ApiError) -> JsonObject:
    """The body of an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = f"prompt is too long: {error}" if error.code == TOO_LONG else str(error)  # Claude Code then compacts
    return {"type": "error", "error": {"type": kind, "message": message, **error.details}}
