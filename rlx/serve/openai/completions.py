"""/v1/completions and /completion: the continuation of texts. Server stage, OpenAI's and llama-server's paths.

`OpenAIWriter` is also that of `chat.py`: what ends an answer, and what it says beside the text. The answer of
`/completion` has llama-server's form; others have it as `__verbose`, where they are asked. The fields are the same; by
default `/completion` has no limit of tokens.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from json.encoder import encode_basestring
from math import isinf, isnan
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

import rlx
from rlx.engine.loop.handle import candidate
from rlx.engine.request import Context
from rlx.runners import TokenLogprob
from rlx.sampling import SampleOpts
from rlx.serve.answers import Asked, Choice, Delta, End, Event, Finished, Progress, TokenInfo, Writer, answered
from rlx.serve.errors import ApiError, invalid, openai_body
from rlx.serve.fields import ending, most_tokens, named_grammar, sample_opts, text_grammar
from rlx.serve.http import DONE, comment, event, in_thread, json_bytes, new_router, while_connected
from rlx.serve.openai.bodies import CompletionBody, InfillBody, MediaPrompt
from rlx.serve.prompts import filled_in, grammar_maker, media_prompt, prompt_ids, prompts

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.openai.bodies import CommonFields
    from rlx.serve.server import Server


FINGERPRINT = f"rlx-{rlx.__version__}"


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
        piece = self._ended(self._last, more | verbose_end(self, self._last, finished))
        return piece + self._chunk([], usage | more) if self._with_usage else piece

    def _progress(self, progress: Progress) -> bytes:
        """The chunk that says how much of the prompt is computed, where it is asked for."""
        return b""

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": choices, **usage, **more})

    def waiting(self, progress: Progress) -> bytes:
        """A comment, which clients ignore."""
        return comment(f"{progress.processed} of {progress.total} prompt tokens")

    def failed(self, error: ApiError) -> bytes:
        return event(openai_body(error)) + DONE

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


class NativeWriter(OpenAIWriter):
    """Writes answers in llama-server's form.

    Args:
        model: computes it.
        body: what is asked for.
        asked: what is to be generated, one for each prompt.
    """

    def __init__(self, model: ServedModel, body: CommonFields, asked: Sequence[Asked]) -> None:
        super().__init__(model, body, asked, "cmpl", "completion", (b"", b""))
        self._each = [each for each in asked for _ in range(each.n)]  # the request of each choice
        self._prompts = [each.request.ids.ids for each in self._each if isinstance(each.request.ids, Context)]
        self._counts, self._ends = [0] * len(self.choices), list[End]()
        self._has_new_line = [False] * len(self.choices)

    def _end_of(self, end: End) -> bytes:
        self._ends.append(end)
        return b""

    def _delta(self, delta: Delta) -> bytes:
        self._count(delta.index, delta.text, len(delta.tokens))
        if not delta.text and not (delta.logprobs or (self.body.return_tokens and delta.tokens)):
            return b""
        choice = Choice(delta.index, delta.text, tokens=list(delta.tokens), logprobs=list(delta.logprobs))
        return event(self._native(choice, with_tokens=True))

    def _finish(self, finished: Finished) -> bytes:
        return b"".join(event(self._selected(self._over(end, finished))) for end in self._ends)

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
        return event({**self._native(Choice(0)), "prompt_progress": progress_dict(progress)})


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
    """`POST /completions`, `POST /completion` and `POST /infill`."""
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
        return await native(body, request)

    @found.post("/infill")
    async def infill(body: InfillBody, request: Request) -> Response:
        """What stands between two texts, in llama-server's form."""
        return await native(body, request)

    async def native(body: CompletionBody, request: Request) -> Response:
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
    if isinstance(body, InfillBody):
        before, extra = body.input_prefix + body.prompt, [(each.filename, each.text) for each in body.input_extra or ()]
        return [model.checked(filled_in(model, before, body.input_suffix, extra, ("input_prefix", "input_suffix")))]
    found = prompts(body.prompt, "prompt")
    if body.suffix:
        if len(found) != 1 or not isinstance(found[0][0], str):
            raise invalid("suffix", "it needs a prompt that is one text")
        return [model.checked(filled_in(model, found[0][0], body.suffix))]
    adds = body.add_special_tokens is not False
    return [
        model.checked((media_prompt if isinstance(each, MediaPrompt) else prompt_ids)(model, each, name, adds))
        for each, name in found
    ]


async def _echoes(model: ServedModel, body: CompletionBody, asked: Sequence[Asked]) -> list[Echo]:
    """The beginnings of the answers to each prompt, each computed when the one before is there."""
    found = []
    for (text, _), each in zip(prompts(body.prompt, "prompt"), asked, strict=True):
        found.append(await in_thread(partial(_echo, model, text, each)))
    return found


def _echo(model: ServedModel, prompt: Any, asked: Asked) -> Echo:
    context = asked.request.ids
    assert isinstance(context, Context)
    text = prompt if isinstance(prompt, str) else model.tokenizer.decode(context.ids)
    if asked.request.top_logprobs is None:
        return Echo(text)
    steps = model.runner.score_steps(context, asked.request.top_logprobs, adapter=model.adapter)
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

    def _piece(
        self, index: int, text: str = "", infos: Sequence[TokenInfo] = (), beside: Any = None, **more: Any
    ) -> bytes:
        """A chunk of one choice.

        Args:
            infos: of the tokens of the text, if there are any.
            beside: further fields of the chunk.
            more: further fields of the choice.
        """
        logs = self._logs[index].of(infos) if self._has_logs and infos else None
        choice = {"index": index, "text": text, "logprobs": logs, "finish_reason": None, **more}
        return self._chunk([choice], beside or {})

    def _ended(self, end: End, more: dict[str, Any]) -> bytes:
        return self._piece(end.index, beside=more, finish_reason=end.finish_reason, stop_reason=end.stop)

    def _progress(self, progress: Progress) -> bytes:
        if not self.body.return_progress:
            return b""
        return self._piece(0, beside={"prompt_progress": progress_dict(progress)})

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
