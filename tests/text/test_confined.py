"""Confined processes: what they cannot do, how they end, and that an end costs one request only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlx import platform
from rlx.platform.base import Usage
from rlx.text.confined import Confined, ConfinedError

PROGRAM = """
import os, socket, subprocess, threading, time
count, START = 0, 0
def prepare(): time.sleep(START)
def handle(request):
    global count
    count += 1
    name, *args = request
    if name == "count": return count
    if name == "pid": return os.getpid()
    if name == "environment": return dict(os.environ)
    if name == "loop":
        while True: pass
    if name == "sleep": time.sleep(args[0])
    if name == "open": open("/etc/passwd")
    if name == "socket": socket.socket()
    if name == "write": open("/tmp/x", "w")
    if name == "pipe": os.pipe()
    if name == "spawn": subprocess.run(["true"])
    if name == "memory": return len(bytearray(args[0]))
    if name == "fill":
        held = [b"x" * (1 << 20) for _ in range(args[0] >> 20)]
        time.sleep(30)
    if name == "exit": os._exit(args[0])
    if name == "noise": os.write(1, args[0].encode()); os._exit(0)
    if name == "raise": raise KeyError("surprise")
    return request
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def child(program: str) -> Confined:
    return Confined(program, memory=256 << 20, cpu_seconds=0.2)


def test_requests_and_replies(child: Confined) -> None:
    texts = ["", "x" * 1_000_000, "é\ud800\0"]
    assert [child.call(["echo", text]) for text in texts] == [["echo", text] for text in texts]
    with pytest.raises(ConfinedError, match="surprise") as caught:
        child.call(["raise"])
    assert caught.value.kind == "KeyError"
    assert child.call(["count"]) == 5  # an exception does not end it


@pytest.mark.system("limits")
@pytest.mark.parametrize("what", ["open", "socket", "write", "pipe", "spawn"])
def test_no_file_socket_or_process(child: Confined, what: str) -> None:
    with pytest.raises(ConfinedError) as caught:
        child.call([what])
    assert caught.value.kind in ("OSError", "BlockingIOError")


@pytest.mark.system("proc")
@pytest.mark.parametrize(
    ("request_", "what"),
    [(["loop"], "more CPU time than 0.2 s"), (["fill", 1 << 30], "too much memory"), (["count"], None)],
)
def test_a_child_that_cannot_limit_itself_is_watched(
    program: str, request_: list[Any], what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: what the system says of the child is what `/proc` says here."""

    def usage(pid: int) -> Usage:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Usage(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))

    for name, value in {"limits_children": False, "limits_memory": False, "usage": usage}.items():
        monkeypatch.setattr(platform.current(), name, value)
    child = Confined(program, memory=256 << 20, cpu_seconds=2.0 if request_[0] == "fill" else 0.2)
    if what is None:
        assert child.call(request_) == 1
        return
    with pytest.raises(ConfinedError, match=what):
        child.call(request_)
    assert child.call(["count"]) == 1, "the next request has a new process"


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        pytest.param(["loop"], "more CPU time than 0.2 s", marks=pytest.mark.system("limits")),
        pytest.param(["memory", 1 << 30], "too much memory", marks=pytest.mark.system("limits")),
        (["exit", 3], r"ended its process \(status 3\)"), (["noise", "\1" + "\0" * 7 + "x"], "no JSON"),
        (["noise", "\x7f" * 8], "more than"), (["noise", "\1\0"], "ended its process"),
    ],
)  # fmt: skip
def test_an_end_costs_one_request(child: Confined, request_: list[Any], what: str) -> None:
    with pytest.raises(ConfinedError, match=what):
        child.call(request_)
    assert child.call(["count"]) == 1  # of a new process


def test_a_process_that_was_killed_between_requests_is_replaced(child: Confined) -> None:
    pid = child.call(["pid"])
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    assert child.call(["pid"]) != pid


def test_a_forked_process_has_a_child_of_its_own(child: Confined) -> None:
    pid = child.call(["pid"])
    read, write = os.pipe()
    if (forked := os.fork()) == 0:
        os.write(write, b"own" if child.call(["pid"]) != pid else b"same")
        os._exit(0)
    os.waitpid(forked, 0)
    assert os.read(read, 10) == b"own"
    assert child.call(["pid"]) == pid


SCRIPT = """
import os, sys, time
from rlx.text.confined import Confined
child = Confined(sys.argv[1], memory=256 << 20)
try:
    print(child.call(["pid"]), flush=True)
    if sys.argv[2] == "kill": os.kill(os.getpid(), 9)
    if sys.argv[2] == "interrupt": child.call(["sleep", 60])
except KeyboardInterrupt:
    print(child.call(["count"]), flush=True)
"""


@pytest.mark.parametrize("end", ["exit", "kill", "interrupt"])
def test_it_ends_with_its_parent(program: str, end: str) -> None:
    command = [sys.executable, "-c", SCRIPT, program, end]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if end == "interrupt":
        time.sleep(0.3)  # asleep by then, most likely; if not, the interrupt is no other
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: the child is in no group of the terminal's
        assert parent.stdout.readline() == "1\n"
    parent.wait(30)
    for _ in range(200):
        if not _is_running(pid):
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
