#!/usr/bin/env python3
"""rlx beside llama.cpp and beside transformers: same file, same threads, in turns.

    python benchmarks/versus.py MODEL.gguf [MODEL.gguf ...] [--peer-python PATH] [--torch-python PATH] [--quick]

Each side runs in a process of its own and sleeps while another is timed. A repetition runs every side once and then
measures the machine's read bandwidth, so that what changes on the machine meanwhile happens to all; the table has
medians, and the median of the ratios within repetitions. Only computing tokens is timed, no sampling.

The peer is `llama_cpp` in this environment, or in that of --peer-python; transformers is measured with --torch-python,
which may be this environment's Python. For each task llama.cpp runs with flash attention and without, and long prompts
also in one piece instead of pieces of 512; its best counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from machine import Machine, facts
from report import Measurement, Series, memory_table, number, speed_table, start_table, write

HERE = Path(__file__).resolve().parent
SETTLE = 0.05  # seconds between turns, in which the threads of the side before go to sleep
FIRST_PROMPT, FIRST_CONTEXT = 32, 512
MEMORY_PROMPT, MEMORY_TOKENS, MEMORY_CONTEXT = 512, 16, 1024
PIECE = 512  # tokens that rlx computes at a time at most, and llama.cpp unless told otherwise
TEXT = "Once upon a time there was a fox who"
GREEDY = 16

INSTALL = {
    "llama.cpp": "CC=clang CXX=clang++ CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python   (clang: what GCC 12 "
    "builds crashes on machines with AMX), or name an environment that has it with --peer-python PATH",
    "transformers": "pip install torch transformers accelerate gguf, or name an environment that has them with "
    "--torch-python PATH",
}


class SideError(Exception):
    """A side answered with an error, or ended."""


class MissingSide(SideError):
    """A side's package is not installed, or it cannot use the file."""


class Process:
    """A side in a process of its own (`sides.py`); it blocks on its stdin between commands."""

    def __init__(self, name: str, python: str, script: str) -> None:
        self.name = name
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed in __exit__
        pipe, command = subprocess.PIPE, [python, str(HERE / script)]
        try:
            self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        except OSError as error:
            raise MissingSide(f"{name}: {python} cannot be run: {error}") from error

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One command and its answer."""
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            self.child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = ""
        return checked(self.name, do, line, self.errors)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.child.communicate()
        self.errors.close()


def checked(name: str, do: str, line: str, errors: IO[bytes]) -> dict[str, Any]:
    """An answer as a table.

    Raises:
        MissingSide: the side says that it cannot do this here.
        SideError: any other error, or no answer; with the end of what the process said.
    """
    if not line:
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-2000:]
        if "ModuleNotFoundError" in said:
            raise MissingSide(f"{name}: {said.strip().splitlines()[-1]}")
        raise SideError(f"{name} ended at {do!r}:\n{said}")
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise (MissingSide if found["missing"] else SideError)(f"{name}, {do}: {found['error']}")
    return found


# -- tasks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A prompt of `tokens` from an empty cache ("prefill"), or `tokens` one by one after `depth` others ("decode")."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}" if self.kind == "prefill" else f"decode at {self.depth}"

    @property
    def middle(self) -> int:
        """The length of the cache half way through decoding."""
        return self.depth + self.tokens // 2

    def prepare(self, side: Process) -> None:
        """Fills the cache."""
        if self.kind == "decode":
            side("fill", depth=self.depth)

    def run(self, side: Process) -> float:
        """Seconds: of the whole prompt, or of one token."""
        time.sleep(SETTLE)
        return float(side(self.kind, tokens=self.tokens)["seconds"])

    def variants(self) -> list[dict[str, Any]]:
        """llama.cpp's settings that may be best for it."""
        pieces = (PIECE, 2048) if self.kind == "prefill" and self.tokens > PIECE else (PIECE,)
        return [{"flash": flash, "ubatch": piece} for flash in (True, False) for piece in pieces]


