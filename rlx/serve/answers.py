"""From the events of a generation to the bytes of an answer, in one piece or as a stream.

Server stage, below the APIs. `Asked` is what all of them are translated to, an event what their answers are translated
from. `EventStream` reads the requests that the engine loop computes: it splits the texts of choices into reasoning,
answer and tool calls, and counts. Each API has a `Writer`: what an event becomes in its form. `answered` is what every
path for answers calls. What happens at the same time is sent at once.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rlx.engine.loop.handle import RequestGroup, candidate
from rlx.json_file import JsonObject
from rlx.runners import FinishReason, Request, Step, TokenLogprob
from rlx.serve.errors import ApiError, api_error
from rlx.serve.http import EVENTS, Stream, event, in_thread, json_response, while_connected
from rlx.text.answer import joined

if TYPE_CHECKING:
    from rlx.grammar import Grammar
    from rlx.runners import Handle
    from rlx.serve.model import ServedModel
    from rlx.serve.record import Note
    from rlx.serve.server import Server
    from rlx.text.answer import AnswerParser
    from rlx.text.tokenizer import Tokenizer
    from rlx.text.tool_calls import ToolCallDelta


PROGRESS_SECONDS = 1.0
FULL = (FinishReason.LENGTH, FinishReason.CONTEXT)

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Asked:
    """A request for the engine, and how its answer is read.

    Attributes:
        request: as the engine takes it. With a seed, choice i has the seed `seed + i`.
        limit: maximum number of tokens of a choice; None for what the context has room for.
        n: number of choices.
        parser: makes what splits a choice; None where all text is the answer.
        include_stop: whether the text ends with the stop string that ended it.
        grammar: makes the grammar that the text must follow, which takes long; None for free text.
    """

    request: Request
    limit: int | None = None
    n: int = 1
    parser: Callable[[], AnswerParser] | None = None
    include_stop: bool = False
    grammar: Callable[[], Grammar | None] | None = None


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A generated token with its log-probability, under the model's own distribution.

    Attributes:
        chosen: the token.
        top: the likeliest tokens at its position, the likeliest first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of one token to a choice; all texts may be empty.

    Attributes:
        index: the choice.
        text, thinking: answer and reasoning.
        tool_calls: pieces of tool calls.
        tokens: the new token ids. The last delta may have none: it then has text that was held back.
        logprobs: one for each of `tokens` if the request asks for them.
    """

    index: int
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """A choice is complete.

    Attributes:
        index: the choice.
        finish_reason: `stop` for the model's own end, a stop string or a stop id, `length`, or `tool_calls`.
        stop: the stop string, or the id of `Request.stop_ids`, that ended it; None for other ends.
    """

    index: int
    finish_reason: Reason
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt is computed; comes once before the first delta, and about once a second while nothing else
    does.

    Attributes:
        total: tokens of the prompt.
        cached: how many of them were found in the prefix cache.
        processed: how many are there, cached ones included.
        ms: milliseconds since the request was handed to the engine.
    """

    total: int
    cached: int
    processed: int
    ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices are complete; always the last event. It has the numbers of tokens, and where the time went.

    Attributes:
        prompt_tokens: with the rows of images. The prompt counts once, however many choices there are.
        cached_tokens: how many of them were found in the prefix cache.
        completion_tokens: of all choices, reasoning included.
        reasoning_tokens: how many of these are reasoning.
        decode_steps: how many of these came after the first of their choice: what `decode_ms` was needed for.
        queue_ms: before the engine began with it.
        prompt_ms: of the prompt, without cached tokens.
        decode_ms: after the first token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    decode_steps: int = 0
    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0


Event = Progress | Delta | End | Finished


@dataclass
class Choice:
    """A complete choice; the fields are those of `Delta` and `End`."""

    index: int
    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    finish_reason: Reason = "stop"
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Adds what one token has added."""
        self.text += delta.text
        self.thinking += delta.thinking
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        for call in delta.tool_calls:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(call)
            else:
                begun = self.tool_calls[call.index]
                self.tool_calls[call.index] = replace(begun, arguments=begun.arguments + call.arguments)


