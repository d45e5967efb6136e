"""A reader of trace files, written from the format's description, "Trace Event Format" (JSON array, and the phases X, i
and M), and from what Perfetto asks of it: slices of a track lie within each other or side by side.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NS = 0.001  # microseconds: what is printed is cut there
METADATA = {
    "process_name": "name", "process_sort_index": "sort_index",
    "thread_name": "name", "thread_sort_index": "sort_index",
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A slice: times in microseconds."""

    name: str
    kind: str
    start: float
    end: float
    track: tuple[int, int]
    args: dict[str, Any]
    depth: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e6


@dataclass(frozen=True)
class Read:
    """A valid trace.

    Attributes:
        slices: by track, then by start; a slice comes before those within it.
        tracks: the name of each track as (process, thread).
        moments: arguments of the instant events, by name.
    """

    slices: list[Event]
    tracks: dict[tuple[int, int], tuple[str, str]]
    moments: dict[str, dict[str, Any]]

    def of(self, kind: str) -> list[Event]:
        """Those of a kind, on any track, in order."""
        return sorted((each for each in self.slices if each.kind == kind), key=lambda each: each.start)

    def on(self, process: str) -> list[Event]:
        """Those of a process, track by track."""
        return [each for each in self.slices if self.tracks[each.track][0].startswith(process)]


def read(path: Path) -> Read:
    """The trace in a file; AssertionError if it is none."""
    events = json.loads(path.read_text())
    assert isinstance(events, list) and all(isinstance(event, dict) for event in events)
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    moments = {}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and event["name"] and event["ph"] in "XMi", event
        assert all(type(event[field]) is int for field in ("pid", "tid")), event
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0, event
        assert isinstance(event.get("args", {}), dict) and isinstance(event.get("cat", ""), str), event
        if event["ph"] == "M":
            (field,) = event["args"]
            assert METADATA[event["name"]] == field, event
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "i":
            assert event["s"] in "gpt", event
            moments[event["name"]] = event["args"]
        else:
            assert isinstance(event["dur"], int | float) and event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append(event)
    assert tracks.keys() <= threads.keys(), "a track without a name"
    names = {track: (processes[track[0]], name) for track, name in threads.items()}
    return Read([each for track, some in sorted(tracks.items()) for each in _nested(track, some)], names, moments)


def _nested(track: tuple[int, int], events: Sequence[dict[str, Any]]) -> Iterable[Event]:
    open_ends: list[float] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= start + NS:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + NS, f"{event} goes on beyond the slice around it"
        yield Event(event["name"], event.get("cat", ""), start, end, track, event.get("args", {}), len(open_ends))
        open_ends.append(end)


def covered(slices: Iterable[Event]) -> float:
    """Seconds of the outermost of some slices of one track."""
    return sum(each.seconds for each in slices if each.depth == 0)