def tasks(args: argparse.Namespace, context: int) -> Iterator[Task]:
    """What was asked for and fits the model's context."""
    wanted = [Task("prefill", n) for n in args.prefill] + [Task("decode", args.tokens, d) for d in args.decode]
    for task in wanted:
        if task.depth + task.tokens <= context:
            yield task
        else:
            print(f"{task.name}: left out, the model's context is {context}")


def tune(peer: Process, task: Task, repeat: int) -> str:
    """Leaves llama.cpp with the settings that are fastest on the task; what they are."""
    best: tuple[float, dict[str, Any]] | None = None
    for variant in task.variants():
        peer("use", **variant)
        task.prepare(peer)
        task.run(peer)
        seconds = min(task.run(peer) for _ in range(repeat))
        best = min(best or (seconds, variant), (seconds, variant), key=lambda pair: pair[0])
    assert best is not None
    peer("use", **best[1])
    return f"flash attention {'on' if best[1]['flash'] else 'off'}, pieces of {best[1]['ubatch']}"


def compare(task: Task, sides: dict[str, Process], machine: Machine, repeat: int) -> tuple[Measurement, float]:
    """All sides in turns; and the median read bandwidth meanwhile."""
    series = {name: Series(task.tokens if task.kind == "prefill" else 1) for name in sides}
    if "llama.cpp" in sides:
        series["llama.cpp"].settings = tune(sides["llama.cpp"], task, min(3, repeat))
    for side in sides.values():
        task.prepare(side)
        task.run(side)  # compiles, and touches every page
    bandwidths = []
    for _ in range(repeat):
        for name, side in sides.items():
            series[name].seconds.append(task.run(side))
        bandwidths.append(machine.read_bandwidth(0.2))
    return Measurement(task.name, series), sorted(bandwidths)[len(bandwidths) // 2]


def limit(task: Task, bandwidth: float, peaks: dict[str, float]) -> tuple[float, str]:
    """What bounds the task: reading the weights, or arithmetic, by the fastest kind in floating point."""
    if task.kind == "decode":
        return bandwidth, "GB/s"
    kind = "bf16" if "bf16" in peaks else "f32"
    return peaks[kind], f"GFLOP/s ({kind})"


# -- one model -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(args: argparse.Namespace, model: Path, context: int) -> Iterator[tuple[dict[str, Process], dict[str, Any]]]:
    """The sides that are there, with the model loaded, and what each said of it."""
    wanted = [("rlx", sys.executable, "rlx_side.py"), ("llama.cpp", args.peer_python, "llama_side.py")]
    wanted += [("transformers", args.torch_python, "torch_side.py")] if args.torch_python else []
    with contextlib.ExitStack() as stack:
        sides, about = {}, {}
        for name, python, script in wanted:
            try:
                side = stack.enter_context(Process(name, python, script))
                about[name] = side("open", model=str(model), threads=args.threads, context=context)
                sides[name] = side
            except MissingSide as error:
                if name == "rlx":
                    raise
                print(f"{error}\n  {name} is left out. To install it: {INSTALL[name]}")
        yield sides, about


def agree(sides: dict[str, Process]) -> str:
    """Whether all sides say the same after a text: tokens that are likeliest, one after another."""
    ids = sides["rlx"]("encode", text=TEXT)["ids"]
    found = {name: side("greedy", ids=ids, tokens=GREEDY) for name, side in sides.items()}
    odd = [name for name, said in found.items() if not said["finite"]]
    if odd:
        raise SideError(f"logits that are not finite: {', '.join(odd)}")
    ours, notes = found["rlx"]["tokens"], []
    for name, said in found.items():
        same = next((i for i, (a, b) in enumerate(zip(ours, said["tokens"], strict=True)) if a != b), GREEDY)
        if name != "rlx":
            notes.append(f"{name}: the same" if same == GREEDY else f"{name}: the same for {same}, then another")
    return f"{GREEDY} greedy tokens after {TEXT!r}: " + ("; ".join(notes) or "rlx alone")


def speeds(args: argparse.Namespace, model: Path, machine: Machine, result: dict[str, Any]) -> list[Measurement]:
    """All tasks on one model."""
    room = max([*args.prefill, *(d + args.tokens for d in args.decode), 128]) + 64
    with opened(args, model, room) as (sides, about):
        result["sides"] = about
        result["greedy"] = agree(sides)
        print(result["greedy"], flush=True)
        chosen = list(tasks(args, about["rlx"]["context"]))
        prompts = [t.tokens for t in chosen if t.kind == "prefill"]
        work = sides["rlx"]("work", prompts=prompts, depths=[t.middle for t in chosen], step=PIECE)
        rows, bandwidths, peaks = [], [], result["peaks"]
        for task in chosen:
            row, bandwidth = compare(task, sides, machine, args.repeat)
            row.work = work["flops"][str(task.tokens)] if task.kind == "prefill" else work["bytes"][str(task.middle)]
            for kind, rate in machine.peaks().items():  # again: what else runs may have cost it some
                peaks[kind] = max(rate, peaks[kind])
            row.limit = limit(task, bandwidth, peaks)
            print("  " + said(row), flush=True)
            rows.append(row)
            bandwidths.append(bandwidth)
    for task, row, bandwidth in zip(chosen, rows, bandwidths, strict=True):
        row.limit = limit(task, bandwidth, peaks)
    return rows


def said(row: Measurement) -> str:
    """A line while it runs."""
    parts = [f"{name} {number(series.rate)} tokens/s ({row.share(name):.0%})" for name, series in row.sides.items()]
    return f"{row.name}: {', '.join(parts)}"


# -- fresh processes -----------------------------------------------------------------------------------------------


def fresh(python: str, script: str, model: Path, numbers: Sequence[int], cache: str) -> dict[str, Any]:
    """A process that opens the model, decodes and ends; `seconds` from its start to its first token."""
    command = [python, str(HERE / script), "once", str(model), *map(str, numbers)]
    with tempfile.TemporaryFile() as errors:
        start = time.time()
        done = subprocess.run(
            command, env={**os.environ, "RLX_CACHE_DIR": cache}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        found = checked(script.removesuffix("_side.py"), "once", done.stdout, errors)
    return {"seconds": found["end"] - start, **found}


def starts(args: argparse.Namespace, model: Path, names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token of a short prompt: rlx with an empty compile cache and with a filled one, in turns
    with the others, which compile nothing.
    """
    numbers = (args.threads, FIRST_CONTEXT, FIRST_PROMPT, 1)
    pythons = {"rlx": sys.executable, "llama.cpp": args.peer_python}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in pythons if name in names}
    with tempfile.TemporaryDirectory() as cache:
        found["rlx"]["cold"] = [fresh(sys.executable, "rlx_side.py", model, numbers, cache)["seconds"]]
        for _ in range(args.repeat):
            for name in found:
                script = f"{name.removesuffix('.cpp')}_side.py"
                run = fresh(pythons[name], script, model, numbers, cache)
                found[name].setdefault("warm", []).append(run["seconds"])
    return found


def memory(args: argparse.Namespace, model: Path, names: Sequence[str]) -> dict[str, Any]:
    """Peak resident memory of fresh processes, compile cache filled."""
    numbers = (args.threads, MEMORY_CONTEXT, MEMORY_PROMPT, MEMORY_TOKENS)
    peaks = {}
    with tempfile.TemporaryDirectory() as cache:
        fresh(sys.executable, "rlx_side.py", model, numbers, cache)  # compiling takes memory of its own
        ours = fresh(sys.executable, "rlx_side.py", model, numbers, cache)
        peaks["rlx"] = ours["peak_bytes"]
        if "llama.cpp" in names:
            peaks["llama.cpp"] = fresh(args.peer_python, "llama_side.py", model, numbers, cache)["peak_bytes"]
    return {"peaks": peaks, "file_bytes": model.stat().st_size, "kv_bytes": ours["kv_bytes"]}


# -- all -----------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, model: Path, machine: Machine) -> tuple[dict[str, Any], str]:
    """Everything about one model: as data, and as a section of a page."""
    print(f"{model.name}: {model.stat().st_size / 1e6:,.0f} MB", flush=True)
    result: dict[str, Any] = {"model": model.name, "machine": facts(), "threads": args.threads}
    result["peaks"] = machine.peaks()
    rows = speeds(args, model, machine, result)
    result["measurements"] = [row.as_json() for row in rows]
    text = [heading(args, model, result, rows), speed_table(rows)] if rows else [heading(args, model, result, rows)]
    names = list(result["sides"])
    if not args.no_start:
        result["starts"] = starts(args, model, names)
        text.append(start_table(result["starts"]))
    if not args.no_memory:
        result["memory"] = memory(args, model, names)
        text.append(memory_table(**result["memory"]))
    return result, "\n".join(text)


def heading(args: argparse.Namespace, model: Path, result: dict[str, Any], rows: list[Measurement]) -> str:
    """Where, when and how it was measured."""
    m, sides = result["machine"], result["sides"]
    peaks = ", ".join(f"{kind} {number(rate)}" for kind, rate in result["peaks"].items())
    settings = {row.name: s.settings for row in rows for s in row.sides.values() if s.settings}
    lines = [
        f"## {model.name}, {args.threads} threads\n",
        f"{m['cpu']}, {m['cpus']} CPUs ({', '.join(m['features'])}), {m['memory_gb']} GB, {m['system']}; {m['date']}, "
        f"load at the start {m['load']}. Peaks in 10^9 operations a second: {peaks}.",
        f"rlx {sides['rlx']['version']} ({sides['rlx']['target']}, {sides['rlx']['precision']}, "
        f"{sides['rlx']['kv_dtype']} cache).",
    ]
    lines += [f"{name} {about['version']}." for name, about in sides.items() if name != "rlx"]
    if settings:
        lines.append("llama.cpp's best: " + "; ".join(f"{name} {text}" for name, text in settings.items()) + ".")
    return "\n".join([*lines, f"Medians of {args.repeat} (slowest-fastest). {result['greedy']}.", ""])


def sizes(text: str) -> list[int]:
    """Numbers with commas between; none for an empty text."""
    found = [int(part) for part in text.split(",") if part.strip()]
    if any(n < 0 for n in found):
        raise ValueError(text)
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="GGUF files")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="Python that has llama_cpp")
    parser.add_argument("--torch-python", metavar="PATH", help="also transformers, with this Python")
    parser.add_argument("--threads", type=int, help="of each side; the physical cores by default")
    parser.add_argument("--repeat", type=int, help="turns (default 5, with --quick 3)")
    parser.add_argument("--prefill", type=sizes, metavar="N,N", help="prompts (default 32,128,512,2048)")
    parser.add_argument("--decode", type=sizes, metavar="N,N", help="tokens before (default 0,512,4096)")
    parser.add_argument("--tokens", type=int, help="decoded a turn (default 32, with --quick 8)")
    parser.add_argument("--quick", action="store_true", help="prompts of 32 and 128, decoding at 0 and 128, 3 turns")
    parser.add_argument("--no-start", action="store_true", help="leave out the time to the first token")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page: docs/performance.md")
    args = parser.parse_args(argv)
    usual = ([32, 128], [0, 128], 3, 8) if args.quick else ([32, 128, 512, 2048], [0, 512, 4096], 5, 32)
    for name, value in zip(("prefill", "decode", "repeat", "tokens"), usual, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, value in (("repeat", args.repeat), ("tokens", args.tokens), ("prefill", min(args.prefill, default=1))):
        if value < 1:
            parser.error(f"--{name} {value}: expected 1 or more")
    for model in args.models:
        if not model.is_file():
            parser.error(f"{model}: no such file; benchmarks/make_model.py writes one")
    return args


def main() -> int:
    args = arguments()
    results = []
    with Machine(args.threads) as machine:
        args.threads = machine.threads
        for model in args.models:
            try:
                result, text = measure(args, model, machine)
            except SideError as error:
                print(error, file=sys.stderr)
                return 1
            results.append(result)
            print(f"\n{text}", flush=True)
            if args.write:
                write(args.write, f"{model.name}, {args.threads} threads, {result['machine']['cpu']}", text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
