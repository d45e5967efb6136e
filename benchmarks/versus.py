#!/usr/bin/env python3
"""rlx beside llama.cpp, ik_llama.cpp, OpenVINO and transformers: same shapes, same threads, in turns.

    python benchmarks/versus.py MODEL.gguf [MODEL.gguf ...] [--quick] [--only prefill,decode] [--peer-python PATH]

Each side runs in a process of its own and sleeps while another is timed. A repetition runs every side once and then
measures the machine's read bandwidth, so that what changes on the machine meanwhile happens to all; the table has
medians, and the median of the ratios within repetitions. Only computing tokens is timed, no sampling.

The peer is `llama_cpp` in this environment, or in that of --peer-python; transformers is measured where this
environment or that of --torch-python has it. --ik-bench names the llama-bench of ik_llama.cpp. --openvino-python names
a Python that has openvino_genai, and --openvino-model for each MODEL a folder that openvino_model.py wrote. Threads are
those that this process may use (`taskset` counts), for all sides. A program runs with all settings that may be best for
a task, and its best counts: llama.cpp with flash attention and without, and long prompts also in one piece instead of
pieces of 512; ik_llama.cpp with repacked weights and without; OpenVINO with both of its attentions, each with int8
activations and without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drive import MissingSide, Process, SideError, busy_process, fresh
from machine import Machine, facts
from report import Measurement, Series, busy_table, memory_table, number, speed_table, start_table, write
from timed_tasks import PIECE, Patience, Task, compare

from rlx import demo

FIRST_PROMPT, FIRST_CONTEXT = 32, 512
MEMORY_PROMPT, MEMORY_TOKENS, MEMORY_CONTEXT = 512, 16, 1024
DEMO_TOKENS, DEMO_CONTEXT = 256, 512
BUSY_TOKENS = 8  # a turn; few, because a side may come to a near stop
TEXT = "Once upon a time there was a fox who"
GREEDY = 16
PARTS = ("prefill", "decode", "busy", "start", "memory", "demo")

INSTALL = {
    "llama.cpp": "CC=clang CXX=clang++ CMAKE_ARGS='-DGGML_NATIVE=ON -DGGML_OPENMP=OFF' pip install llama-cpp-python   "
    "(clang: what GCC 12 and 13 build crashes on machines with AMX; own threads are faster than OpenMP), or name an "
    "environment that has it with --peer-python PATH",
    "transformers": "pip install torch transformers accelerate gguf, or name an environment that has them with "
    "--torch-python PATH",
    "ik_llama.cpp": "build its target llama-bench with -DGGML_NATIVE=ON, and name it with --ik-bench PATH",
    "OpenVINO": "python -m venv openvino && openvino/bin/pip install openvino-genai 'optimum-intel[openvino]', convert "
    "a model with openvino_model.py, and name both with --openvino-python and --openvino-model",
}


@dataclass(frozen=True)
class Asked:
    """A side that was asked for.

    Attributes:
        script, python: what it runs.
        model: what it opens: the file, or for OpenVINO its own form of the model.
        fed: whether it takes token by token, and so can say what it would answer.
        whole: whether it takes part in all that is measured, not only in speeds.
    """

    script: str
    python: str
    model: Path
    fed: bool = True
    whole: bool = True


def asked(args: argparse.Namespace, model: Path) -> dict[str, Asked]:
    """The sides that were asked for, by name."""
    found = {
        "rlx": Asked("rlx_side.py", sys.executable, model),
        "llama.cpp": Asked("llama_side.py", args.peer_python, model),
    }
    if args.ik_bench:
        found["ik_llama.cpp"] = Asked("ik_side.py", sys.executable, model, fed=False, whole=False)
    if args.openvino_python and model in args.models:
        folder = args.openvino_model[args.models.index(model)]
        found["OpenVINO"] = Asked("openvino_side.py", args.openvino_python, folder, fed=False, whole=False)
    if args.torch_python:
        found["transformers"] = Asked("torch_side.py", args.torch_python, model, whole=False)
    return found


def whole(args: argparse.Namespace, model: Path) -> dict[str, Asked]:
    """The same without those that are there for prompts and decoding only."""
    return {name: side for name, side in asked(args, model).items() if side.whole}


def tasks(args: argparse.Namespace, context: int) -> Iterator[Task]:
    """What was asked for and fits the model's context."""
    prompts = [Task("prefill", n) for n in args.prefill] if "prefill" in args.only else []
    depths = [Task("decode", args.tokens, d) for d in args.decode] if "decode" in args.only else []
    for task in prompts + depths:
        if task.depth + task.tokens <= context:
            yield task
        else:
            print(f"{task.name}: left out, the model's context is {context}")


