"""The pieces of a streamed chat answer. Server stage, under `chat.py`.

Nearly all pieces differ in the text only, so the rest of them is made once.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from rlx.serve.generation import Delta, End, Event, Finished, GenerationSpec, Progress, Timings, Usage
from rlx.serve.openai.common import Call, logprob_dicts, progress_dict, timings_dict, usage_dict
from rlx.serve.openai.native_output import verbose_end
from rlx.serve.openai.sse import Chunks
from rlx.serve.streaming import event, json_bytes

if TYPE_CHECKING:
    from rlx.serve.openai.bodies import ChatBody
    from rlx.serve.openai.tools import Offered
    from rlx.text.tool_calls import ToolCallDelta


class ChatChunks(Chunks):
    """Makes the pieces of one stream.

    Args:
        call: the request.
        body: what it asks for.
        spec: what is generated.
        prompt: its token ids.
        tools: what the model may call.
    """

    def __init__(self, call: Call, body: ChatBody, spec: GenerationSpec, prompt: list[int], tools: Offered) -> None:
        options = body.stream_options
        self._call, self._head, self._body, self._spec = call, call.head("chat.completion.chunk"), body, spec
        self._ids, self._tools = prompt, tools
        self._custom = set[tuple[int, int]]()  # the calls of custom tools, by choice and number
        self._with_usage = bool(options and options.include_usage)
        self._counts = bool(options and options.continuous_usage_stats)
        self._reasons = body.include_reasoning is not False
        self._logs, self._as_id = spec.top_logprobs is not None, bool(body.return_tokens_as_token_ids)
        self._is_plain = not (self._logs or self._counts or body.return_token_ids or body.timings_per_token)
        start = json_bytes(self._head)[:-1] + b',"choices":[{"index":'
        self._starts = [b"data: %s%d" % (start, i) + b',"delta":' for i in range(spec.n)]
        self._end = b',"logprobs":null,"finish_reason":null}]%s}\n\n' % (b',"usage":null' if self._with_usage else b"")
        self._left, self._tokens, self._began = spec.n, 0, time.perf_counter()
        self._last: End | None = None
        self._prompt = Progress(0, 0, 0, 0.0)

    def first(self) -> bytes:
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._ids
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._piece(i, delta, **more) for i in range(self._spec.n))

    def of(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, End):
            return self._ended(event)
        if isinstance(event, Finished):
            return self._finished(event)
        return self._progress(event)

    def _delta(self, delta: Delta) -> bytes:
        self._tokens += len(delta.tokens)
        if self._is_plain and delta.text and not delta.thinking and not delta.tool_calls:
            return self._starts[delta.index] + b'{"content":%s}' % encode_basestring(delta.text).encode() + self._end
        pieces: list[dict[str, Any]] = []
        if delta.thinking and self._reasons:
            pieces.append({"reasoning_content": delta.thinking})
        if delta.text:
            pieces.append({"content": delta.text})
        pieces += [self._calling(delta.index, each) for each in delta.tool_calls]
        if not pieces and (self._is_plain or not delta.tokens):
            return b""
        pieces = pieces or [{"content": ""}]
        return b"".join(self._piece(delta.index, each, delta if i == 0 else None) for i, each in enumerate(pieces))

    def _calling(self, index: int, call: ToolCallDelta) -> dict[str, Any]:
        """What a piece of a tool call adds to a choice: id and name come first."""
        if call.name in self._tools.custom:
            self._custom.add((index, call.index))
        kind, text = ("custom", "input") if (index, call.index) in self._custom else ("function", "arguments")
        inner = {"name": call.name, text: call.arguments} if call.id else {text: call.arguments}
        if self._tools.legacy:
            return {"function_call": inner}
        head = {"id": call.id, "type": kind} if call.id else {}
        return {"tool_calls": [{"index": call.index, **head, kind: inner}]}

    def _piece(
        self, index: int, delta: dict[str, Any], of: Delta | None = None, end: End | None = None, **more: Any
    ) -> bytes:
        """A piece of one choice.

        Args:
            of: the tokens that it tells of.
            end: of the choice.
            more: further fields of the piece.
        """
        reason: str | None = None if end is None else end.finish_reason
        reason = self._tools.reason if reason == "tool_calls" else reason
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if of is not None and self._logs:
            choice["logprobs"] = {"content": logprob_dicts(of.logprobs, self._as_id), "refusal": None}
        if of is not None and self._body.return_token_ids:
            choice["token_ids"] = of.tokens
        if end is not None:
            choice["stop_reason"] = end.stop
        return self._chunk([choice], more)

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        found = {**self._head, "choices": choices, **more}
        if self._counts and "usage" not in found:
            found["usage"] = usage_dict(Usage(self._prompt.total, self._prompt.cached, self._tokens))
        elif self._with_usage:
            found.setdefault("usage", None)
        if self._body.timings_per_token and "timings" not in found:
            found["timings"] = timings_dict(self._timings())
        return event(json_bytes(found))

    def _ended(self, end: End) -> bytes:
        self._left -= 1
        if not self._left:
            self._last = end  # it tells what the request took, too
            return b""
        return self._piece(end.index, {}, end=end)

    def _finished(self, finished: Finished) -> bytes:
        last, usage, timings = self._last, usage_dict(finished.usage), timings_dict(finished.timings)
        assert last is not None
        more: dict[str, Any] = {"usage": usage} if self._counts else {}
        more |= verbose_end(self._call, self._body, [self._spec], last, finished)
        piece = self._piece(last.index, {}, end=last, timings=timings, **more)
        return piece + self._chunk([], {"usage": usage, "timings": timings}) if self._with_usage else piece

    def _progress(self, progress: Progress) -> bytes:
        self._prompt, self._began = progress, time.perf_counter()
        if not self._body.return_progress or self._tokens:
            return b""
        return self._piece(0, {}, prompt_progress=progress_dict(progress))

    def _timings(self) -> Timings:
        """Times up to now."""
        prompt = self._prompt
        ms = 1000 * (time.perf_counter() - self._began)
        steps = max(0, self._tokens - (self._body.n or 1))
        return Timings(0.0, prompt.ms, prompt.total - prompt.cached, ms, self._tokens, steps, prompt.cached)