class EventStream:
    """The events of requests as they come; the last one is `Finished`.

    Events of different choices interleave. The choices of the second request follow those of the first in number, and
    so on. Closing it aborts what is not complete, at once.

    Args:
        tokenizer: of the model.
        asked: what is computed.
        together: the requests, one a choice.
        note: called once when they are over, with the error if there is one.
    """

    _closed = True  # until `__init__` is through

    def __init__(self, tokenizer: Tokenizer, asked: Sequence[Asked], together: RequestGroup, note: Note) -> None:
        self._together, self._note = together, note
        every = [each for each in asked for _ in range(each.n)]
        self._choices = [
            _ChoiceReader(tokenizer, each, i, handle)
            for i, (each, handle) in enumerate(zip(every, together.handles, strict=True))
        ]
        self._firsts = [sum(each.n for each in asked[:i]) for i in range(len(asked))]
        self._began = self._closed = False

    async def batch(self) -> list[Event]:
        """The next events, all that are there at the same time; none at the end.

        No generator: one would hold this object, which must end with its last reader.
        """
        if self._closed:
            return []
        try:
            news = await self._together.news(PROGRESS_SECONDS)
        except BaseException as error:
            self.close(error)
            raise
        if news is None:
            return [self._progress()]
        if not news:
            self.close()
            return [self._finished()]
        events: list[Event] = [] if self._began else [self._progress()]
        self._began = True
        for index, steps in news:
            choice = self._choices[index]
            if not steps:
                events += choice.end()
            elif choice.is_plain:
                events += [Delta(index, step.text, tokens=(step.token,)) for step in steps]
            else:
                events += [choice.delta(step) for step in steps]
        return events

    def close(self, error: BaseException | None = None) -> None:
        """Aborts what is not complete. May be called again.

        Args:
            error: why it ends before its time.
        """
        if not self._closed:
            self._closed = True
            self._together.abort()
            self._note(error)

    def __del__(self) -> None:
        self.close()

    def _progress(self) -> Progress:
        found = max((handle.stats for handle in self._together.handles), key=lambda each: each.done_tokens)
        ms = 1000 * (found.queued_s + found.prompt_s)
        return Progress(found.prompt_tokens, found.cached_tokens, found.done_tokens, ms)

    def _finished(self) -> Finished:
        """The numbers of all choices; those of a prompt are of its first choice, which computes it for the others."""
        every = [handle.stats for handle in self._together.handles]
        firsts = [every[i] for i in self._firsts]
        return Finished(
            prompt_tokens=sum(each.prompt_tokens for each in firsts),
            cached_tokens=sum(each.cached_tokens for each in firsts),
            completion_tokens=sum(each.tokens for each in every),
            reasoning_tokens=sum(each.reasoning for each in self._choices),
            decode_steps=sum(max(0, each.tokens - 1) for each in every),
            queue_ms=1000 * min(each.queued_s for each in firsts),
            prompt_ms=1000 * sum(each.prompt_s for each in firsts),
            decode_ms=1000 * max(each.decode_s for each in every),
        )


class _ChoiceReader:
    """Makes events of the steps of one choice.

    Attributes:
        is_plain: whether a step is nothing but text.
        reasoning: how many tokens came before the answer, if there was any reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, asked: Asked, index: int, handle: Handle) -> None:
        self._tokenizer, self._asked, self._index, self._handle = tokenizer, asked, index, handle
        self._parser = asked.parser() if asked.parser is not None else None
        self.is_plain = self._parser is None and asked.request.top_logprobs is None
        self._count, self._reasons, self._answers, self.reasoning = 0, False, False, 0

    def delta(self, step: Step) -> Delta:
        """The addition of a step."""
        logprobs = () if self._asked.request.top_logprobs is None else (info(self._tokenizer, step),)
        if self._parser is None:
            return Delta(self._index, step.text, tokens=(step.token,), logprobs=logprobs)
        text, thinking, calls = joined(self._parser.push(step.text)) if step.text else ("", "", ())
        self._count += 1
        self._reasons |= bool(thinking)
        self._answers |= bool(text or calls)
        if self._reasons and not self._answers:  # all tokens before the answer are reasoning
            self.reasoning = self._count
        return Delta(self._index, text, thinking, calls, (step.token,), logprobs)

    def end(self) -> list[Event]:
        """The events of the end."""
        stop, events = self._handle.stopped_by, list[Event]()
        rest = stop if self._asked.include_stop and isinstance(stop, str) else ""
        called = False
        if self._parser is not None:
            parts = (self._parser.push(rest) if rest else []) + self._parser.finish()
            text, thinking, calls = joined(parts)
            events += [Delta(self._index, text, thinking, calls)] if parts else []
            called = self._parser.called
        elif rest:
            events.append(Delta(self._index, rest))
        own = stop if isinstance(stop, str) or stop in self._asked.request.stop_ids else None
        reason: Reason = "length" if self._handle.finish_reason in FULL else "tool_calls" if called else "stop"
        return [*events, End(self._index, reason, own)]


def info(tokenizer: Tokenizer, step: Step) -> TokenInfo:
    """The log-probabilities of a step."""
    assert step.logprob is not None
    return TokenInfo(candidate(tokenizer, step.token, step.logprob), step.top_logprobs)


log = logging.getLogger("rlx.serve")


class Writer(ABC):
    """Writes one answer in the form of an API.

    Args:
        asked: what is to be generated.

    Attributes:
        media_type: of a stream.
        ping: how many seconds a stream may be silent while the prompt is computed; None for what the server's options
            say.
        table: kind of event -> the bytes that one becomes in a stream, perhaps none.
    """

    media_type = EVENTS
    ping: float | None = None
    table: Mapping[type, Callable[[Any], bytes]]

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked

    def first(self) -> bytes:
        """The bytes that come before anything is computed."""
        return b""

    @abstractmethod
    def waiting(self, progress: Progress) -> bytes:
        """The sign that the prompt is still computed, so that nobody takes the connection for dead."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The end of an answer that fails after it has begun."""

    def last(self) -> bytes:
        """The end of an answer that is complete."""
        return b""

    @abstractmethod
    def add(self, event: Event) -> None:
        """Takes an event of an answer in one piece."""

    @abstractmethod
    def whole(self) -> Any:
        """The answer in one piece."""


