"""Requests in a trace: a track shows one request after the other, with its queue, prompt, decode and pauses.

Runners stage, under `executor.py`, which calls these functions at each change of phase. While no trace is recorded they
do nothing. A request gets the first track that was free when it was submitted: there are as many tracks as requests
at the same time.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlx import tracing
from rlx.engine.loop.job import Job
from rlx.tracing import REQUESTS, Slice, Trace


@dataclass
class _Tracks:
    """When each track becomes free, in nanoseconds; None while a request has it."""

    ends: list[int | None] = field(default_factory=list)

    def take(self, start: int) -> int:
        """The first track that is free since `start`, counted from 1."""
        for i, end in enumerate(self.ends):
            if end is not None and end <= start:
                self.ends[i] = None
                return i + 1
        self.ends.append(None)
        return len(self.ends)


@dataclass
class JobTrack:
    """The track of a job.

    Attributes:
        submitted: when it was handed over, in nanoseconds.
        paused: since when it is paused.
    """

    trace: Trace
    number: int
    submitted: int
    paused: int | None = None

    def add(self, name: str, start: int, end: int, **args: Any) -> None:
        self.trace.add(Slice(REQUESTS, self.number, name, "request", start, end, json.dumps(args) if args else ""))


_tracks: weakref.WeakKeyDictionary[Trace, _Tracks] = weakref.WeakKeyDictionary()


def received(job: Job) -> None:
    """The loop has taken a new job."""
    trace = tracing.active()
    if trace is None or trace.is_full:
        return
    submitted = _nanoseconds(job.record.submitted)
    number = _tracks.setdefault(trace, _Tracks()).take(submitted)
    trace.name_track(REQUESTS, number, f"requests {number}")
    job.track = JobTrack(trace, number, submitted)


def started(job: Job) -> None:
    """A job has got its sequence."""
    if job.track is not None:
        job.track.add("queue", job.track.submitted, _nanoseconds(job.record.started))


def computed(rows: Iterable[tuple[Job, int]], start: float) -> None:
    """A step has computed rows of prompts, from `start` until now.

    Args:
        rows: each job with the number of its rows.
    """
    if tracing.active() is None:
        return
    end = time.perf_counter_ns()
    for job, count in rows:
        if job.track is not None:
            job.track.add("prompt chunk", _nanoseconds(start), end, tokens=count, done=job.done)


def paused(job: Job) -> None:
    """A job has made room for others."""
    if job.track is not None:
        job.track.paused = time.perf_counter_ns()


def resumed(job: Job) -> None:
    """A paused job goes on, or has ended."""
    if job.track is not None and job.track.paused is not None:
        job.track.add("paused", job.track.paused, time.perf_counter_ns())
        job.track.paused = None


def ended(job: Job, error: BaseException | None) -> None:
    """A job has ended, in whatever way."""
    track, record = job.track, job.record
    if track is None:
        return
    resumed(job)
    end = max(time.perf_counter_ns(), _nanoseconds(record.ended))
    starts = [track.submitted, *(_nanoseconds(each) for each in (record.started, record.answered) if each is not None)]
    if len(starts) == 1:
        track.add("queue", track.submitted, end)
    if len(starts) > 1:
        track.add("prompt", starts[1], [*starts, end][2], tokens=len(job.prompt), cached=record.cached)
    if len(starts) > 2:
        track.add("decode", starts[2], end, tokens=len(job.tokens))
    facts = {"prompt": len(job.prompt), "cached": record.cached, "answer": len(job.tokens), "priority": job.priority}
    failed = {"error": f"{type(error).__name__}: {error}"} if error is not None else {}
    track.add(f"request {job.number}", track.submitted, end, **facts, **failed)
    _tracks[track.trace].ends[track.number - 1] = end
    job.track = None


def _nanoseconds(seconds: float | None) -> int:
    return time.perf_counter_ns() if seconds is None else int(seconds * 1e9)
