"""The events of requests that were handed to the engine loop.

Server stage, under `model.py`. It splits the texts of choices into reasoning, answer and tool calls, and counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from rlx.engine.request.output import candidate
from rlx.runners import FinishReason, Step
from rlx.runners.together import Together
from rlx.serve.generation import (
    Delta,
    End,
    Event,
    Finished,
    GenerationSpec,
    Progress,
    Reason,
    Timings,
    TokenInfo,
    Usage,
)
from rlx.serve.record import Note

if TYPE_CHECKING:
    from rlx.runners import Handle
    from rlx.text.answer import AnswerPart
    from rlx.text.tokenizer import Tokenizer
    from rlx.text.tool_calls import ToolCallDelta

PROGRESS_SECONDS = 1.0
FULL = (FinishReason.LENGTH, FinishReason.CONTEXT)


class Answering(AsyncIterator[Event]):
    """The events of requests as they come; the last one is `Finished`.

    Closing it aborts what is not complete, at once.

    Args:
        tokenizer: of the model.
        specs: what is computed.
        together: their requests, one a choice.
        note: called once when they are over, with the error if there is one.
    """

    _closed = True  # until `__init__` is through

    def __init__(self, tokenizer: Tokenizer, specs: Sequence[GenerationSpec], together: Together, note: Note) -> None:
        self._together = together
        self._note: Note | None = note
        own = [spec for spec in specs for _ in range(spec.n)]
        self._choices = [
            _Reader(tokenizer, spec, i, handle)
            for i, (spec, handle) in enumerate(zip(own, together.handles, strict=True))
        ]
        self._firsts = [sum(spec.n for spec in specs[:i]) for i in range(len(specs))]
        self._waiting: list[Event] = []  # what a batch has beyond the event that was asked for
        self._began = self._complete = False
        self._closed = False

    async def __anext__(self) -> Event:
        if not self._waiting:
            self._waiting = (await self.batch())[::-1]
            if not self._waiting:
                raise StopAsyncIteration
        return self._waiting.pop()

    async def batch(self) -> list[Event]:
        """The next events, all that are there at the same time; none at the end."""
        try:
            found = await self._next()
        except BaseException as error:
            self.close(error)
            raise
        if not found:
            self.close()
        return found

    def close(self, error: BaseException | None = None) -> None:
        """Aborts what is not complete. May be called again.

        Args:
            error: why it ends before its time.
        """
        if not self._closed:
            self._closed = True
            self._together.abort()
            self._over(error)

    def _over(self, error: BaseException | None = None) -> None:
        note, self._note = self._note, None
        if note is not None:
            note(error)

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def __del__(self) -> None:
        self.close()

    async def _next(self) -> list[Event]:
        """The next events. No generator: one would hold this object, which must end with its last reader."""
        if self._complete:
            return []
        news = await self._together.news(PROGRESS_SECONDS)
        if news is None:
            return [self._progress()]
        if not news:
            self._complete = True
            self._over()
            return [self._finished()]
        events: list[Event] = [] if self._began else [self._progress()]
        self._began = True
        for index, steps in news:
            events += self._choices[index].read(steps)
        return events

    def _progress(self) -> Progress:
        found = max((handle.stats for handle in self._together.handles), key=lambda each: each.done_tokens)
        ms = 1000 * (found.queued_s + found.prompt_s)
        return Progress(found.prompt_tokens, found.cached_tokens, found.done_tokens, ms)

    def _finished(self) -> Finished:
        """The numbers of all choices; those of a prompt are of its first choice, which computes it for the others."""
        every = [handle.stats for handle in self._together.handles]
        firsts, tokens = [every[i] for i in self._firsts], sum(each.tokens for each in every)
        prompt, cached = sum(each.prompt_tokens for each in firsts), sum(each.cached_tokens for each in firsts)
        timings = Timings(
            queue_ms=1000 * min(each.queued_s for each in firsts),
            prompt_ms=1000 * sum(each.prompt_s for each in firsts),
            prompt_tokens=prompt - cached,
            decode_ms=1000 * max(each.decode_s for each in every),
            decode_tokens=tokens,
            decode_steps=sum(max(0, each.tokens - 1) for each in every),
            cached_tokens=cached,
        )
        return Finished(Usage(prompt, cached, tokens, sum(each.reasoning for each in self._choices)), timings)


class _Reader:
    """Makes events of the steps of one choice.

    Attributes:
        reasoning: how many tokens came before the answer, if there was any reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, spec: GenerationSpec, index: int, handle: Handle) -> None:
        self._tokenizer, self._spec, self._index, self._handle = tokenizer, spec, index, handle
        self._parser = spec.parser() if spec.parser is not None else None
        self._count, self._reasons, self._answers, self.reasoning = 0, False, False, 0

    def read(self, steps: Sequence[Step]) -> list[Event]:
        """The events of some steps; without any, those of the end."""
        if not steps:
            return self._end()
        return [self._delta(step) for step in steps]

    def _delta(self, step: Step) -> Delta:
        logprobs = () if self._spec.top_logprobs is None else (info(self._tokenizer, step),)
        if self._parser is None:
            return Delta(self._index, step.text, tokens=(step.token,), logprobs=logprobs)
        text, thinking, calls = _joined(self._parser.push(step.text)) if step.text else ("", "", ())
        self._note(bool(thinking), bool(text or calls))
        return Delta(self._index, text, thinking, calls, (step.token,), logprobs)

    def _note(self, thinks: bool, answers: bool) -> None:
        """Counts the tokens of reasoning: all before the answer."""
        self._reasons |= thinks
        self._answers |= answers
        self._count += 1
        if self._reasons and not self._answers:
            self.reasoning = self._count

    def _end(self) -> list[Event]:
        stopping, events = self._handle.stopping, list[Event]()
        stop = stopping.stopped_by
        rest = stop if self._spec.include_stop and isinstance(stop, str) else ""
        called = False
        if self._parser is not None:
            parts = (self._parser.push(rest) if rest else []) + self._parser.finish()
            text, thinking, calls = _joined(parts)
            events += [Delta(self._index, text, thinking, calls)] if parts else []
            called = self._parser.called
        elif rest:
            events.append(Delta(self._index, rest))
        own = stop if isinstance(stop, str) or stop in self._spec.stop_ids else None
        reason: Reason = "length" if stopping.reason in FULL else "tool_calls" if called else "stop"
        return [*events, End(self._index, reason, own)]


def _joined(parts: Sequence[AnswerPart]) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
    """Text, reasoning and pieces of tool calls."""
    if len(parts) == 1 and parts[0].tool_call is None:
        return parts[0].text, parts[0].thinking, ()
    text, thinking = "".join(part.text for part in parts), "".join(part.thinking for part in parts)
    return text, thinking, tuple(part.tool_call for part in parts if part.tool_call is not None)


def info(tokenizer: Tokenizer, step: Step) -> TokenInfo:
    """The log-probabilities of a step."""
    assert step.logprob is not None
    return TokenInfo(candidate(tokenizer, step.token, step.logprob), step.top_logprobs)
