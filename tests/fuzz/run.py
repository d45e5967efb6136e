"""Runs mutants in processes with limits, and counts what is not a result or an error with a name.

    python tests/fuzz/run.py --kind gguf --count 1000 --seed 1 [--seconds 60] [--keep FOLDER]

The same kind, seed and number give the same mutant. A mutant may take 5 s of CPU time and 500 MB above what the process
has before it; it may end in a result or in an `RlxError` that can be printed. Everything else is counted and shown:
crashes (a signal), hangs, errors without a name, memory. `--keep` copies those mutants into a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

CPU_SECONDS, WALL_SECONDS, MEMORY_KB, BATCH = 5.0, 60.0, 500 << 10, 40
MAX_MESSAGE = 5_000
GOOD = ("accepted", "refused")


@dataclass
class Result:
    """How many mutants ended in which way, and the bad ones: (number, way, detail)."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    seconds: float = 0.0  # of CPU, the longest of one mutant
    kilobytes: int = 0  # the most above the beginning

    def add(self, number: int, way: str, detail: str = "") -> None:
        self.counts[way] += 1
        if way not in GOOD:
            self.bad.append((number, way, detail))

    def __str__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in sorted(self.counts.items()))
        return f"{ways}; longest {self.seconds:.1f} s, largest {self.kilobytes >> 10} MB"


def run(kind: str, count: int, seed: int, *, seconds: float | None = None, keep: Path | None = None) -> Result:
    """Runs the mutants 0 to `count` of a kind, as many as fit into `seconds`."""
    from tests.fuzz.targets import KINDS, prepare

    with tempfile.TemporaryDirectory(dir=_memory_disk()) as base:
        os.environ.setdefault("FUZZ_GOLDENS", str(Path(base) / "goldens"))
        prepare(kind)
        result, number, end = Result(), 0, time.monotonic() + (seconds or 1e9)
        while number < count and time.monotonic() < end:
            number = _batch(kind, seed, number, min(count, number + BATCH), Path(base) / "work", result)
        for each, way, _ in result.bad if keep else ():
            folder = keep / f"{kind}-{seed}-{each}-{way}"  # type: ignore[operator]
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            KINDS[kind].make(random.Random(f"{kind}/{seed}/{each}"), folder)
    return result


def _memory_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _batch(kind: str, seed: int, first: int, last: int, folder: Path, result: Result) -> int:
    """Runs mutants in a process of their own; the number of the next one, which is less than `last` after a bad end."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        os.setsid()
        try:
            _child(kind, seed, first, last, folder, write)
        except BaseException:
            traceback.print_exc()  # of a mutator: the parent counts it as a crash
            os._exit(99)
        os._exit(0)
    os.close(write)
    number, alive = first, True
    with os.fdopen(read, "rb") as lines:
        while number < last and (alive := _ready(lines.fileno())) and (line := lines.readline()):
            found = json.loads(line)
            result.add(number, found["way"], found["detail"])
            result.seconds, result.kilobytes = max(result.seconds, found["cpu"]), max(result.kilobytes, found["kb"])
            number += 1
            if found["way"] == "memory":
                break
    os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    if number < last and not (result.bad and result.bad[-1][:2] == (number - 1, "memory")):
        code = os.waitstatus_to_exitcode(status)
        hung = not alive or code == -signal.SIGPROF
        result.add(number, "hang" if hung else "crash", f"status {code}")
        number += 1
    return number


def _ready(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], WALL_SECONDS)[0])


def _child(kind: str, seed: int, first: int, last: int, folder: Path, write: int) -> None:
    from tests.fuzz.targets import KINDS

    warnings.simplefilter("ignore")
    os.environ["RUST_BACKTRACE"] = "0"  # panics of the tokenizers package are written to stderr
    for number in range(first, last):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        KINDS[kind].make(random.Random(f"{kind}/{seed}/{number}"), folder)
        begin = _memory()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        before = sum(os.times()[:4])
        way, detail = _outcome(KINDS[kind].use, folder)
        used = sum(os.times()[:4]) - before  # with children that have ended
        signal.setitimer(signal.ITIMER_PROF, 0)
        kilobytes = _memory() - begin
        if used > CPU_SECONDS:
            way, detail = "hang", f"{used:.1f} s; {way}: {detail}"
        if kilobytes > MEMORY_KB:
            way, detail = "memory", f"{kilobytes >> 10} MB; {way}: {detail}"
        line = json.dumps({"way": way, "detail": detail, "cpu": used, "kb": kilobytes})
        os.write(write, line.encode() + b"\n")


def _outcome(use: Any, folder: Path) -> tuple[str, str]:
    from rlx.errors import RlxError

    try:
        use(folder)
    except RlxError as error:
        text = str(error)
        if len(text) > MAX_MESSAGE or not text.replace("\n", "").isprintable():
            return "unprintable", f"{len(text)} characters: {text[:300]!r}"
        return "refused", ""
    except BaseException:
        return "unnamed", traceback.format_exc()[-3000:]
    return "accepted", ""


def _memory() -> int:
    """Kilobytes, at most so far: of this process, and of a child that has ended."""
    usages = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return int(max(usages))


def main() -> None:
    from tests.fuzz.targets import KINDS

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    options.add_argument("--count", type=int, default=1000, help="mutants of each kind")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, help="most seconds of each kind")
    options.add_argument("--keep", type=Path, help="a folder for the mutants that end badly")
    given = options.parse_args()
    bad = 0
    for kind in KINDS if given.kind == "all" else [given.kind]:
        result = run(kind, given.count, given.seed, seconds=given.seconds, keep=given.keep)
        print(f"{kind}: {sum(result.counts.values())} mutants, {result}", flush=True)
        for number, way, detail in result.bad:
            print(f"  {kind} {given.seed} {number}: {way}\n{detail}", flush=True)
        bad += len(result.bad)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
