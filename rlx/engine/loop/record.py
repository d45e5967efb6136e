"""The record of a request: its cost, where its time went, and its track in a trace.

Runners stage, under the engine loop, which notes a time at each change of phase. A track of a trace shows one request
after the other, with its queue, prompt, decode and pauses. A request gets the first track that was free when it was
submitted: there are as many tracks as requests at the same time.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.tracing import REQUESTS, Slice, Trace

if TYPE_CHECKING:
    from rlx.engine.loop.job import Job


@dataclass(frozen=True)
class RequestStats:
    """The cost of a request so far, or in all once it ended.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them the cache knew, so that they were not computed.
        tokens: tokens of the answer that were read.
        queued_s: seconds from its submission to the start of its prompt, the encoding of its images included.
        prompt_s: seconds from there to the first token of the answer.
        decode_s: seconds from there to the last token.
        done_tokens: how many tokens of the prompt are there, cached ones included: the progress of a long prompt.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    queued_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    done_tokens: int = 0


@dataclass(frozen=True)
class ActiveRequest:
    """A request that is being computed, without its texts.

    Attributes:
        number: the order of arrival.
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them the cache knew.
        done_tokens: how many of them are computed or were known.
        tokens: tokens of the answer so far.
        limit: maximum number of tokens of the answer.
        drafts: whether it is decoded speculatively.
        paused: whether it made room for others.
    """

    number: int
    prompt_tokens: int
    cached_tokens: int
    done_tokens: int
    tokens: int
    limit: int
    drafts: bool
    paused: bool


@dataclass
class Record:
    """When a request changed its phase: times in seconds of the loop's clock, None until then.

    Attributes:
        submitted: it was handed over. Written by the caller; the others by the loop.
        started: it got a sequence; its prompt is computed from here on.
        answered: its first token was there.
        last: its newest token was there.
        ended: it ended, in whatever way.
        cached: how many tokens of the prompt the cache knew.
        trace: the trace that shows it, if one was recorded when it was submitted; the next two are of its track there.
        track: the number of the track.
        paused: since when it is paused, in nanoseconds.
    """

    submitted: float | None = None
    started: float | None = None
    answered: float | None = None
    last: float | None = None
    ended: float | None = None
    cached: int = 0
    trace: Trace | None = None
    track: int = 0
    paused: int | None = None

    def stats(self, prompt: int, tokens: int, now: float, done: int = 0) -> RequestStats:
        """The stats of the request.

        Args:
            prompt, tokens: lengths of the prompt, and of the answer as far as it was read.
            done: how many tokens of the prompt its sequence has.
            now: the time, for a phase that goes on.
        """
        if self.submitted is None:
            return RequestStats(prompt)
        end = now if self.ended is None else self.ended
        started = end if self.started is None else self.started
        answered = end if self.answered is None else self.answered
        decode = 0.0 if self.last is None else max(0.0, self.last - answered)
        done = done if self.answered is None else prompt
        return RequestStats(prompt, self.cached, tokens, started - self.submitted, answered - started, decode, done)


# -- the track in a trace ----------------------------------------------------------------------------------------------


#: When each track of a trace becomes free, in nanoseconds; None while a request has it.
_tracks: weakref.WeakKeyDictionary[Trace, list[int | None]] = weakref.WeakKeyDictionary()


def received(job: Job, trace: Trace) -> None:
    """The loop has taken a new request, which gets the first track of a trace that is free since it was submitted."""
    if trace.is_full:
        return
    ends, submitted = _tracks.setdefault(trace, []), _nanoseconds(job.record.submitted)
    free = (i for i, end in enumerate(ends) if end is not None and end <= submitted)
    at = next(free, len(ends))
    ends[at : at + 1] = [None]
    job.record.trace, job.record.track = trace, at + 1
    trace.name_track(REQUESTS, at + 1, f"requests {at + 1}")


def started(job: Job) -> None:
    """A request has got its sequence."""
    _add(job.record, "queue", _nanoseconds(job.record.submitted), _nanoseconds(job.record.started))


def computed(rows: Iterable[tuple[Job, int]], start: float) -> None:
    """A step has computed rows of prompts, from `start` until now.

    Args:
        rows: each request with the number of its rows.
    """
    end = time.perf_counter_ns()
    for job, count in rows:
        _add(job.record, "prompt chunk", _nanoseconds(start), end, tokens=count, done=job.done)


def paused(job: Job) -> None:
    """A request has made room for others."""
    job.record.paused = time.perf_counter_ns()


def resumed(job: Job) -> None:
    """A paused request goes on, or has ended."""
    if job.record.paused is not None:
        _add(job.record, "paused", job.record.paused, time.perf_counter_ns())
        job.record.paused = None


def ended(job: Job, error: BaseException | None) -> None:
    """A request with a track has ended, in whatever way."""
    record, trace = job.record, job.record.trace
    assert trace is not None
    resumed(job)
    end, submitted = max(time.perf_counter_ns(), _nanoseconds(record.ended)), _nanoseconds(record.submitted)
    if record.started is None:
        _add(record, "queue", submitted, end)
    else:
        answered = end if record.answered is None else _nanoseconds(record.answered)
        _add(record, "prompt", _nanoseconds(record.started), answered, tokens=len(job.prompt), cached=record.cached)
        if record.answered is not None:
            _add(record, "decode", answered, end, tokens=len(job.tokens))
    facts: dict[str, Any] = {"prompt": len(job.prompt), "cached": record.cached, "answer": len(job.tokens)}
    facts["priority"] = job.request.priority
    if error is not None:
        facts["error"] = f"{type(error).__name__}: {error}"
    _add(record, f"request {job.number}", submitted, end, **facts)
    _tracks[trace][record.track - 1] = end
    record.trace = None


def _add(record: Record, name: str, start: int, end: int, **args: Any) -> None:
    """Adds a slice to the track of a request, if it has one."""
    if record.trace is not None:
        text = json.dumps(args) if args else ""
        record.trace.add(Slice(REQUESTS, record.track, name, "request", start, end, text))


def _nanoseconds(seconds: float | None) -> int:
    return time.perf_counter_ns() if seconds is None else int(seconds * 1e9)
