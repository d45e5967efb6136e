"""The answers of `/completion` in llama-server's form, which other paths have as `__verbose` where they are asked.

Server stage, beside OpenAI's paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlx.serve.generation import (
    Choice,
    Collected,
    Delta,
    End,
    Event,
    Finished,
    GenerationSpec,
    Progress,
    Timings,
    TokenInfo,
)
from rlx.serve.openai.common import Call, logprob_dicts, progress_dict, timings_dict
from rlx.serve.openai.sse import Chunks
from rlx.serve.settings import settings
from rlx.serve.streaming import event, json_bytes

if TYPE_CHECKING:
    from rlx.serve.openai.bodies import CommonFields


class NativeChunks(Chunks):
    """Makes whole answers and pieces of streams in llama-server's form.

    Args:
        call: the request.
        body: what it asks for.
        specs: what is generated, one for each prompt.
    """

    def __init__(self, call: Call, body: CommonFields, specs: Sequence[GenerationSpec]) -> None:
        self._model, self._body = call.model, body
        self._specs = [spec for spec in specs for _ in range(spec.n)]
        self._prompts = [call.model.checked(spec.prompt).ids for spec in self._specs]
        self._counts, self._ends = [0] * len(self._specs), list[End]()
        self._has_new_line = [False] * len(self._specs)

    def first(self) -> bytes:
        return b""

    def of(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            self._count(event.index, event.text, len(event.tokens))
            if not event.text and not (event.logprobs or (self._body.return_tokens and event.tokens)):
                return b""
            choice = Choice(event.index, event.text, tokens=list(event.tokens), logprobs=list(event.logprobs))
            return self._event(self._piece(choice, with_tokens=True))
        if isinstance(event, End):
            self._ends.append(event)
            return b""
        if isinstance(event, Finished):
            return b"".join(self._event(self.selected(self._ended(end, event.timings))) for end in self._ends)
        return self._progress(event)

    def last(self) -> bytes:
        """Nothing: the last piece says that it is."""
        return b""

    def whole(self, choice: Choice, timings: Timings) -> dict[str, Any]:
        """A complete answer."""
        self._count(choice.index, choice.text, len(choice.tokens))
        end = End(choice.index, choice.finish_reason, choice.stop)
        piece = self._piece(choice, with_tokens=bool(self._body.return_tokens))
        return {**self._ended(end, timings), **piece, "stop": True}

    def selected(self, found: dict[str, Any]) -> dict[str, Any]:
        """The fields of an answer that `response_fields` names: all without it. A slash leads into an object."""
        names = getattr(self._body, "response_fields", None)
        if not names:
            return found
        chosen = {}
        for name in names:
            value: Any = found
            for part in name.split("/"):
                value = value.get(part, self) if isinstance(value, dict) else self
            if value is not self:  # which stands for a field that there is not
                chosen[name] = value
        return chosen

    def _count(self, index: int, text: str, tokens: int) -> None:
        self._counts[index] += tokens
        self._has_new_line[index] |= "\n" in text

    def _piece(self, choice: Choice, *, with_tokens: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": choice.index,
            "content": choice.text,
            "tokens": choice.tokens if with_tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._counts[choice.index],
            "tokens_evaluated": len(self._prompts[choice.index]),
        }
        if choice.logprobs:
            entries = logprob_dicts(choice.logprobs, as_id=False)
            found["completion_probabilities"] = [
                {"id": info.chosen.token, **each, "top_logprobs": _with_ids(each["top_logprobs"], info)}
                for info, each in zip(choice.logprobs, entries, strict=True)
            ]
        return found

    def _ended(self, end: End, timings: Timings) -> dict[str, Any]:
        word = end.stop if isinstance(end.stop, str) else ""
        kind = "limit" if end.finish_reason == "length" else "word" if word else "eos"
        count, limit = self._counts[end.index], self._model.limit(self._specs[end.index].max_tokens)
        return {
            **self._piece(Choice(end.index)),
            "stop": True,
            "model": self._model.name,
            "prompt": self._model.tokenizer.decode(self._prompts[end.index]),
            "has_new_line": self._has_new_line[end.index],
            "stop_type": kind,
            "stopping_word": word,
            "truncated": kind == "limit" and (limit is None or count < limit),
            "tokens_cached": len(self._prompts[end.index]) + count,
            "generation_settings": settings(self._model, self._specs[end.index], bool(self._body.stream)),
            "timings": timings_dict(timings),
        }

    def _progress(self, progress: Progress) -> bytes:
        if not self._body.return_progress:
            return b""
        return self._event({**self._piece(Choice(0)), "prompt_progress": progress_dict(progress)})

    def _event(self, found: dict[str, Any]) -> bytes:
        return event(json_bytes(found))


def _with_ids(entries: list[dict[str, Any]], info: TokenInfo) -> list[dict[str, Any]]:
    return [{"id": each.token, **entry} for each, entry in zip(info.top, entries, strict=True)]


def verbose(call: Call, body: CommonFields, specs: Sequence[GenerationSpec], answer: Collected) -> dict[str, Any]:
    """What an answer also has where the request says `verbose`: the first choice in llama-server's form."""
    if not body.verbose:
        return {}
    return {"__verbose": NativeChunks(call, body, specs).whole(answer.choices[0], answer.timings)}


def verbose_end(
    call: Call, body: CommonFields, specs: Sequence[GenerationSpec], end: End, finished: Finished
) -> dict[str, Any]:
    """As `verbose`, for the last piece of a stream: without the text, which the pieces had."""
    if not body.verbose:
        return {}
    usage = finished.usage
    counted = Choice(end.index, tokens=[0] * usage.completion_tokens, finish_reason=end.finish_reason, stop=end.stop)
    whole = NativeChunks(call, body, specs).whole(counted, finished.timings)
    return {"__verbose": {**whole, "tokens": []}}