class ObjectWriter(Writer):
    """Writes a stream of objects, of one choice; an answer in one piece is made of the same objects.

    Attributes:
        ended: how the choice has ended.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        super().__init__(asked)
        self.ended = End(0, "stop")
        self.objects: dict[type, Callable[[Any], Iterable[JsonObject]]] = {
            Delta: self.delta, End: self.end, Finished: self.finished, Progress: lambda progress: (),
        }  # fmt: skip
        self.table = dict.fromkeys(self.objects, lambda event: self._joined(self.push(event)))

    def push(self, event: Event) -> Iterable[JsonObject]:
        """The objects that one event becomes. All of them must be read."""
        return self.objects[type(event)](event)

    @abstractmethod
    def delta(self, delta: Delta) -> Iterable[JsonObject]:
        """The objects of new tokens."""

    def end(self, end: End) -> Iterable[JsonObject]:
        """The objects of the end of the choice."""
        self.ended = end
        return ()

    @abstractmethod
    def finished(self, numbers: Finished) -> Iterable[JsonObject]:
        """The last objects of an answer that is complete."""

    def first(self) -> bytes:
        return self._joined(self.begin())

    def failed(self, error: ApiError) -> bytes:
        return self._joined(self.fail(error))

    def add(self, event: Event) -> None:
        for each in self.push(event):
            self.keep(each)

    def begin(self) -> Iterable[JsonObject]:
        """The first objects."""
        return ()

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[JsonObject]:
        """The last objects of an answer that cannot be completed."""

    def keep(self, found: JsonObject) -> None:
        """Takes an object of an answer in one piece."""

    def written(self, found: JsonObject) -> bytes:
        """The bytes of an object."""
        return event(found, found["type"])

    def _joined(self, objects: Iterable[JsonObject]) -> bytes:
        return b"".join(map(self.written, objects))


async def answered(
    server: Server, request: HttpRequest, model: ServedModel, prepare: Callable[[], Writer], stream: bool | None
) -> Response:
    """The answer to a request.

    Args:
        prepare: makes the writer, in a worker thread.
        stream: whether the answer comes as it is generated.

    Raises:
        ApiError, RlxError: of `prepare`; or a request is invalid or refused. Of a whole answer also those of the
            generation: those of a stream are events.
        ClientGone: the client went away before a whole answer.
    """

    def begin() -> tuple[Writer, EventStream | None]:
        writer = prepare()
        return writer, None if writer.asked[0].grammar else model.submit(writer.asked)

    writer, events = await to_thread.run_sync(begin)
    if events is None:
        grammar = await model.grammar_of(writer.asked[0])  # all follow the same one
        writer.asked = [replace(each, request=replace(each.request, grammar=grammar)) for each in writer.asked]
        events = await in_thread(lambda: model.submit(writer.asked))
    if stream:
        return Stream(stream_of(events, writer, writer.ping or server.options.ping), writer.media_type)
    return json_response(await while_connected(request, _completed(events, writer)))


async def _completed(events: EventStream, writer: Writer) -> Any:
    """The answer in one piece."""
    try:
        while batch := await events.batch():
            for each in batch:
                writer.add(each)
        return writer.whole()
    finally:
        events.close()


async def stream_of(events: EventStream, writer: Writer, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream.

    Args:
        events: closed with it.
        ping_seconds: how long it may be silent while the prompt is computed.
    """
    try:
        sent, table = time.monotonic(), writer.table
        if first := writer.first():
            yield first
        while batch := await events.batch():
            piece = b"".join([table[type(each)](each) for each in batch])
            if not piece and isinstance(batch[0], Progress) and time.monotonic() - sent >= ping_seconds:
                piece = writer.waiting(batch[0])
            if piece:
                yield piece
                sent = time.monotonic()
        if last := writer.last():
            yield last
    except Exception as error:
        found = api_error(error)
        if found.status == 500:
            log.error("a stream failed", exc_info=error)
        yield writer.failed(found)
    finally:
        events.close()
