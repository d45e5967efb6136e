"""/completion: llama-server's own path for completions. Server stage, beside OpenAI's.

The fields are those of `/v1/completions`. The answer has llama-server's form. By default there is no limit of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.serve.errors import invalid
from rlx.serve.generation import Choice, Delta, End, Event, Finished, GenerationSpec, Progress, Timings
from rlx.serve.http import new_router
from rlx.serve.openai.bodies import CompletionBody
from rlx.serve.openai.common import Call, json_response, logprob_dicts, progress_dict, timings_dict
from rlx.serve.openai.completions import specs_of
from rlx.serve.openai.sse import Chunks
from rlx.serve.openai.structured import named_grammar
from rlx.serve.pieces import stream_of
from rlx.serve.streaming import Stream, event, json_bytes, while_connected

if TYPE_CHECKING:
    from rlx.serve.app import Server


def router(server: Server) -> APIRouter:
    """`POST /completion`."""
    found = new_router(tags=["completions"])

    @found.post("/completion")
    async def completion(body: CompletionBody, request: Request) -> Response:
        """The continuation of texts, in llama-server's form."""
        for name in ("echo", "best_of", "stream_options", "suffix"):
            if getattr(body, name):
                raise invalid(name, "this path does not have it", "use /v1/completions")
        model = server.named(body.model)
        call = Call(server, request, body, model, "cmpl", "completion")
        specs = await specs_of(call, body, default=None)
        chunks = NativeChunks(call, body, specs)
        with named_grammar(body):
            if body.stream:
                return Stream(stream_of(await model.generate(*specs), chunks, call.ping_seconds))
            answer = await while_connected(request, model.collect(*specs))
        each = [chunks.whole(choice, answer.timings) for choice in answer.choices]
        return json_response(each[0] if len(each) == 1 else each)

    return found


class NativeChunks(Chunks):
    """Makes whole answers and pieces of streams in llama-server's form.

    Args:
        call: the request.
        body: what it asks for.
        specs: what is generated, one for each prompt.
    """

    def __init__(self, call: Call, body: CompletionBody, specs: Sequence[GenerationSpec]) -> None:
        self._model, self._body = call.model, body
        self._prompts = [call.model.checked(spec.prompt).ids for spec in specs for _ in range(spec.n)]
        self._limits = [spec.max_tokens for spec in specs for _ in range(spec.n)]
        self._counts, self._ends = [0] * len(self._prompts), list[End]()

    def first(self) -> bytes:
        return b""

    def of(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            self._counts[event.index] += len(event.tokens)
            if not event.text and not (event.logprobs or (self._body.return_tokens and event.tokens)):
                return b""
            choice = Choice(event.index, event.text, tokens=list(event.tokens), logprobs=list(event.logprobs))
            return self._event(self._piece(choice))
        if isinstance(event, End):
            self._ends.append(event)
            return b""
        if isinstance(event, Finished):
            return b"".join(self._event(self._ended(end, event.timings)) for end in self._ends)
        return self._progress(event)

    def last(self) -> bytes:
        """Nothing: the last piece says that it is."""
        return b""

    def whole(self, choice: Choice, timings: Timings) -> dict[str, Any]:
        """A complete answer."""
        self._counts[choice.index] = len(choice.tokens)
        end = End(choice.index, choice.finish_reason, choice.stop)
        found = {**self._ended(end, timings), **self._piece(choice), "stop": True}
        return {**found, "prompt": self._model.tokenizer.decode(self._prompts[choice.index])}

    def _piece(self, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": choice.index,
            "content": choice.text,
            "tokens": choice.tokens if self._body.return_tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._counts[choice.index],
            "tokens_evaluated": len(self._prompts[choice.index]),
        }
        if choice.logprobs:
            entries = logprob_dicts(choice.logprobs, as_id=False)
            ids = [info.chosen.token for info in choice.logprobs]
            found["completion_probabilities"] = [{"id": i, **each} for i, each in zip(ids, entries, strict=True)]
        return found

    def _ended(self, end: End, timings: Timings) -> dict[str, Any]:
        word = end.stop if isinstance(end.stop, str) else ""
        kind = "limit" if end.finish_reason == "length" else "word" if word else "eos"
        limit = self._limits[end.index]
        return {
            **self._piece(Choice(end.index)),
            "stop": True,
            "model": self._model.name,
            "stop_type": kind,
            "stopping_word": word,
            "truncated": False,
            "tokens_cached": len(self._prompts[end.index]) + self._counts[end.index],
            "generation_settings": {"n_predict": -1 if limit is None else limit, "n_ctx": self._model.runner.max_seq},
            "timings": timings_dict(timings),
        }

    def _progress(self, progress: Progress) -> bytes:
        if not self._body.return_progress:
            return b""
        return self._event({**self._piece(Choice(0)), "prompt_progress": progress_dict(progress)})

    def _event(self, found: dict[str, Any]) -> bytes:
        return event(json_bytes(found))
