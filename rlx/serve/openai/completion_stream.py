"""The pieces of a streamed completion. Server stage, under `completions.py`."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from rlx.serve.generation import Delta, End, Event, Finished, GenerationSpec, Progress, TokenInfo
from rlx.serve.openai.common import Call, progress_dict, timings_dict, usage_dict
from rlx.serve.openai.logprobs import Logprobs
from rlx.serve.openai.native_output import verbose_end
from rlx.serve.openai.sse import Chunks
from rlx.serve.streaming import event, json_bytes

if TYPE_CHECKING:
    from rlx.serve.openai.bodies import CompletionBody
    from rlx.serve.openai.completions import Echo


class CompletionChunks(Chunks):
    """Makes the pieces of one stream.

    Args:
        call: the request.
        body: what it asks for.
        specs: what is generated, one for each prompt.
        echoes: what the answers to each prompt begin with.
    """

    def __init__(
        self, call: Call, body: CompletionBody, specs: Sequence[GenerationSpec], echoes: Sequence[Echo]
    ) -> None:
        options = body.stream_options
        self._call, self._specs = call, specs
        self._head, self._body = call.head("text_completion"), body
        self._echoes = [echo for spec, echo in zip(specs, echoes, strict=True) for _ in range(spec.n)]
        self._with_usage = bool(options and options.include_usage)
        logs = (body.logprobs, body.n_probs) != (None, None)
        self._logs = [Logprobs(bool(body.return_tokens_as_token_ids)) for _ in self._echoes] if logs else None
        self._ids = bool(body.return_token_ids or body.return_tokens)
        self._is_plain = not (logs or self._ids)
        start = json_bytes(self._head)[:-1] + b',"choices":[{"index":'
        self._starts = [b"data: %s%d" % (start, i) + b',"text":' for i in range(len(self._echoes))]
        self._end = b',"logprobs":null,"finish_reason":null}]%s}\n\n' % (b',"usage":null' if self._with_usage else b"")
        self._left = len(self._echoes)
        self._last: End | None = None

    def first(self) -> bytes:
        if not self._body.echo:
            return b""
        return b"".join(self._piece(i, echo.text, echo.infos) for i, echo in enumerate(self._echoes))

    def of(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            if self._is_plain:
                return self._plain(event) if event.text else b""
            more = {"token_ids": event.tokens} if self._ids else {}
            return self._piece(event.index, event.text, event.logprobs, **more)
        if isinstance(event, End):
            self._left -= 1
            if not self._left:
                self._last = event  # it tells what the request took, too
                return b""
            return self._ended(event, {})
        if isinstance(event, Finished):
            return self._finished(event)
        return self._progress(event)

    def _plain(self, delta: Delta) -> bytes:
        return self._starts[delta.index] + encode_basestring(delta.text).encode() + self._end

    def _piece(self, index: int, text: str, infos: Sequence[TokenInfo], **more: Any) -> bytes:
        logs = self._logs[index].of(infos) if self._logs and infos else None
        choice = {"index": index, "text": text, "logprobs": logs, "finish_reason": None, **more}
        return self._chunk([choice], {})

    def _ended(self, end: End, more: dict[str, Any]) -> bytes:
        choice = {"index": end.index, "text": "", "logprobs": None, "finish_reason": end.finish_reason}
        return self._chunk([{**choice, "stop_reason": end.stop}], more)

    def _finished(self, finished: Finished) -> bytes:
        assert self._last is not None
        timings = {"timings": timings_dict(finished.timings)}
        more = verbose_end(self._call, self._body, self._specs, self._last, finished)
        piece = self._ended(self._last, timings | more)
        usage = {"usage": usage_dict(finished.usage)}
        return piece + self._chunk([], usage | timings) if self._with_usage else piece

    def _progress(self, progress: Progress) -> bytes:
        if not self._body.return_progress:
            return b""
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return self._chunk([choice], {"prompt_progress": progress_dict(progress)})

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._with_usage else {}
        return event(json_bytes({**self._head, "choices": choices, **usage, **more}))
