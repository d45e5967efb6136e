"""Traces: what rlx does and when, as a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Every part may use this module: `span` notes a slice of time of the current thread, and costs nothing while no trace is
recorded. Format: "Trace Event Format", the array form,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

The file is a JSON array with an event a line. Each write replaces the closing bracket by events and a new bracket. So
the file is valid JSON after every write, whatever ends the process. Events wait in memory until rlx has been idle for
a second, and up to 64 MiB while it computes: to write them takes time that the trace would show.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

from rlx import arguments
from rlx.errors import ArgumentError, OutputError, file_error

Detail = Literal["steps", "kernels"]

EVENTS = 1_000_000  # by default most events of a file, which are about 200 MB
PENDING_BYTES = 64 << 20
FLUSH_SECONDS = 1.0
PIECE = 4096  # events of one write

#: Processes of the trace: groups of tracks. In each, threads are numbered.
THREADS, WORKERS, REQUESTS = 1, 2, 3
_PROCESSES = {THREADS: "rlx (process {pid})", WORKERS: "workers", REQUESTS: "requests"}


class Slice(NamedTuple):
    """A slice of time on a track.

    Attributes:
        process, thread: the track; `process` is THREADS, WORKERS or REQUESTS.
        name: what was done.
        kind: its category.
        start, end: in nanoseconds of `time.perf_counter_ns`.
        args: further facts, as the text of a JSON object; "" for none.
    """

    process: int
    thread: int
    name: str
    kind: str
    start: int
    end: int
    args: str = ""


class _Later(NamedTuple):
    """Slices that are made when they are written, and the bytes that are held until then."""

    make: Callable[[], Iterable[Slice]]
    nbytes: int


class Trace:
    """A trace that is being recorded. Any thread may add to it.

    Args:
        path: the file; it is replaced.
        detail: "steps", or "kernels" for what each worker did in each step, too.
        limit: most events of the file. At the limit the recording ends; the last event says so.

    Attributes:
        path, detail, limit: as given.
        events: number of events written.
        seconds: how long it was recorded, once it is closed.
        phases: nanoseconds of the outermost spans of the thread that records, by name.
        steps: nanoseconds of the steps of programs.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, path: Path, detail: Detail, limit: int) -> None:
        self.path, self.detail, self.limit = path, detail, limit
        self.events, self.seconds, self.steps, self.phases = 0, 0.0, 0, Counter[str]()
        self._error: OSError | None = None
        self._pending: list[Slice | _Later | str] = []
        self._bytes, self._full, self._closed = 0, False, threading.Event()
        self._named: set[tuple[int, int]] = set()
        self._lock = threading.Lock()  # of the file
        self._depth = threading.local()
        try:
            self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 - open as long as the trace
            self._file.write(b"[\n]\n")
        except OSError as error:
            raise file_error(OutputError, "the trace cannot be written", error, path) from error
        self._end = 2  # where the closing bracket stands
        self._owner = threading.get_ident()
        self.start = self._last = time.perf_counter_ns()
        self._thread = threading.Thread(target=self._watch, name="rlx-trace", daemon=True)
        self._thread.start()

    # -- adding -------------------------------------------------------------------------------------------------------

    def add(self, found: Slice) -> None:
        """Adds a slice. Slices of a track nest: each lies within another one or beside it."""
        if not self._full:
            self._pending.append(found)
            self._last = found.end

    def later(self, make: Callable[[], Iterable[Slice]], nbytes: int) -> None:
        """Adds slices that are made when they are written.

        Args:
            make: makes them.
            nbytes: what it holds in memory until then.
        """
        if self._full:
            return
        self._pending.append(_Later(make, nbytes))
        self._last = time.perf_counter_ns()
        self._bytes += nbytes
        if self._bytes > PENDING_BYTES:
            with span("write the trace", "trace"):
                self.flush()

    def instant(self, name: str, **args: Any) -> None:
        """Adds a moment, with facts about the whole trace."""
        at = _microseconds(time.perf_counter_ns() - self.start)
        event = f'{{"ph":"i","s":"g","name":{_quoted(name)},"ts":{at},"pid":{THREADS},"tid":{self.here()},'
        self._pending.append(f'{event}"args":{json.dumps(args, default=str)}}}')

    def here(self) -> int:
        """The track of the current thread."""
        number, thread = threading.get_native_id(), threading.current_thread()
        self.name_track(THREADS, number, "main" if thread is threading.main_thread() else thread.name)
        return number

    def name_track(self, process: int, thread: int, name: str) -> None:
        """Names a track, the first time."""
        if (process, thread) in self._named:
            return
        if (process, 0) not in self._named:
            self._named.add((process, 0))
            self._note("process_name", process, 0, name=_PROCESSES[process].format(pid=os.getpid()))
            self._note("process_sort_index", process, 0, sort_index=process)
        self._named.add((process, thread))
        self._note("thread_name", process, thread, name=name)
        self._note("thread_sort_index", process, thread, sort_index=0 if name == "main" else thread)

    def _note(self, what: str, process: int, thread: int, **args: Any) -> None:
        event = f'{{"ph":"M","name":"{what}","pid":{process},"tid":{thread},"ts":0,"args":{json.dumps(args)}}}'
        self._pending.append(event)

    # -- writing ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes what is pending. Called by any thread; an error is kept for `close`."""
        with self._lock:
            batch, done = list[str](), 0  # others may append meanwhile
            try:
                for each in self._pending[:]:
                    batch += self._texts(each, self.events + len(batch))
                    done += 1
                    if len(batch) >= PIECE:
                        self._write(batch)
                        del self._pending[:done]  # after an interrupt, what was written is not written again
                        batch, done = [], 0
                self._write(batch)
            except OSError as error:
                self._error, self._full = self._error or error, True
            del self._pending[:done]
            self._bytes = 0

    def _texts(self, found: Slice | _Later | str, made: int) -> Iterator[str]:
        """The events of something pending, up to the limit; there are `made` events already."""
        if isinstance(found, str):
            yield found
            return
        for each in (found.make() if isinstance(found, _Later) else (found,)) if not self._full else ():
            if made >= self.limit:
                self._full = True
                return
            made += 1
            yield self._text(each)

    def _text(self, found: Slice) -> str:
        start = max(0, found.start - self.start)
        # Perfetto multiplies a start by 1000 and cuts: half a nanosecond more, and it is exact.
        times = f'"ts":{_microseconds(start)}5,"dur":{_microseconds(max(0, found.end - self.start - start))}'
        kind = f'"cat":{_quoted(found.kind)},' if found.kind else ""
        args = f',"args":{found.args}' if found.args else ""
        where = f'"pid":{found.process},"tid":{found.thread}'
        return f'{{"ph":"X","name":{_quoted(found.name)},{kind}{times},{where}{args}}}'

    def _write(self, batch: list[str]) -> None:
        if not batch:
            return
        text = f"{',' if self.events else ''}\n" + ",\n".join(batch)
        raw = memoryview(f"{text.removeprefix(chr(10))}\n]\n".encode())
        end = self._end + len(raw) - 3  # before the newline in front of the bracket
        self._file.seek(self._end)
        while raw:
            raw = raw[self._file.write(raw) :]
        self._end, self.events = end, self.events + len(batch)

    def _watch(self) -> None:
        """Writes events of an idle process soon."""
        while not self._closed.wait(FLUSH_SECONDS):
            if self._pending and time.perf_counter_ns() - self._last > FLUSH_SECONDS * 1e9:
                self.flush()

    def close(self) -> None:
        """Writes the rest. Can be called more than once.

        Raises:
            OutputError: the disk is full, or the file could not be written for another reason. It is valid up to there.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self.seconds = (time.perf_counter_ns() - self.start) / 1e9
        self._thread.join()
        self.flush()
        complete = not self._full
        self.instant("end of the recording", seconds=round(self.seconds, 6), limit=self.limit, complete=complete)
        self.flush()
        with contextlib.suppress(OSError):
            self._file.truncate(self._end + 3)
        self._file.close()
        if self._error is not None:
            raise file_error(OutputError, "the trace is not complete", self._error, self.path) from self._error

    @property
    def is_full(self) -> bool:
        """Whether the limit was reached, or a write failed: nothing more is recorded."""
        return self._full

    # -- spans --------------------------------------------------------------------------------------------------------

    def enter(self) -> int:
        """How many spans of this thread are open; there is one more from now on."""
        depth: int = getattr(self._depth, "n", 0)
        self._depth.n = depth + 1
        return depth

    def leave(self, name: str, nanoseconds: int) -> None:
        """A span of this thread has ended."""
        self._depth.n -= 1
        if not self._depth.n and threading.get_ident() == self._owner:
            self.phases[name] += nanoseconds


class _Span:
    __slots__ = ("_args", "_kind", "_name", "_start", "_trace")

    def __init__(self, trace: Trace, name: str, kind: str, args: Mapping[str, Any]) -> None:
        self._trace, self._name, self._kind, self._args = trace, name, kind, args

    def __enter__(self) -> None:
        self._trace.enter()
        self._start = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end, trace = time.perf_counter_ns(), self._trace
        args = {**self._args, "error": kind.__name__} if kind else self._args
        text = json.dumps(args, default=str) if args else ""
        trace.add(Slice(THREADS, trace.here(), self._name, self._kind, self._start, end, text))
        trace.leave(self._name, end - self._start)


UNTRACED = contextlib.nullcontext()  # a span while no trace is recorded
recording: Trace | None = None  # the trace that is being recorded
_watchers: list[tuple[Callable[[Trace], object], Callable[[], object]]] = []


def span(name: str, kind: str = "", **args: Any) -> contextlib.AbstractContextManager[None]:
    """A slice of the current thread, as long as the `with` block.

    Args:
        kind: its category.
        args: facts that the trace shows with it.
    """
    trace = recording
    return UNTRACED if trace is None else _Span(trace, name, kind, args)


def watch(started: Callable[[Trace], object], stopped: Callable[[], object]) -> None:
    """Has functions called when the recording of a trace starts and stops; at once if one is being recorded."""
    _watchers.append((started, stopped))
    if recording is not None:
        started(recording)


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str], *, detail: Detail = "kernels", limit: int = EVENTS, **facts: Any
) -> Iterator[Trace]:
    """Records what rlx does in the `with` block, in all threads, as a file for https://ui.perfetto.dev.

        with rlx.trace("trace.json"):
            runner.chat("Hello", max_tokens=20)

    Args:
        path: the file, which is replaced. It is a JSON array of trace events, valid at any time.
        detail: "steps" for what is opened, loaded and compiled, requests, and the steps of programs; "kernels" for the
            regions of each step and what each worker did in them, too.
        limit: most events of the file. At the limit the recording ends.
        facts: what the file says about itself, such as the command.

    Raises:
        OutputError: the file cannot be written; at the end, if it could not be written to its end.
        ArgumentError: a trace is being recorded already, or an option is out of its range.
    """
    global recording
    if detail not in get_args(Detail):
        raise ArgumentError(f"{detail!r} is no detail", where="detail", hint=f"Use {' or '.join(get_args(Detail))}.")
    if type(limit) is not int or limit < 1:
        raise ArgumentError(f"{limit!r} events", where="limit", hint="Give a whole number above 0.")
    if recording is not None:
        raise ArgumentError("a trace is being recorded already", where=recording.path, hint="End it first.")
    facts = {**_facts(), **facts, "detail": detail, "limit": limit}
    found = Trace(arguments.path("path", path), detail, limit)
    found.instant("recording", **facts)
    recording = found
    try:
        for started, _ in _watchers:
            started(found)
        yield found
    finally:
        stop()


def stop() -> None:
    """Ends the recording, if there is one, and closes the file; errors as of `Trace.close`."""
    global recording
    found, recording = recording, None
    if found is not None:
        for _, stopped in _watchers:
            stopped()
        found.close()


def _facts() -> dict[str, Any]:
    import platform

    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


@lru_cache(1 << 12)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _forget() -> None:
    """For a forked child: the file belongs to the parent."""
    global recording
    if recording is not None:
        recording = None
        for _, stopped in _watchers:
            stopped()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
