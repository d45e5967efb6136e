"""Ctrl-C at any moment of a command, imports included: exit code 130 and not a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# At every import of the command a fork takes the interrupt, while the process itself goes on to the next import. The
# child ends with the code that a user would see; what it writes goes to a pipe of its own.
HOOK = r"""
import json, os, signal, sys, tempfile

class Interrupting:
    def __init__(self, log, least):
        self.log, self.least, self.pid = log, least, os.getpid()

    def find_spec(self, name, path=None, target=None):
        if os.getpid() != self.pid or threads() > 1:  # a fork has one thread only
            return None
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if not child:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.kill(os.getpid(), signal.SIGINT)
                return None
            _, status = os.waitpid(child, 0)
            said.seek(0)
            self.log.write(json.dumps([name, os.waitstatus_to_exitcode(status), said.read().decode()]) + "\n")
            self.log.flush()
        return None

def threads():
    return len(os.listdir("/proc/self/task"))

sys.argv = json.loads(sys.argv[1])
log = open(os.environ["INTERRUPT_LOG"], "w")
from rlx.__main__ import main
import rlx.__main__
before = rlx.__main__.leave_quietly
def armed():
    before()
    if not any(isinstance(finder, Interrupting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Interrupting(log, 0))
rlx.__main__.leave_quietly = armed
main()
"""


@pytest.mark.parametrize("args", [["cache", "stats"], ["run", "--no-stdin", "-n", "1", "Hi"]])
def test_an_interrupt_during_any_import_is_quiet(args: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", HOOK, json.dumps(["rlx", *args])]
    done = subprocess.run(command, env={**os.environ, "INTERRUPT_LOG": str(log)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) > 20
    wrong = [row for row in rows if row[1:] != [130, ""]]
    assert not wrong, f"{len(wrong)} of {len(rows)}: {wrong[:5]}"


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As in a background job of a shell without job control."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.argv = ['rlx', '--version']\n"
        "import atexit; atexit.register(lambda: print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN))\n"
        "from rlx.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True"
