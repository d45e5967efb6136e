"""The answer in the shapes of OpenAI's Responses API: the response, its output items, and the events of a stream.

Server stage. The shapes are those of the types in `openai.types.responses`. An answer in one piece and a stream are
made by the same `ResponseWriter`, so that they agree.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from rlx.serve.answers import JsonObject, ObjectWriter
from rlx.serve.errors import ApiError
from rlx.serve.events import Asked, Delta, End, Finished, Progress, TokenInfo
from rlx.serve.http import comment

_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # kind of a call -> the field with its text
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # status -> code of a failed response; else server_error


def new_id(prefix: str) -> str:
    """An id such as `msg_0f3e...`."""
    return f"{prefix}_{uuid4().hex}"


@dataclass
class _Item:
    """An output item that is being written.

    Attributes:
        kind: reasoning, message, function_call or custom_tool_call.
        index: its place in `output`.
        text: its reasoning, text, arguments or input so far.
    """

    kind: str
    index: int
    id: str
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[JsonObject] = field(default_factory=list)

    def as_json(self, status: str) -> JsonObject:
        """The item, as it is in `output`."""
        if self.kind in _CALLS:
            call = {_CALLS[self.kind]: self.text, "call_id": self.call_id, "name": self.name}
            return {"id": self.id, "type": self.kind, "status": status, **call}
        if self.kind == "reasoning":
            content = [self.part()] if self.text else []
            return {"id": self.id, "type": self.kind, "status": status, "summary": [], "content": content}
        content = [self.part()] if self.text or status != "in_progress" else []
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self) -> JsonObject:
        """Its content part."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponseWriter(ObjectWriter):
    """Writes a response, or the events of a stream.

    Args:
        fields: those of the response object that repeat the request, `model` and `tools` among them.
        custom: names of the custom tools.
        asked: what is to be generated.

    Attributes:
        response: the response object as it is now.
    """

    def __init__(self, fields: JsonObject, custom: Container[str] = (), asked: Sequence[Asked] = ()) -> None:
        super().__init__(asked)
        self._custom = custom
        self.response: JsonObject = {
            "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "error": None, "incomplete_details": None, "output": [], "usage": None, **fields,
        }  # fmt: skip
        self._item: _Item | None = None
        self._number = 0
        self._end: End | None = None
        self._logprobs: list[JsonObject] = []

    def begin(self) -> Iterator[JsonObject]:
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def delta(self, delta: Delta) -> Iterator[JsonObject]:
        self._logprobs += [logprob_json(info) for info in delta.logprobs]
        if delta.thinking:
            yield from self._text("reasoning", "rs", delta.thinking)
        if delta.text:
            yield from self._text("message", "msg", delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def end(self, end: End) -> tuple[()]:
        self._end = end
        return ()

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield from self._close("incomplete")
        code = _CODES.get(error.status, "server_error")
        self.response |= {"status": "failed", "error": {"code": code, "message": str(error)}}
        yield self._event("response.failed", response=self._snapshot())

    def waiting(self, progress: Progress) -> bytes:
        return comment("the prompt is computed")

    def whole(self) -> JsonObject:
        return self.response

    # ---------------------------------------------------------------------------------------------- items

    def _text(self, kind: str, prefix: str, text: str) -> Iterator[JsonObject]:
        """More reasoning or text."""
        if self._item is None or self._item.kind != kind:
            yield from self._open(kind, prefix)
        item = self._item
        assert item is not None
        item.text += text
        logprobs, self._logprobs = self._logprobs, []  # of the tokens that were held back, too
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **_place(item), delta=text)
        else:
            item.logprobs += logprobs
            yield self._event("response.output_text.delta", **_place(item), delta=text, logprobs=logprobs)

    def _call(self, call: Any) -> Iterator[JsonObject]:
        """More of a tool call: its first piece has the name."""
        if call.name:
            kind, prefix = ("custom_tool_call", "ctc") if call.name in self._custom else ("function_call", "fc")
            yield from self._open(kind, prefix, name=call.name, call_id=call.id)
        item = self._item
        assert item is not None
        if call.arguments:
            item.text += call.arguments
            place = {"item_id": item.id, "output_index": item.index}
            yield self._event(f"response.{item.kind}_{_CALLS[item.kind]}.delta", **place, delta=call.arguments)

    def _open(self, kind: str, prefix: str, name: str = "", call_id: str = "") -> Iterator[JsonObject]:
        yield from self._close("completed")
        item = self._item = _Item(kind, len(self.response["output"]), new_id(prefix), name=name, call_id=call_id)
        self.response["output"].append(item.as_json("in_progress"))
        yield self._event("response.output_item.added", output_index=item.index, item=item.as_json("in_progress"))
        if kind not in _CALLS:
            yield self._event("response.content_part.added", **_place(item), part=item.part())

    def _close(self, status: str) -> Iterator[JsonObject]:
        """Ends the item that is being written, if there is one."""
        item, self._item = self._item, None
        if item is None:
            return
        if item.kind in _CALLS:
            place = {"item_id": item.id, "output_index": item.index, "name": item.name}
            name = _CALLS[item.kind]
            yield self._event(f"response.{item.kind}_{name}.done", **place, **{name: item.text})
        else:
            done = {"text": item.text} if item.kind == "reasoning" else {"text": item.text, "logprobs": item.logprobs}
            name = "reasoning_text" if item.kind == "reasoning" else "output_text"
            yield self._event(f"response.{name}.done", **_place(item), **done)
            yield self._event("response.content_part.done", **_place(item), part=item.part())
        self.response["output"][item.index] = item.as_json(status)
        yield self._event("response.output_item.done", output_index=item.index, item=item.as_json(status))

    def finished(self, numbers: Finished) -> Iterator[JsonObject]:
        is_cut = self._end is not None and self._end.finish_reason == "length"
        if self._item is None and not self.response["output"]:
            yield from self._open("message", "msg")  # clients look for a message, though it is empty
        yield from self._close("incomplete" if is_cut else "completed")
        status = "incomplete" if is_cut else "completed"
        self.response |= {"status": status, "usage": usage_json(numbers)}
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self._snapshot())

    def _snapshot(self) -> JsonObject:
        return {**self.response, "output": list(self.response["output"])}

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _place(item: _Item) -> JsonObject:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def usage_json(usage: Finished) -> JsonObject:
    """Numbers of tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def logprob_json(info: TokenInfo) -> JsonObject:
    """The log-probabilities of a token."""
    top = [_one(each) for each in info.top]
    return {**_one(info.chosen), "top_logprobs": top}


def _one(token: Any) -> JsonObject:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}
