"""The common parts of chat and completions: their writer, what ends an answer, and what answers say beside the text.

Server stage, under OpenAI's paths.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import rlx
from rlx.serve.answers import Writer
from rlx.serve.errors import ApiError, invalid, openai_body
from rlx.serve.events import Asked, Choice, Delta, End, Event, Finished, Progress, TokenInfo
from rlx.serve.fields import ending, sample_opts
from rlx.serve.http import comment, event, json_bytes

if TYPE_CHECKING:
    from rlx.runners import TokenLogprob
    from rlx.serve.model import ServedModel
    from rlx.serve.openai.bodies import CommonFields

FINGERPRINT = f"rlx-{rlx.__version__}"
DONE = event("[DONE]")


class OpenAIWriter(Writer):
    """Writes chunks as server-sent events, `[DONE]` at the end; or the choices of an answer in one piece.

    Nearly all chunks differ in the text only, so the rest of them is made once.

    Args:
        model: computes it.
        body: what is asked for.
        asked: what is to be generated.
        ident: the beginning of ids of answers.
        noun: what a chunk is called.
        text: what stands before and behind the text of a chunk.
    """

    def __init__(
        self,
        model: ServedModel,
        body: CommonFields,
        asked: Sequence[Asked],
        ident: str,
        noun: str,
        text: tuple[bytes, bytes],
    ) -> None:
        super().__init__(asked)
        self.ping = body.sse_ping_interval
        self.model, self.body, options = model, body, body.stream_options
        self._head = {
            "id": f"{ident}-{body.request_id or uuid.uuid4().hex}",
            "object": noun,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self.choices = [Choice(i) for i in range(sum(each.n for each in asked))]
        self.finished = Finished()
        self._with_usage = bool(options and options.include_usage)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        start = b'data: %s,"choices":[{"index":' % json_bytes(self._head)[:-1]
        self._starts = [start + b"%d" % i + text[0] for i in range(len(self.choices))]
        usage = b',"usage":null' if self._with_usage else b""
        self._tail = text[1] + b',"logprobs":null,"finish_reason":null}]%s}\n\n' % usage
        self._left, self._last = len(self.choices), End(0, "stop")
        self.table = {
            Delta: self._delta, End: self._end_of, Finished: self._finish, Progress: self._progress,
        }  # fmt: skip

    def _end_of(self, end: End) -> bytes:
        """The chunk of the end of a choice, unless it is the last one: that tells what the request took, too."""
        self._left -= 1
        if self._left:
            return self._ended(end, {})
        self._last = end
        return b""

    @abstractmethod
    def _delta(self, delta: Delta) -> bytes:
        """The chunks of new tokens."""

    def _ended(self, end: End, more: dict[str, Any]) -> bytes:
        """The chunk of the end of a choice.

        Args:
            more: further fields.
        """
        return b""

    def _finish(self, finished: Finished) -> bytes:
        """The chunks of the end."""
        more = {"timings": timings_dict(finished)}
        usage = {"usage": usage_dict(finished)}
        piece = self._ended(self._last, more | self._verbose_end(self._last, finished))
        return piece + self._chunk([], usage | more) if self._with_usage else piece

    def _verbose_end(self, end: End, finished: Finished) -> dict[str, Any]:
        """Further fields of the last chunk of a choice."""
        return {}

    def _progress(self, progress: Progress) -> bytes:
        """The chunk that says how much of the prompt is computed, where it is asked for."""
        return b""

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._with_usage else {}
        return event(json_bytes({**self._head, "choices": choices, **usage, **more}))

    def waiting(self, progress: Progress) -> bytes:
        """A comment, which clients ignore."""
        return comment(f"{progress.processed} of {progress.total} prompt tokens")

    def failed(self, error: ApiError) -> bytes:
        return event(json_bytes(openai_body(error))) + DONE

    def last(self) -> bytes:
        return DONE

    def add(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.choices[event.index].add(event)
        elif isinstance(event, End):
            found = self.choices[event.index]
            found.finish_reason, found.stop = event.finish_reason, event.stop
        elif isinstance(event, Finished):
            self.finished = event


def asked_fields(model: ServedModel, body: CommonFields, keep_ids: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The arguments of `ServedModel.asked` that chat and completions give in the same way.

    Args:
        keep_ids: control tokens that are read.

    Raises:
        ApiError: a value is out of its range.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it needs stream", "set stream to true, or leave it out")
    return {
        "sample": sample_opts(body, model.default_sample, model.tokenizer, model.runner.vocab_size),
        "n": body.n or 1,
        "priority": -(body.priority or 0),  # vLLM's are the other way round
        "timeout": body.timeout,
        "cache_salt": uuid.uuid4().hex if body.cache_prompt is False else body.cache_salt or "",
        "keep_ids": keep_ids if body.skip_special_tokens is not False else model.tokenizer.special_ids,
        **ending(body, model.runner.vocab_size),
    }


def usage_dict(found: Finished) -> dict[str, Any]:
    """Numbers of tokens as OpenAI's clients read them."""
    return {
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "total_tokens": found.prompt_tokens + found.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": found.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": found.reasoning_tokens, "audio_tokens": 0},
    }


def timings_dict(found: Finished) -> dict[str, Any]:
    """Times as llama-server gives them."""
    computed = found.prompt_tokens - found.cached_tokens
    return {
        "queue_ms": round(found.queue_ms, 3),
        "cache_n": found.cached_tokens,
        "prompt_n": computed,
        **_rates("prompt", found.prompt_ms, computed),
        "predicted_n": found.completion_tokens,
        **_rates("predicted", found.decode_ms, found.decode_steps),
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


def logprob_dicts(infos: Iterable[TokenInfo], as_id: bool) -> list[dict[str, Any]]:
    """The entries of chat's `logprobs.content`."""
    return [
        {**token_dict(info.chosen, as_id), "top_logprobs": [token_dict(each, as_id) for each in info.top]}
        for info in infos
    ]
