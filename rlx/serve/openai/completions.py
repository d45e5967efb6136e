"""/v1/completions and /completion: the continuation of texts. Server stage, OpenAI's and llama-server's paths."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring
from math import isnan
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.engine.request.context import Context
from rlx.engine.request.output import candidate
from rlx.runners import TokenLogprob
from rlx.serve.answers import answered
from rlx.serve.errors import invalid
from rlx.serve.events import Asked, Choice, Delta, End, Finished, Progress, TokenInfo
from rlx.serve.fields import most_tokens, named_grammar, text_grammar
from rlx.serve.http import in_thread, new_router, while_connected
from rlx.serve.openai.bodies import CompletionBody, MediaPrompt
from rlx.serve.openai.common import OpenAIWriter, asked_fields, progress_dict, timings_dict, usage_dict
from rlx.serve.openai.native import NativeWriter, verbose, verbose_end
from rlx.serve.prompts import filled_in, grammar_maker, media_prompt, prompt_ids, prompts

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

MAX_TOKENS = 16  # OpenAI's default for this path
MAX_CHOICES = 2048  # of all prompts of a request


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with.

    Attributes:
        text: the prompt.
        infos: its tokens with their log-probabilities, NaN for the first one. Empty if none are asked for.
    """

    text: str = ""
    infos: tuple[TokenInfo, ...] = ()


def router(server: Server) -> APIRouter:
    """`POST /completions` and `POST /completion`."""
    found = new_router(tags=["completions"])

    @found.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The continuation of texts."""
        if body.response_fields:
            raise invalid("response_fields", "this path does not have it", "use /completion")
        model = server.named(body.model)
        with named_grammar(body):
            asked = await in_thread(lambda: asked_of(model, body)) if body.echo else None
            echoes = await while_connected(request, _echoes(model, body, asked)) if asked else []

            def prepare() -> CompletionWriter:
                return CompletionWriter(model, body, asked or asked_of(model, body), echoes)

            return await answered(server, request, model, prepare, body.stream)

    @found.post("/completion")
    async def completion(body: CompletionBody, request: Request) -> Response:
        """The continuation of texts, in llama-server's form."""
        for name in ("echo", "best_of", "stream_options", "suffix"):
            if getattr(body, name):
                raise invalid(name, "this path does not have it", "use /v1/completions")
        model = server.named(body.model)

        def prepare() -> NativeWriter:
            return NativeWriter(model, body, asked_of(model, body, default=None))

        with named_grammar(body):
            return await answered(server, request, model, prepare, body.stream)

    return found


def asked_of(model: ServedModel, body: CompletionBody, default: int | None = MAX_TOKENS) -> list[Asked]:
    """The requests for the engine, one for each prompt.

    Args:
        default: maximum number of tokens where the body has none; None for no limit.

    Raises:
        ApiError: a value is out of its range, or fields contradict each other.
    """
    n, best = body.n or 1, body.best_of or body.n or 1
    if best < n:
        raise invalid("best_of", f"it is {best}, less than the {n} of n")
    if best > n and body.stream:
        raise invalid("best_of", "the best answers are known at the end only", "leave stream out")
    fields = asked_fields(model, body) | {"n": best, "grammar": grammar_maker(model, text_grammar(body))}
    logprobs = body.n_probs if body.logprobs is None else body.logprobs
    if logprobs is None and best > n:
        logprobs = 0
    limit = default
    if (body.max_tokens, body.n_predict) != (None, None):
        limits = (("max_tokens", body.max_tokens), ("n_predict", body.n_predict))
        limit = most_tokens(*limits, at_least=body.min_tokens, least=0)
    elif default is not None and (body.min_tokens or 0) > default:
        raise invalid("min_tokens", f"it is {body.min_tokens}, more than {default}, the default of max_tokens")
    found = _prompts(model, body)
    if len(found) * best > MAX_CHOICES:
        raise invalid("prompt", f"{len(found)} prompts with {best} answers each, at most {MAX_CHOICES} are computed")
    return [model.asked(prompt, limit, top_logprobs=logprobs, **fields) for prompt in found]


def _prompts(model: ServedModel, body: CompletionBody) -> list[Context]:
    found = prompts(body.prompt, "prompt")
    if body.suffix:
        if len(found) != 1 or not isinstance(found[0], str):
            raise invalid("suffix", "it needs a prompt that is one text")
        return [model.checked(filled_in(model, found[0], body.suffix))]
    adds = body.add_special_tokens is not False
    names = ["prompt"] if len(found) == 1 else [f"prompt[{i}]" for i in range(len(found))]
    return [
        model.checked(
            media_prompt(model, each, name, adds)
            if isinstance(each, MediaPrompt)
            else prompt_ids(model, each, name, adds)
        )
        for each, name in zip(found, names, strict=True)
    ]


async def _echoes(model: ServedModel, body: CompletionBody, asked: Sequence[Asked]) -> list[Echo]:
    """The beginnings of the answers to each prompt, each computed when the one before is there."""
    found = []
    for given, each in zip(prompts(body.prompt, "prompt"), asked, strict=True):
        found.append(await in_thread(partial(_echo, model, given, each)))
    return found


