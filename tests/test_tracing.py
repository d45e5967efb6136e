"""Traces: the file is valid whatever ends the recording, and says what was left out."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trace_format

import rlx
from rlx.tracing import span


def test_spans_of_threads_nest(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with rlx.trace(path, limit=100, answer=42) as trace:
        with span("outer", "kind", text='a "quoted" \u00e9'):
            with span("inner"):
                trace.flush()
            thread = threading.Thread(target=lambda: span("there").__enter__(), name="other")  # never left
            thread.start()
            thread.join()
        with pytest.raises(ValueError, match="broken"), span("failed"):
            raise ValueError("broken")
    found = trace_format.read(path)
    assert [(each.name, each.kind, each.depth) for each in found.slices] == [
        ("outer", "kind", 0), ("inner", "", 1), ("failed", "", 0),
    ]  # fmt: skip
    assert found.slices[0].args == {"text": 'a "quoted" \u00e9'} and found.slices[2].args == {"error": "ValueError"}
    assert found.moments["recording"]["answer"] == 42
    assert found.moments["end of the recording"]["complete"] is True
    assert {name for _, name in found.tracks.values()} == {"main"}
    assert span("nothing") is span("is recorded"), "without a trace there is nothing to make"


def test_the_recording_ends_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with rlx.trace(path, limit=20) as trace:
        for i in range(100):
            with span(f"span {i}"):
                pass
        trace.flush()
        assert trace.is_full
        with span("later"):
            pass
    found = trace_format.read(path)
    assert [each.name for each in found.slices] == [f"span {i}" for i in range(len(found.slices))]
    assert 0 < len(found.slices) < 20
    end = found.moments["end of the recording"]
    assert end["complete"] is False and end["limit"] == 20


def test_a_killed_process_leaves_a_valid_file(tmp_path: Path) -> None:
    """What was done more than a moment before a SIGKILL is there, although nothing was closed."""
    path = tmp_path / "trace.json"
    code = (
        "import os, signal, sys, time, rlx.tracing as tracing\n"
        "with tracing.trace(sys.argv[1]):\n"
        "    with tracing.span('before'): pass\n"
        "    while b'before' not in open(sys.argv[1], 'rb').read(): time.sleep(0.05)\n"
        "    with tracing.span('never written'): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    found = trace_format.read(path)
    assert [each.name for each in found.slices] == ["before"] and "end of the recording" not in found.moments


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys, rlx.tracing as tracing\n"
        "with tracing.trace(sys.argv[1]):\n"
        "    if not os.fork():\n"
        "        with tracing.span('child'): pass\n"
        "        os._exit(tracing.recording is not None)\n"
        "    assert os.wait()[1] == 0\n"
        "    with tracing.span('parent'): pass\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "trace.json"], timeout=120, check=True)
    assert [each.name for each in trace_format.read(tmp_path / "trace.json").slices] == ["parent"]
