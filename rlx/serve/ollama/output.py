"""The answer in the shapes of Ollama's API: one object, or a line of JSON for each piece.

Server stage. The shapes are those of the types in the `ollama` package: durations are nanoseconds, tool calls come
whole, with their arguments as an object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from rlx.serve.answers import JsonObject, ObjectWriter
from rlx.serve.errors import ApiError
from rlx.serve.events import Delta, End, Finished, Progress
from rlx.serve.http import LINES, json_bytes
from rlx.serve.openai.common import logprob_dicts

Kind = Literal["chat", "generate"]


def now() -> str:
    """The time, as RFC 3339 writes it."""
    return f"{datetime.now(UTC).isoformat(timespec='microseconds').removesuffix('+00:00')}Z"


class OllamaWriter(ObjectWriter):
    """Writes one object, or a line of JSON for each piece.

    Args:
        kind: whether it answers `/api/chat` or `/api/generate`.
        model: the name that the request used.
        started: `time.perf_counter()` when the request came.

    Attributes:
        context: ids of the prompt, and of the answer behind them; the last object then has them as `context`.
    """

    media_type = LINES

    def __init__(self, kind: Kind, model: str, started: float) -> None:
        super().__init__(())
        self._kind, self._model, self._started = kind, model, started
        self.context: list[int] = []
        self._objects: list[JsonObject] = []
        self._calls: list[JsonObject] = []
        self._reason = "stop"

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield error_json(error)

    def waiting(self, progress: Progress) -> bytes:
        return self.written(self.piece())

    def written(self, found: JsonObject) -> bytes:
        return json_bytes(found) + b"\n"

    def keep(self, found: JsonObject) -> None:
        self._objects.append(found)

    def whole(self) -> JsonObject:
        return joined(self._kind, self._objects)

    def delta(self, delta: Delta) -> Iterator[JsonObject]:
        if self.context:
            self.context += delta.tokens
        for call in delta.tool_calls:
            yield from self._call(call)
        if delta.text or delta.thinking or delta.logprobs:
            logprobs = {"logprobs": logprob_dicts(delta.logprobs, as_id=False)} if delta.logprobs else {}
            yield {**self.piece(delta.text, delta.thinking), **logprobs}

    def end(self, end: End) -> Iterator[JsonObject]:
        yield from self._called()
        self._reason = "length" if end.finish_reason == "length" else "stop"

    def finished(self, numbers: Finished) -> Iterator[JsonObject]:
        yield self.done(self._reason, numbers)

    def _call(self, call: Any) -> Iterator[JsonObject]:
        if call.name:
            yield from self._called()
            self._calls = [{"id": call.id, "index": call.index, "name": call.name, "arguments": ""}]
        self._calls[-1]["arguments"] += call.arguments

    def _called(self) -> Iterator[JsonObject]:
        """The tool call that is complete, if there is one."""
        calls, self._calls = self._calls, []
        for call in calls:
            function = {
                "index": call["index"],
                "name": call["name"],
                "arguments": json.loads(call["arguments"] or "{}"),
            }
            yield self.piece(calls=[{"id": call["id"], "function": function}])

    def piece(self, text: str = "", thinking: str = "", calls: list[JsonObject] | None = None) -> JsonObject:
        """An object that is not the last one."""
        head = {"model": self._model, "created_at": now()}
        more = {"thinking": thinking} if thinking else {}
        if self._kind == "generate":
            return {**head, "response": text, **more, "done": False}
        called = {"tool_calls": calls} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **more, **called}, "done": False}

    def done(self, reason: str, numbers: Finished | None = None) -> JsonObject:
        """The last object of a stream."""
        found = {**self.piece(), "done": True, "done_reason": reason}
        if numbers is not None:
            total = time.perf_counter() - self._started
            found |= {
                "total_duration": int(total * 1e9), "load_duration": 0,
                "prompt_eval_count": numbers.prompt_tokens, "prompt_eval_duration": int(numbers.prompt_ms * 1e6),
                "eval_count": numbers.completion_tokens, "eval_duration": int(numbers.decode_ms * 1e6),
            }  # fmt: skip
        return {**found, "context": self.context} if self.context else found


def joined(kind: Kind, pieces: Sequence[JsonObject]) -> JsonObject:
    """The objects of a stream as the one object of an answer that is not streamed."""
    text = "content" if kind == "chat" else "response"
    inner = [piece["message"] if kind == "chat" else piece for piece in pieces]
    whole = {**inner[-1], text: "".join(each[text] for each in inner)}
    if thinking := "".join(each.get("thinking", "") for each in inner):
        whole["thinking"] = thinking
    if calls := [call for each in inner for call in each.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    found = {**pieces[-1], "message": whole} if kind == "chat" else whole
    if logprobs := [info for piece in pieces for info in piece.get("logprobs", ())]:
        found["logprobs"] = logprobs
    return found


def error_json(error: ApiError) -> JsonObject:
    """The body of an error."""
    return {"error": str(error)}
