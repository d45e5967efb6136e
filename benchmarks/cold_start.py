"""Where the time of a cold start goes: a new process, an empty compile cache, one prompt, until its first token.

    python benchmarks/cold_start.py                      # the demo model
    python benchmarks/cold_start.py model.gguf --runs 5
    python benchmarks/cold_start.py --device cuda

Each run is a process of its own with an empty cache folder. The fastest counts. `--warm` keeps the cache folder of a
first run, which waits until everything is compiled, for comparison.

The phases are those of one more run, which imports all modules that it looks into. A phase's seconds do not include
phases inside it. CPU seconds are those of the thread that does the phase. Phases of several threads overlap, so wall
seconds add up to more than the total.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import pkgutil
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_PROMPT = "Tell me a story about a brave fox."
_START = "RLX_COLD_START"  # when the process was started, in the clock of all processes
_PHASES = (
    ("rlx.engine.opening.setup:Plan", "of", "open the model, build its graph"),
    ("rlx.engine.engine", "tokenizer_of", "tokenizer"),
    ("rlx.text.chat", "chat_ids", "chat template"),
    ("rlx.compiler.tensors:Tensors", "load", "pack weights"),
    ("rlx.compiler.compile:Compiler", "program_key", "cache keys"),
    ("rlx.compiler.compile:Compiler", "key", "cache keys"),
    ("rlx.passes.pipeline", "lower", "passes"),
    ("rlx.backends.cpu.link", "link_program", "regions and step"),
    ("rlx.backends.cpu.link", "select", "write tile kernels"),
    ("rlx.backends.cpu.templates:Template", "lower", "Numba: types and lowering"),
    ("rlx.backends.cpu.llvm:Module", "__init__", "LLVM: parse"),
    ("rlx.backends.cpu.llvm:Module", "result", "LLVM: print"),
    ("rlx.backends.cpu.llvm", "optimize", "LLVM: optimize"),
    ("rlx.backends.cpu.llvm", "_emit", "LLVM: emit"),
    ("rlx.backends.cpu.launch.code:NativeCode", "__init__", "link into the process"),
    ("rlx.backends.cpu.launch.native:NativeProgram", "launch", "run the program"),
    ("rlx.backends.cpu.launch.native:NativeProgram", "repeat", "run the program"),
    ("rlx.backends.cuda.driver:Context", "__init__", "open the card"),
    ("rlx.backends.cuda.build", "select", "write kernels of a card"),
    ("rlx.backends.cuda.ptx", "compiled", "LLVM: PTX"),
    ("rlx.backends.cuda.driver", "link", "the driver's linker"),
    ("rlx.backends.cuda.program:CardCode", "__init__", "load code onto the card"),
    ("rlx.backends.cuda.program:CardProgram", "launch", "run the program"),
)  # functions by what has them, and the phase that they are

Row = dict[str, float]


class Spans:
    """Own seconds of phases, by thread: a phase inside another one does not count for it."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._local, self._lock = threading.local(), threading.Lock()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Counts the calls of a function of a module or class."""
        found = vars(owner)[name]
        function = found.__func__ if isinstance(found, classmethod | staticmethod) else found

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(phase):
                return function(*args, **kwargs)

        setattr(owner, name, type(found)(timed) if isinstance(found, classmethod | staticmethod) else timed)

    def __call__(self, phase: str) -> _Span:
        return _Span(self, phase)

    @property
    def stack(self) -> list[list[float]]:
        """Of the phases that are open in this thread, the wall and CPU seconds of those inside."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def add(self, phase: str, wall: float, cpu: float) -> None:
        with self._lock:
            row = self.rows.setdefault(phase, {"wall": 0.0, "cpu": 0.0, "calls": 0})
            row["wall"], row["cpu"], row["calls"] = row["wall"] + wall, row["cpu"] + cpu, row["calls"] + 1


class _Span:
    def __init__(self, spans: Spans, phase: str) -> None:
        self._spans, self._phase = spans, phase

    def __enter__(self) -> None:
        self._spans.stack.append([0.0, 0.0])
        self._start = time.perf_counter(), time.thread_time()

    def __exit__(self, *error: object) -> None:
        wall, cpu = time.perf_counter() - self._start[0], time.thread_time() - self._start[1]
        inside = self._spans.stack.pop()
        if self._spans.stack:
            self._spans.stack[-1][0] += wall
            self._spans.stack[-1][1] += cpu
        self._spans.add(self._phase, wall - inside[0], cpu - inside[1])


def child(chosen: argparse.Namespace) -> None:
    """One cold start; prints a JSON object."""
    began = float(os.environ[_START])
    spans = watched(began) if chosen.phases else Spans()
    import rlx
    from rlx import demo

    first: list[float] = []

    def on_token(token: int) -> bool:
        first.append(time.time() - began)
        return False

    with rlx.auto_runner(chosen.model or demo.path(), device=chosen.device) as runner:
        loaded = time.time() - began
        runner.generate(runner.chat_ids([{"role": "user", "content": chosen.prompt}]), 1, on_token)
        used = resource.getrusage(resource.RUSAGE_SELF)
        if chosen.fill:
            runner._engine.ahead.wait()
    print(json.dumps({
        "loaded": loaded, "first_token": first[0], "user": used.ru_utime, "system": used.ru_stime, "phases": spans.rows,
    }))  # fmt: skip


def watched(began: float) -> Spans:
    """The phases of this process, which began at that time, from now on."""
    spans = Spans()
    spans.add("start of Python", time.time() - began, time.process_time())
    usual = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        phase = "import Numba's front end" if name.startswith("numba") else "import llvmlite"
        if name.split(".")[0] not in ("numba", "llvmlite") or name in sys.modules:
            return usual(name, *args, **kwargs)
        with spans(phase):
            return usual(name, *args, **kwargs)

    builtins.__import__ = importing
    with spans("imports"):
        owners = [pkgutil.resolve_name(owner) for owner, _, _ in _PHASES]
    for owner, (_, name, phase) in zip(owners, _PHASES, strict=True):
        spans.wrap(owner, name, phase)
    return spans


def run(arguments: Sequence[str], cache: str) -> dict[str, Any]:
    """One start in a process of its own."""
    command = [sys.executable, __file__, "--child", *arguments]
    environment = {**os.environ, "RLX_CACHE_DIR": cache, _START: repr(time.time())}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(arguments: Sequence[str], runs: int, warm: bool) -> dict[str, Any]:
    """The fastest of some starts, and the phases of one more."""
    with tempfile.TemporaryDirectory() as kept:
        if warm:
            run([*arguments, "--fill"], kept)

        def start(*more: str) -> dict[str, Any]:
            if warm:
                return run([*arguments, *more], kept)
            with tempfile.TemporaryDirectory() as cache:
                return run([*arguments, *more], cache)

        fastest = min((start() for _ in range(runs)), key=lambda one: one["first_token"])
        return fastest | {"watched": start("--phases")}


def show(found: dict[str, Any]) -> None:
    """The table of phases, the longest first."""
    cpu = found["user"] + found["system"]
    print(f"first token after {found['first_token']:.2f} s, loaded after {found['loaded']:.2f} s; "
          f"{cpu:.2f} s of CPU ({found['system']:.2f} s in the system)\n")  # fmt: skip
    found = found["watched"]
    cpu = found["user"] + found["system"]
    print(f"{'phase':34}{'calls':>6}{'wall s':>9}{'CPU s':>9}")
    by_cpu: Callable[[tuple[str, Row]], float] = lambda row: -row[1]["cpu"]  # noqa: E731
    for phase, row in sorted(found["phases"].items(), key=by_cpu):
        print(f"{phase:34}{row['calls']:6.0f}{row['wall']:9.3f}{row['cpu']:9.3f}")
    rest = cpu - sum(row["cpu"] for row in found["phases"].values())
    print(f"{'rest (workers, reading files)':34}{'':6}{'':9}{rest:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model file or directory; the demo model by default")
    parser.add_argument("--prompt", default=_PROMPT)
    parser.add_argument("--device", default="cpu", help="one of rlx.devices(); cpu by default")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="with a filled cache")
    parser.add_argument("--json", action="store_true")
    for hidden in ("--child", "--fill", "--phases"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen)
        return
    arguments = ["--prompt", chosen.prompt, "--device", chosen.device, *([chosen.model] if chosen.model else [])]
    found = measure(arguments, chosen.runs, chosen.warm)
    print(json.dumps(found)) if chosen.json else show(found)


if __name__ == "__main__":
    main()