def limit(task: Task, bandwidths: Sequence[float], peaks: dict[str, float]) -> tuple[float, str]:
    """What bounds the task: reading the weights, or arithmetic, by the fastest kind in floating point."""
    if task.kind == "decode":
        return sorted(bandwidths)[len(bandwidths) // 2], "GB/s"
    rate, kind = max((rate, kind) for kind, rate in peaks.items() if "int8" not in kind)
    return rate, f"GFLOP/s ({kind})"


# -- one model, loaded -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(args: argparse.Namespace, model: Path, context: int) -> Iterator[tuple[dict[str, Process], dict[str, Any]]]:
    """The sides that are there, with the model loaded, and what each said of it."""
    with contextlib.ExitStack() as stack:
        sides, about = {}, {}
        for name, kind in asked(args, model).items():
            try:
                side = stack.enter_context(Process(name, kind.python, kind.script))
                about[name] = side("open", model=str(kind.model), threads=args.threads, context=context)
                sides[name] = side
            except MissingSide as error:
                if name == "rlx":
                    raise
                print(f"{error}\n  {name} is left out. To install it: {INSTALL[name]}")
        yield sides, about


def agree(sides: dict[str, Process]) -> str:
    """Whether all of these sides say the same after a text: tokens that are likeliest, one after another."""
    ids = sides["rlx"]("encode", text=TEXT)["ids"]
    found = {name: side("greedy", ids=ids, tokens=GREEDY) for name, side in sides.items()}
    odd = [name for name, said in found.items() if not said["finite"]]
    if odd:
        raise SideError(f"logits that are not finite: {', '.join(odd)}")
    told = same_tokens({name: said["tokens"] for name, said in found.items()})
    return f"{GREEDY} greedy tokens after {TEXT!r}: {told}"


def same_tokens(found: dict[str, list[int]]) -> str:
    """How long each side says what rlx says."""
    notes = []
    for name in (name for name in found if name != "rlx"):
        pairs = zip(found["rlx"], found[name], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        notes.append(f"{name}: the same" + ("" if first is None else f" for {first}, then another"))
    return "; ".join(notes) or "rlx alone"


def loaded(args: argparse.Namespace, model: Path, machine: Machine, result: dict[str, Any]) -> list[str]:
    """What is measured with all sides in memory: the speed of every task, and beside a busy process."""
    room = max([*args.prefill, *(d + args.tokens for d in args.decode), 128]) + 64
    text = []
    with opened(args, model, room) as (sides, result["sides"]):
        kinds = asked(args, model)
        result["greedy"] = agree({name: side for name, side in sides.items() if kinds[name].fed})
        print(result["greedy"], flush=True)
        rows = speeds(args, sides, machine, result)
        result["measurements"] = [row.as_json() for row in rows]
        text.append(heading(args, model, result))
        if rows:
            text.append(speed_table(rows))
        if "busy" in args.only and not args.patience.over:
            quiet, busy = beside_busy(args.patience, {n: s for n, s in sides.items() if kinds[n].whole})
            result["busy"] = {"alone": {n: s.seconds for n, s in quiet.items()}}
            result["busy"]["beside"] = {n: s.seconds for n, s in busy.items()}
            text.append(busy_table(quiet, busy))
    return text


def speeds(
    args: argparse.Namespace, sides: dict[str, Process], machine: Machine, result: dict[str, Any]
) -> list[Measurement]:
    """All tasks on one model, until the time is over."""
    chosen = list(tasks(args, result["sides"]["rlx"]["context"]))
    prompts = [t.tokens for t in chosen if t.kind == "prefill"]
    work = sides["rlx"]("work", prompts=prompts, depths=[t.middle for t in chosen], step=PIECE)
    rows, peaks = [], result["peaks"]
    result["read_gb_per_s"] = []
    for task in chosen:
        if args.patience.over:
            print(f"{task.name}: left out, the time is over")
            continue
        row, bandwidths = compare(task, sides, machine, args.patience)
        row.work = work["flops"][str(task.tokens)] if task.kind == "prefill" else work["bytes"][str(task.middle)]
        for kind, rate in machine.peaks().items():  # again: what else runs may have cost it some
            peaks[kind] = max(rate, peaks[kind])
        row.limit = limit(task, bandwidths, peaks)
        print("  " + said(row), flush=True)
        rows.append(row)
        result["read_gb_per_s"] += bandwidths
    for row in rows:  # by the best peaks of all
        if row.limit[1] != "GB/s":
            row.limit = limit(Task("prefill", 1), [], peaks)
    return rows


def said(row: Measurement) -> str:
    """A line while it runs."""
    parts = [f"{name} {number(series.rate)} tokens/s ({row.share(name):.0%})" for name, series in row.sides.items()]
    return f"{row.name}: {', '.join(parts)}"


def beside_busy(patience: Patience, sides: dict[str, Process]) -> tuple[dict[str, Series], dict[str, Series]]:
    """Decoding from an empty cache alone, and then with another process that wants a CPU of ours for itself."""
    task = Task("decode", BUSY_TOKENS)
    quiet, busy = ({name: Series(1) for name in sides} for _ in range(2))
    started = time.monotonic()
    for side in sides.values():
        task.warm(side)
    for _ in range(patience.repeat):
        for name, side in sides.items():
            quiet[name].seconds.append(task.run(side))
            with busy_process():
                busy[name].seconds.append(task.run(side))
        if patience.enough(started):
            break
    return quiet, busy


# -- fresh processes -----------------------------------------------------------------------------------------------


def processes(args: argparse.Namespace, model: Path, names: Sequence[str], result: dict[str, Any]) -> list[str]:
    """What is measured in processes that start for it."""
    text = []
    present = {name: side for name, side in whole(args, model).items() if name in names}
    with tempfile.TemporaryDirectory() as cache:
        if "start" in args.only and not args.patience.over:
            result["starts"] = starts(args, model, present, cache)
            text.append(start_table(result["starts"]))
        if "memory" in args.only and not args.patience.over:
            result["memory"] = memory(args, model, present, cache)
            text.append(memory_table(**result["memory"]))
    return text


def starts(
    args: argparse.Namespace, model: Path, present: dict[str, Asked], cache: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token of a short prompt: rlx with an empty compile cache and with a filled one, in turns
    with the others, which compile nothing.
    """
    numbers = (args.threads, FIRST_CONTEXT, FIRST_PROMPT, 1)
    cold = fresh("rlx", present["rlx"].python, present["rlx"].script, model, numbers, cache)["seconds"]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in present}
    found["rlx"]["cold"] = [cold]
    for _ in range(args.patience.repeat):
        for name, side in present.items():
            run = fresh(name, side.python, side.script, model, numbers, cache)
            found[name].setdefault("warm", []).append(run["seconds"])
    return found


def memory(args: argparse.Namespace, model: Path, present: dict[str, Asked], cache: str) -> dict[str, Any]:
    """Peak resident memory of fresh processes, compile cache filled."""
    numbers = (args.threads, MEMORY_CONTEXT, MEMORY_PROMPT, MEMORY_TOKENS)
    fresh("rlx", present["rlx"].python, present["rlx"].script, model, numbers, cache)  # compiling takes memory too
    found = {name: fresh(name, side.python, side.script, model, numbers, cache) for name, side in present.items()}
    peaks = {name: run["peak_bytes"] for name, run in found.items()}
    return {"peaks": peaks, "file_bytes": model.stat().st_size, "kv_bytes": found["rlx"]["kv_bytes"]}


def small_model(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The embedded demo model through each side's Python API, where every step's overhead shows."""
    series: dict[str, Series] = {}
    tokens: dict[str, list[int]] = {}
    ids = list(range(1, 9))
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, asked_for in whole(args, demo.path()).items():
            side = stack.enter_context(Process(name, asked_for.python, asked_for.script))
            try:
                side("open_api", model=str(demo.path()), threads=args.threads, context=DEMO_CONTEXT)
            except MissingSide:
                continue
            sides[name], series[name] = side, Series(1)
            side("api", ids=ids, tokens=DEMO_TOKENS)
        for _ in range(args.patience.repeat):
            for name, side in sides.items():
                run = side("api", ids=ids, tokens=DEMO_TOKENS)
                series[name].seconds.append(run["seconds"])
                tokens[name] = run["tokens"]
    row = Measurement(f"{DEMO_TOKENS} greedy tokens", series)
    head = f"## The demo model through the Python API, {args.threads} threads\n"
    note = f"Greedy tokens: {same_tokens(tokens)}.\n"
    return {"measurement": row.as_json(), "greedy": same_tokens(tokens)}, "\n".join([head, note, speed_table([row])])


# -- all -----------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, model: Path, machine: Machine) -> tuple[dict[str, Any], str]:
    """Everything about one model: as data, and as a section of a page."""
    print(f"{model.name}: {model.stat().st_size / 1e6:,.0f} MB", flush=True)
    result: dict[str, Any] = {"model": model.name, "machine": facts(args.machine), "threads": args.threads}
    result["peaks"] = machine.peaks()
    text = loaded(args, model, machine, result)
    text += processes(args, model, list(result["sides"]), result)
    return result, "\n".join(text)


def heading(args: argparse.Namespace, model: Path, result: dict[str, Any]) -> str:
    """Where, when and how it was measured."""
    m, sides = result["machine"], result["sides"]
    peaks = ", ".join(f"{kind} {number(rate)}" for kind, rate in result["peaks"].items())
    reads = sorted(result["read_gb_per_s"])
    read = f"; reads {number(reads[len(reads) // 2])} GB/s" if reads else ""
    versions = ", ".join(f"{name} {about['version']}" for name, about in sides.items())
    return (
        f"## {model.name}, {args.threads} threads, {sides['rlx']['target']}\n\n"
        f"{m['cpu']}, {m['cpus']} CPUs; {m['date']}, load {m['load']}. Peaks, 10^9/s: {peaks}{read}. {versions}.\n"
    )


def sizes(text: str) -> list[int]:
    """Numbers with commas between; none for an empty text."""
    found = [int(part) for part in text.split(",") if part.strip()]
    if any(n < 0 for n in found):
        raise ValueError(text)
    return found


def parts(text: str) -> list[str]:
    """Names of `PARTS` with commas between."""
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(PARTS):
        raise ValueError(text)
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", type=Path, metavar="MODEL", help="GGUF files; without one only the demo is measured")
    add("--only", type=parts, default=list(PARTS), metavar="PART,PART", help=f"of {', '.join(PARTS)}; all by default")
    add("--quick", action="store_true", help="3 turns of 16 tokens, 12 s a row, settings of llama.cpp by short trials")
    add("--minutes", type=float, default=float("inf"), metavar="M", help="nothing more begins after so many")
    add("--peer-python", default=sys.executable, metavar="PATH", help="Python that has llama_cpp")
    add("--torch-python", metavar="PATH", help="Python that has transformers; this one if it does; empty for none")
    add("--ik-bench", metavar="PATH", help="llama-bench of ik_llama.cpp")
    add("--openvino-python", metavar="PATH", help="Python that has openvino_genai")
    add(
        "--openvino-model",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="of openvino_model.py, one a MODEL",
    )
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: rlx and llama.cpp alone, if its build has CUDA")
    add("--threads", type=int, help="of each side; the physical cores that this process may use by default")
    add("--repeat", type=int, help="turns (default 5)")
    add("--row-seconds", type=float, metavar="S", help="no further turn of a row begins after so many")
    add("--prefill", type=sizes, default=[32, 128, 512, 2048], metavar="N,N", help="prompts (default 32,128,512,2048)")
    add("--decode", type=sizes, default=[0, 512, 4096], metavar="N,N", help="tokens before (default 0,512,4096)")
    add("--tokens", type=int, help="decoded a turn (default 32)")
    add("--machine", metavar="NAME", help="the machine in tables, if its processor does not say which it is")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured, every single run")
    add("--write", type=Path, metavar="PAGE", help="put the tables into this page: docs/measurements.md")
    args = parser.parse_args(argv)
    check(parser, args)
    usual = {"repeat": 3, "tokens": 16, "row_seconds": 12.0} if args.quick else {"repeat": 5, "tokens": 32}
    for name, value in {"row_seconds": float("inf"), **usual}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device != "cpu":
        args.torch_python = args.openvino_python = args.ik_bench = ""
    os.environ["VERSUS_DEVICE"] = args.device  # for the processes of the sides
    if args.torch_python is None and find_spec("torch") and find_spec("transformers"):
        args.torch_python = sys.executable
    args.patience = Patience(args.repeat, args.row_seconds, time.monotonic() + args.minutes * 60, args.quick)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Leaves with a message if a number makes no sense or a file is not there."""
    for name, value in (("repeat", args.repeat), ("tokens", args.tokens), ("prefill", min(args.prefill, default=1))):
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: expected 1 or more")
    for model in args.models:
        if not model.is_file():
            parser.error(f"{model}: no such file; benchmarks/make_model.py writes one")
    if args.openvino_python and len(args.openvino_model) != len(args.models):
        parser.error(
            f"--openvino-model {len(args.openvino_model)} times for {len(args.models)} models: give one for each"
        )
    if args.ik_bench:
        os.environ["IK_BENCH"] = args.ik_bench  # for the side's process


def main() -> int:
    args = arguments()
    results: dict[str, Any] = {"machine": facts(args.machine), "models": []}
    with Machine(args.threads, args.device) as machine:
        args.threads = machine.threads
        try:
            if "demo" in args.only:
                results["demo"], text = small_model(args)
                publish(args, "demo model", results, text)
            for model in args.models:
                if args.patience.over:
                    print(f"{model.name}: left out, the time is over")
                    continue
                result, text = measure(args, model, machine)
                results["models"].append(result)
                publish(args, f"{model.name}, {result['sides']['rlx']['target']}", results, text)
        except SideError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def publish(args: argparse.Namespace, name: str, results: dict[str, Any], text: str) -> None:
    """Prints a section, and puts it and all that is known so far where they were asked for."""
    print(f"\n{text}", flush=True)
    if args.write:
        write(args.write, f"{name}, {args.threads} threads, {results['machine']['cpu']}", text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