def _echo(model: ServedModel, given: Any, asked: Asked) -> Echo:
    context = asked.request.ids
    assert isinstance(context, Context)
    text = given if isinstance(given, str) else model.tokenizer.decode(context.ids)
    if asked.request.top_logprobs is None:
        return Echo(text)
    steps = model.without_adapter().score_steps(context, asked.request.top_logprobs)
    infos = [
        TokenInfo(candidate(model.tokenizer, step.token, step.logprob or 0.0), step.top_logprobs) for step in steps
    ]
    first = candidate(model.tokenizer, context.ids[0], 0.0)
    return Echo(text, (TokenInfo(TokenLogprob(first.token, first.text, float("nan"), first.bytes)), *infos))


class CompletionWriter(OpenAIWriter):
    """Writes the continuations of texts.

    Args:
        model: computes it.
        body: what is asked for.
        asked: what is to be generated, one for each prompt.
        echoes: what the answers to each prompt begin with; none if that is nothing.
    """

    body: CompletionBody

    def __init__(
        self, model: ServedModel, body: CompletionBody, asked: Sequence[Asked], echoes: Sequence[Echo] = ()
    ) -> None:
        super().__init__(model, body, asked, "cmpl", "text_completion", (b',"text":', b""))
        self._echoes = echoes or [Echo()] * len(asked)
        self._has_logs = (body.logprobs, body.n_probs) != (None, None)
        self._logs = [Logprobs(self._as_ids) for _ in self.choices]
        self._ids = bool(body.return_token_ids or body.return_tokens)

    # ---------------------------------------------------------------------------------------------- streams

    def first(self) -> bytes:
        if not self.body.echo:
            return b""
        every = [echo for asked, echo in zip(self.asked, self._echoes, strict=True) for _ in range(asked.n)]
        return b"".join(self._piece(i, echo.text, echo.infos) for i, echo in enumerate(every))

    def _delta(self, delta: Delta) -> bytes:
        if not (self._has_logs or self._ids):
            if not delta.text:
                return b""
            return self._starts[delta.index] + encode_basestring(delta.text).encode() + self._tail
        more = {"token_ids": delta.tokens} if self._ids else {}
        return self._piece(delta.index, delta.text, delta.logprobs, **more)

    def _piece(self, index: int, text: str, infos: Sequence[TokenInfo], **more: Any) -> bytes:
        logs = self._logs[index].of(infos) if self._has_logs and infos else None
        choice = {"index": index, "text": text, "logprobs": logs, "finish_reason": None, **more}
        return self._chunk([choice], {})

    def _ended(self, end: End, more: dict[str, Any]) -> bytes:
        choice = {"index": end.index, "text": "", "logprobs": None, "finish_reason": end.finish_reason}
        return self._chunk([{**choice, "stop_reason": end.stop}], more)

    def _verbose_end(self, end: End, finished: Finished) -> dict[str, Any]:
        return verbose_end(self, end, finished)

    def _progress(self, progress: Progress) -> bytes:
        if not self.body.return_progress:
            return b""
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return self._chunk([choice], {"prompt_progress": progress_dict(progress)})

    # ---------------------------------------------------------------------------------------------- in one piece

    def whole(self) -> dict[str, Any]:
        n, best = self.body.n or 1, self.body.best_of or self.body.n or 1
        kept = [
            choice for i in range(len(self._echoes)) for choice in _best(self.choices[i * best : (i + 1) * best], n)
        ]
        return {
            **self._head,
            "choices": [self._choice(choice, i, self._echoes[i // n]) for i, choice in enumerate(kept)],
            "usage": usage_dict(self.finished),
            "timings": timings_dict(self.finished),
            **verbose(self),
        }

    def _choice(self, choice: Choice, index: int, echo: Echo) -> dict[str, Any]:
        found = {
            "index": index,
            "text": echo.text + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }
        if self._has_logs:
            found["logprobs"] = Logprobs(self._as_ids).of([*echo.infos, *choice.logprobs])
        if self._ids:
            found["token_ids"] = choice.tokens
        return found


def _best(choices: list[Choice], n: int) -> list[Choice]:
    """The `n` choices with the highest mean log-probability."""

    def mean(choice: Choice) -> float:
        return sum(info.chosen.logprob for info in choice.logprobs) / max(1, len(choice.logprobs))

    return choices if len(choices) == n else sorted(choices, key=mean, reverse=True)[:n]


class Logprobs:
    """Makes the lists of one choice; of a stream piece by piece.

    Args:
        as_ids: write `token_id:15` in place of a token's text.
    """

    def __init__(self, as_ids: bool) -> None:
        self._as_ids, self._offset = as_ids, 0
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def of(self, infos: Iterable[TokenInfo]) -> dict[str, Any]:
        """The lists of some tokens. The first token of a prompt has no log-probability (NaN): it is null there.

        Offsets count characters from the beginning of the first token that was given; the tokens of one character have
        the same.
        """
        tokens, values, tops, offsets = list[str](), list[float | None](), list[Any](), list[int]()
        for info in infos:
            known = not isnan(info.chosen.logprob)
            tokens.append(self._name(info.chosen))
            values.append(info.chosen.logprob if known else None)
            tops.append({self._name(each): each.logprob for each in info.top} if known else None)
            offsets.append(self._offset)
            self._offset += len(self._decode(info.chosen.bytes))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, found: TokenLogprob) -> str:
        return f"token_id:{found.token}" if self._as_ids else found.text
