"""/completion: llama-server's own path for completions, whose answers others have as `__verbose`, where they are asked.

Server stage, beside OpenAI's. The fields are those of `/v1/completions`. The answer has llama-server's form. By default
there is no limit of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import isinf
from typing import TYPE_CHECKING, Any

from rlx.engine.request.context import Context
from rlx.sampling import SampleOpts
from rlx.serve.events import Asked, Choice, Delta, End, Finished, Progress, TokenInfo
from rlx.serve.http import event, json_bytes
from rlx.serve.openai.common import OpenAIWriter, logprob_dicts, progress_dict, timings_dict

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.openai.bodies import CommonFields


class NativeWriter(OpenAIWriter):
    """Writes answers in llama-server's form.

    Args:
        model: computes it.
        body: what is asked for.
        asked: what is to be generated, one for each prompt.
    """

    def __init__(self, model: ServedModel, body: CommonFields, asked: Sequence[Asked]) -> None:
        super().__init__(model, body, asked, "cmpl", "completion", (b"", b""))
        self._prompts = [each.request.ids.ids for each in self._each if isinstance(each.request.ids, Context)]
        self._counts, self._ends = [0] * len(self.choices), list[End]()
        self._has_new_line = [False] * len(self.choices)

    @property
    def _each(self) -> list[Asked]:
        """The request of each choice."""
        return [each for each in self.asked for _ in range(each.n)]

    def _end_of(self, end: End) -> bytes:
        self._ends.append(end)
        return b""

    def _delta(self, delta: Delta) -> bytes:
        self._count(delta.index, delta.text, len(delta.tokens))
        if not delta.text and not (delta.logprobs or (self.body.return_tokens and delta.tokens)):
            return b""
        choice = Choice(delta.index, delta.text, tokens=list(delta.tokens), logprobs=list(delta.logprobs))
        return self._event(self._native(choice, with_tokens=True))

    def _finish(self, finished: Finished) -> bytes:
        return b"".join(self._event(self._selected(self._over(end, finished))) for end in self._ends)

    def last(self) -> bytes:
        """Nothing: the last piece says that it is."""
        return b""

    def whole(self) -> Any:
        each = [self._selected(self.one(choice, self.finished)) for choice in self.choices]
        return each[0] if len(each) == 1 else each

    def one(self, choice: Choice, finished: Finished) -> dict[str, Any]:
        """A complete choice."""
        self._count(choice.index, choice.text, len(choice.tokens))
        end = End(choice.index, choice.finish_reason, choice.stop)
        piece = self._native(choice, with_tokens=bool(self.body.return_tokens))
        return {**self._over(end, finished), **piece, "stop": True}

    def _selected(self, found: dict[str, Any]) -> dict[str, Any]:
        """The fields of an answer that `response_fields` names: all without it. A slash leads into an object."""
        names = getattr(self.body, "response_fields", None)
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

    def _native(self, choice: Choice, *, with_tokens: bool = False) -> dict[str, Any]:
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

    def _over(self, end: End, finished: Finished) -> dict[str, Any]:
        word = end.stop if isinstance(end.stop, str) else ""
        kind = "limit" if end.finish_reason == "length" else "word" if word else "eos"
        asked, count = self._each[end.index], self._counts[end.index]
        return {
            **self._native(Choice(end.index)),
            "stop": True,
            "model": self.model.name,
            "prompt": self.model.tokenizer.decode(self._prompts[end.index]),
            "has_new_line": self._has_new_line[end.index],
            "stop_type": kind,
            "stopping_word": word,
            "truncated": kind == "limit" and (asked.limit is None or count < asked.limit),
            "tokens_cached": len(self._prompts[end.index]) + count,
            "generation_settings": settings(asked, self.model.runner.max_seq, bool(self.body.stream)),
            "timings": timings_dict(finished),
        }

    def _progress(self, progress: Progress) -> bytes:
        if not self.body.return_progress:
            return b""
        return self._event({**self._native(Choice(0)), "prompt_progress": progress_dict(progress)})

    def _event(self, found: dict[str, Any]) -> bytes:
        return event(json_bytes(found))


def _with_ids(entries: list[dict[str, Any]], info: TokenInfo) -> list[dict[str, Any]]:
    return [{"id": each.token, **entry} for each, entry in zip(info.top, entries, strict=True)]


def verbose(writer: OpenAIWriter) -> dict[str, Any]:
    """The field `__verbose` of an answer, where the request says `verbose`: the first choice in llama-server's form."""
    if not writer.body.verbose:
        return {}
    found = NativeWriter(writer.model, writer.body, writer.asked)
    return {"__verbose": found.one(writer.choices[0], writer.finished)}


def verbose_end(writer: OpenAIWriter, end: End, finished: Finished) -> dict[str, Any]:
    """As `verbose`, for the last piece of a stream: without the text, which the pieces had."""
    if not writer.body.verbose:
        return {}
    counted = Choice(end.index, tokens=[0] * finished.completion_tokens, finish_reason=end.finish_reason, stop=end.stop)
    found = NativeWriter(writer.model, writer.body, writer.asked).one(counted, finished)
    return {"__verbose": {**found, "tokens": []}}


def sampling_settings(opts: SampleOpts) -> dict[str, Any]:
    """Sampling options under their own names, and under llama-server's where those differ. -1 is a whole context."""
    found = {each.name: getattr(opts, each.name) for each in fields(opts) if each.name != "logit_bias"}
    window = -1 if opts.repetition_window is None else opts.repetition_window
    return {**found, "repeat_penalty": opts.repetition_penalty, "repeat_last_n": window}


def settings(asked: Asked, context: int, is_stream: bool) -> dict[str, Any]:
    """The options that an answer was generated with.

    Args:
        context: tokens that the context holds.
    """
    request, limit = asked.request, -1 if asked.limit is None else asked.limit
    opts = request.sample
    assert isinstance(opts, SampleOpts)
    biases: Any = opts.logit_bias  # it is stored as pairs
    return {
        **sampling_settings(opts),
        "logit_bias": [{"token": i, "bias": None if isinf(bias) else bias} for i, bias in biases],
        "n_predict": limit,
        "max_tokens": limit,
        "n_ctx": context,
        "n_keep": 0,
        "n_discard": 0,
        "n_probs": request.top_logprobs or 0,
        "min_tokens": request.min_tokens,
        "min_keep": 0,
        "ignore_eos": not request.stop_at_eog,
        "stop": list(request.stop),
        "stream": is_stream,
        "grammar": "" if request.grammar is None else request.grammar.text,
    }
