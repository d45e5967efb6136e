"""`rlx bench MODEL`: measures speed, compares it with the limits of the machine, and shows where the time goes.

With `--rows` it measures steps of several sequences, each kind of work beside what it takes at least; with `--compare
FILE` an earlier measurement stands beside this one, and what of the difference is noise.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rlx import demo, json_file
from rlx.cli.answering import read_images
from rlx.cli.command import Command, Parsed, json_option
from rlx.cli.options import model_argument, open_engine, some_engine_options
from rlx.cli.output import Bars, counted, size, table
from rlx.compiler.profiling import OpTime
from rlx.compiler.tuned import machine
from rlx.engine.engine import Engine
from rlx.engine.programs import reporting
from rlx.engine.programs.reporting import ROOM, BatchStep, batch_steps
from rlx.errors import ArgumentError
from rlx.store.key import versions
from rlx.vision.image import Image

_HEADS = "kernel", "regions", "ms", "share", "prologue", "waiting", "least ms", "of", "reached"


_REST = {
    "uneven_ms": "regions slower than their median",
    "waking_ms": "waking and joining the workers",
    "choice_ms": "choice of tokens",
    "between_ms": "between steps",
}


def _counts(value: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    found = [int(part) for part in value.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


COUNTS = Parsed(_counts, "no list of numbers above 0, such as 1,8,32")


@contextmanager
def _opened(model: str | None, usual: str, max_seq: int, options: Mapping[str, Any]) -> Iterator[tuple[Engine, Bars]]:
    """An engine to measure, with the bars that show how far it is; the embedded model `usual` if none is named."""
    path = model if model is not None else demo.path(usual)
    with Bars("opening the model") as bars, open_engine(path, bars, max_seq=max_seq, **options) as engine:
        bars.waiting("measuring")
        yield engine, bars


def bench_rows(
    model: str | None, rows: Sequence[int], depths: Sequence[int], as_json: bool, options: Mapping[str, Any]
) -> None:
    """Measures steps of so many sequences after so many tokens each, and shows them."""
    with _opened(model, demo.TEXT, max(depths) + ROOM, options) as (engine, _):
        peaks = reporting.arithmetic_peaks(engine)
        found = [_described(engine, step, peaks) for depth in depths for step in batch_steps(engine, rows, depth)]
        stats = engine.stats()
    result = {"threads": stats["threads"], "target": stats["target"], "peak_gop_per_s": peaks, "steps": found}
    click.echo(json.dumps(result)) if as_json else _show_rows(result)


def _described(engine: Engine, step: BatchStep, peaks: Mapping[str, float]) -> dict[str, Any]:
    """A step as plain data, with the least time of each kind of work; rates are those of as many bytes as it reads."""
    moved = sum(kind.bytes for kind in step.kinds)
    bandwidth = reporting.read_bandwidth(engine, moved)
    kinds, least = [], 0.0
    for kind in step.kinds:
        bound, limit = kind.bound(bandwidth, peaks)
        least += bound
        kinds.append({
            "kernel": kind.label, "regions": kind.regions, "ms": kind.seconds * 1e3,
            "prologue_ms": kind.prologues * 1e3, "waiting_ms": kind.waits * 1e3, "least_ms": bound * 1e3,
            "limit": limit, "bytes": kind.bytes, "operations": dict(kind.operations),
        })  # fmt: skip
    rest = {name: getattr(step, name.removesuffix("_ms")) * 1e3 for name in _REST}
    in_run = None if step.in_run is None else step.in_run * 1e3
    times = {"rows": step.rows, "depth": step.depth, "ms": step.seconds * 1e3, "in_run_ms": in_run, **rest}
    times |= {"least_ms": least * 1e3}
    return {**times, "read_bytes": moved, "read_gb_per_s": bandwidth, "kernels": kinds}


def _show_rows(result: Mapping[str, Any]) -> None:
    peaks = ", ".join(f"{kind} {rate:.0f}" for kind, rate in result["peak_gop_per_s"].items())
    click.echo(f"{counted(result['threads'], 'thread')}, {result['target']}; peaks in GOP/s: {peaks}")
    for step in result["steps"]:
        rows, ms, in_run = step["rows"], step["ms"], step["in_run_ms"]
        click.echo(f"\n{counted(rows, 'row')} at depth {step['depth']}: {ms:.2f} ms, {rows / ms * 1e3:.0f} tokens/s, "
                   f"{step['least_ms'] / ms:.0%} of the limit at {step['read_gb_per_s']:.1f} GB/s")  # fmt: skip
        if in_run is not None:
            click.echo(f"in a run, with nothing between two steps: {in_run:.2f} ms, {rows / in_run * 1e3:.0f} tokens/s")
        lines = [_row_cells(row, ms) for row in step["kernels"]]
        for name, label in _REST.items():
            lines.append((label, "", f"{step[name]:.3f}", f"{step[name] / ms:.0%}", *[""] * 5))
        table(_HEADS, lines, right=[head for head in _HEADS[1:] if head != "of"])


def _row_cells(row: Mapping[str, Any], ms: float) -> tuple[str, ...]:
    """The line of a kind of work in a step of so many milliseconds."""
    parts = (f"{row[name]:.3f}" for name in ("prologue_ms", "waiting_ms", "least_ms"))
    times = f"{row['ms']:.3f}", f"{row['ms'] / ms:.0%}", *parts
    return row["kernel"], str(row["regions"]), *times, row["limit"], f"{row['least_ms'] / row['ms']:.0%}"


SLOWER = 3
"""Exit code where `--at-least` is not reached."""

NOISE = "noise"
_CONDITIONS = ("model", "conditions", "machine", "versions")
_PHASES = ("prefill", "decode")
_TASKS = (*_PHASES, "greedy")


Figure = Mapping[str, Any]
"""A figure of two measurements, as plain JSON data: `name` of the task or kernel, `unit`, the medians `old` and `new`,
`times_as_fast`, and whether the difference is `noise`: the ranges of their runs overlap.
"""


def about(engine: Engine, prompt: int, generate: int, repeat: int) -> dict[str, Any]:
    """Model, conditions, machine and versions of a measurement."""
    stats, path = engine.stats(), engine.weights.loader.path
    described = engine._compiler.target.describe()
    return {
        "model": {"name": path.name, "bytes": path.stat().st_size if path.is_file() else None,
                  "parameters": stats["parameters"]},
        "conditions": {"prompt": prompt, "generate": generate, "repeat": repeat, "threads": stats["threads"],
                       "precision": stats["precision"], "kv_dtype": stats["kv_dtype"], "profile": stats["profile"]},
        "machine": {"cpu": machine(), "cpus": os.cpu_count(), "target": stats["target"],
                    "features": described.get("features", ""), "system": platform.platform()},
        "versions": {name: value for name, value in versions().items() if value},
    }  # fmt: skip


def earlier(path: str) -> Mapping[str, Any]:
    """The measurement in a file that `rlx bench --json` wrote.

    Raises:
        ArgumentError: it cannot be read, or holds something else.
    """
    found = json_file.read_object(Path(path), ArgumentError)
    try:
        for task in _TASKS:
            _range(found[task]["runs"])
        for phase in _PHASES:
            for row in found[f"{phase}_kernels"]:
                _range(row["ms_range"])
                float(row["ms"]), str(row["kernel"])
        if not all(isinstance(found[each], dict) for each in _CONDITIONS):
            raise TypeError("conditions")
    except (KeyError, TypeError, ValueError) as error:
        hint = "Write one: rlx bench MODEL --json > FILE"
        raise ArgumentError("this is no measurement of this version of rlx bench", where=path, hint=hint) from error
    return found


def _range(values: Any) -> tuple[float, float]:
    numbers = [float(value) for value in values]
    return min(numbers), max(numbers)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The conditions that differ: "machine cpu: A, now B"."""
    found = []
    for part in _CONDITIONS:
        for name in {**old[part], **new[part]}:
            before, now = old[part].get(name), new[part].get(name)
            if before != now:
                found.append(f"{part} {name}: {_brief(before)}, now {_brief(now)}")
    return found


def _brief(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def figures(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Figure]:
    """The figures that both have measured: tasks first, then kernels by phase."""
    for phase in _TASKS:
        yield _figure(phase, "tokens/s", old[phase], new[phase], "tokens_per_s", "runs", more=True)
    if "image" in old and "image" in new:
        yield _figure("image", "ms", old["image"], new["image"], "encode_ms", "encode_ms_runs", more=False)
    for phase in _PHASES[::-1]:
        before = {row["kernel"]: row for row in old[f"{phase}_kernels"]}
        for row in new[f"{phase}_kernels"]:
            if row["kernel"] in before:
                name = f"{phase}: {row['kernel']}"
                yield _figure(name, "ms", before[row["kernel"]], row, "ms", "ms_range", more=False)


def _figure(
    name: str, unit: str, old: Mapping[str, Any], new: Mapping[str, Any], value: str, runs: str, *, more: bool
) -> Figure:
    (low, high), (least, most) = _range(old[runs]), _range(new[runs])
    before, now = old[value], new[value]
    ratio, noise = now / before if more else before / now, low <= most and least <= high
    return {"name": name, "unit": unit, "old": before, "new": now, "times_as_fast": ratio, "noise": noise}


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison as plain JSON data."""
    return {"differences": differences(old, new), "figures": list(figures(old, new))}


def show(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Prints the comparison; warns on stderr of conditions that differ."""
    for each in differences(old, new):
        click.echo(f"Warning: {each}", err=True)
    rows = [
        (
            each["name"], each["unit"], f"{each['old']:.4g}", f"{each['new']:.4g}", f"{each['times_as_fast']:.2f}x",
            NOISE if each["noise"] else "",
        )
        for each in figures(old, new)
    ]  # fmt: skip
    click.echo("\nbeside the earlier measurement:")
    table(("task or kernel", "unit", "old", "new", "speed", ""), rows, right=("old", "new", "speed"))
    gone = {row["kernel"] for phase in _PHASES for row in old[f"{phase}_kernels"]}
    here = {row["kernel"] for phase in _PHASES for row in new[f"{phase}_kernels"]}
    for what, names in (("only before", gone - here), ("only now", here - gone)):
        if names:
            click.echo(f"{what}: {', '.join(sorted(names))}")


def too_slow(old: Mapping[str, Any], new: Mapping[str, Any], least: float) -> list[Figure]:
    """The tasks that are slower than `least` times the earlier speed, by more than noise."""
    tasks = (each for each in figures(old, new) if ":" not in each["name"])
    return [each for each in tasks if each["times_as_fast"] < least and not each["noise"]]


_COUNT = click.IntRange(1)

BUSY_SPREAD = 0.15  # runs that differ by more than this share of the median were disturbed
BUSY_CPU = 0.75  # so were threads that got less than this share of their time from the operating system


@click.command(cls=Command)
@model_argument
@click.option("--prompt", type=_COUNT, default=512, show_default=True, metavar="N", help="Tokens of the prompt.")
@click.option("--generate", type=_COUNT, default=64, show_default=True, metavar="N", help="Number of tokens to decode.")
@click.option("--repeat", type=_COUNT, default=3, show_default=True, metavar="N", help="Runs; the median is shown.")
@click.option("--image", metavar="FILE", help="Also measure the encoding of an image.")
@click.option("--rows", type=COUNTS, metavar="N,...", help="Measure only steps of N sequences, one token each.")
@click.option(
    "--depth",
    type=COUNTS,
    default="64",
    show_default=True,
    metavar="N,...",
    help="With --rows: tokens of each sequence before the steps.",
)
@some_engine_options("threads", "precision", "kv_dtype", "mmproj", "device", "n_cpu_moe")
@click.option("--compare", metavar="FILE", help="Show beside it what an earlier `rlx bench --json > FILE` measured.")
@click.option(
    "--at-least",
    type=click.FloatRange(0, min_open=True),
    metavar="RATIO",
    help="With --compare: exit with 3 if a task has less than RATIO times the earlier speed, beyond noise.",
)
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    model: str | None,
    prompt: int,
    generate: int,
    repeat: int,
    image: str | None,
    rows: list[int] | None,
    depth: list[int],
    compare: str | None,
    at_least: float | None,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Measure prefill and decode of MODEL, and the encoding of images.

    Without MODEL it measures the demo model.

    \b
    rlx bench model.gguf --json > before.json
    rlx bench model.gguf --compare before.json
    rlx bench model.gguf --rows 1,8,32 --depth 64,512
    """
    if at_least is not None and compare is None:
        raise click.UsageError("--at-least needs --compare")
    if rows is not None:
        if image is not None or compare is not None:
            raise click.UsageError("--rows measures neither images (--image) nor a comparison (--compare)")
        bench_rows(model, rows, depth, as_json, engine)
        return
    old = None if compare is None else earlier(compare)
    images = read_images([] if image is None else [image])
    usual = demo.VISION if images else demo.TEXT
    with _opened(model, usual, prompt + generate + 16, engine) as (opened, bars):
        seen = [measure_image(opened, each, repeat) for each in images]
        result = measure(opened, prompt, generate, repeat, bars.close)  # they are gone when the clock runs
        result |= {"image": seen[0]} if seen else {}
        result |= about(opened, prompt, generate, repeat)
    if reasons := disturbances(result):
        click.echo(f"Warning: the machine is busy: {', '.join(reasons)}. Measure again when it is idle.", err=True)
    if as_json:
        click.echo(json.dumps(result | ({} if old is None else {"compared": compared(old, result)})))
    else:
        _show(result)
        if old is not None:
            show(old, result)
    if old is not None and at_least is not None and (slow := too_slow(old, result, at_least)):
        for each in slow:
            click.echo(f"slower: {each['name']}, {each['times_as_fast']:.2f} times the earlier speed", err=True)
        ctx.exit(SLOWER)


def measure(
    engine: Engine, prompt: int, generate: int, repeat: int, warm: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Medians of several runs, and the best of measurements of the read bandwidth between them.

    Args:
        warm: called when the programs are compiled, before the first run.
    """
    ids = [(7919 * i) % engine.config.vocab_size for i in range(prompt)]
    sequence = engine.open_sequence(shared=False)
    engine.append(sequence, ids)  # compiles, and touches every page
    engine.append(sequence, ids[:1])
    engine.greedy(sequence, ids[0], 1)
    warm()
    prefill, decode, greedy, bandwidth, cpu = [], [], [], [], 0.0
    moved, threads = reporting.step_bytes(engine, prompt + generate // 2), engine.stats()["threads"]
    for _ in range(repeat):
        sequence.rewind(0)
        computed = time.process_time()
        prefill.append(_seconds(engine.append, sequence, ids))
        decode.append(_seconds(_decode, engine, sequence, ids, generate) / generate)
        sequence.rewind(prompt)
        greedy.append(_seconds(_greedy, engine, sequence, ids[0], generate) / generate)
        cpu += time.process_time() - computed
        bandwidth.append(reporting.read_bandwidth(engine, moved))  # of a small model that of the cache that holds it
    sequence.discard()
    report, peaks = reporting.profile_step(engine, past=prompt), reporting.arithmetic_peaks(engine)
    most = engine.bucketing.ranges[-1][1]  # rows of a call: longer prompts take several
    report_prefill = reporting.profile_step(engine, ids[:most])
    step, many, read = statistics.median(decode), statistics.median(prefill), max(bandwidth)
    flops = sum(reporting.step_flops(engine, min(most, prompt - at), at) for at in range(0, prompt, most))
    return {
        "threads": threads,
        "cpu_share": cpu / threads / (sum(prefill) + generate * sum(decode + greedy)),
        "target": engine.stats()["target"],
        "read_gb_per_s": read,
        "read_bytes": moved,
        "peak_gop_per_s": peaks,
        "prefill": {"gflop_per_s": flops / many / 1e9, **_speeds(prompt, [each / prompt for each in prefill])},
        "decode": {"gb_per_s": moved / step / 1e9, **_speeds(generate, decode)},
        "greedy": _speeds(generate, greedy),
        "decode_share_of_bandwidth": moved / step / 1e9 / read,
        "decode_kernels": [_row(t, read, peaks) for t in report],
        "prefill_kernels": [_row(t, read, peaks) for t in report_prefill],
    }


def _seconds(work: Callable[..., object], *arguments: Any) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def _speeds(tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    """The figures of a task by the seconds that a token took in each run."""
    speed = 1 / statistics.median(seconds)
    return {"tokens": tokens, "tokens_per_s": speed, "runs": [1 / each for each in seconds]}


def _decode(engine: Engine, sequence: Any, ids: list[int], count: int) -> None:
    for i in range(count):
        engine.append(sequence, ids[i % len(ids) : i % len(ids) + 1])


def _greedy(engine: Engine, sequence: Any, token: int, count: int) -> None:
    """Appends tokens that the device chooses itself: as `runner.generate` does where nothing needs to see each."""
    while count:
        found = engine.greedy(sequence, token, count)
        token, count = found[-1], count - len(found)


def disturbances(result: Mapping[str, Any]) -> list[str]:
    """Signs that other programs, or other guests of the host, took time from a measurement; none on an idle machine."""
    found = []
    for phase in _TASKS:
        runs = result[phase]["runs"]
        spread = (max(runs) - min(runs)) / statistics.median(runs)
        if spread > BUSY_SPREAD:
            found.append(f"runs of {phase} differ by {spread:.0%}")
    if result["cpu_share"] < BUSY_CPU:
        found.append(f"its threads had a CPU for {result['cpu_share']:.0%} of the time")
    if result["decode_share_of_bandwidth"] > 1:
        found.append("decoding was faster than the measurement of the bandwidth")
    return found


def measure_image(engine: Engine, image: Image, repeat: int) -> dict[str, Any]:
    """Medians of several runs: making patches of an image, and encoding them.

    Raises:
        MultimodalError: the model has no vision tower.
        ImageError: the model takes no image of this size.
    """
    assert engine.images is not None
    processor, tower = engine.images.encoder.processor, engine.vision.required()
    patches = processor.preprocess(image)
    tower.encode(patches)  # loads and compiles
    prepare = [_seconds(processor.preprocess, image) for _ in range(repeat)]
    encode = [_seconds(tower.encode, patches) for _ in range(repeat)]
    seconds, flops = statistics.median(encode), tower.flops(patches)
    return {
        "height": image.size[0],
        "width": image.size[1],
        "patches": len(patches.patches),
        "tokens": patches.tokens,
        "preprocess_ms": statistics.median(prepare) * 1e3,
        "encode_ms": seconds * 1e3,
        "encode_ms_runs": [each * 1e3 for each in encode],
        "gflop_per_s": flops / seconds / 1e9,
    }


def _row(t: OpTime, bandwidth: float, peaks: dict[str, float]) -> dict[str, Any]:
    """A row of the table; `limit` is the limit that the kernel is nearest to, `share_of_limit` the fraction reached."""
    seconds, limit = max(t.seconds, 1e-12), t.limit(bandwidth, peaks)
    rates = {"gb_per_s": t.bytes / seconds / 1e9, "gflop_per_s": t.flops / seconds / 1e9}
    near = {"limit": limit.name, "share_of_limit": limit.share, "near": str(limit)}
    times = {"ms": t.seconds * 1e3, "ms_range": [each * 1e3 for each in t.range]}
    return {"kernel": t.label, "regions": t.regions, **times, **rates, **near}


def _show(result: dict[str, Any]) -> None:
    prefill, decode = result["prefill"], result["decode"]
    peaks = ", ".join(f"{kind} peak {rate:.0f} GOP/s" for kind, rate in result["peak_gop_per_s"].items())
    machine = f"{result['read_gb_per_s']:.1f} GB/s when {size(result['read_bytes'])} are read again and again, {peaks}"
    click.echo(f"{counted(result['threads'], 'thread')}, {result['target']}; {machine}")
    limits = {"prefill": f"{prefill['gflop_per_s']:8.1f} GFLOP/s", "decode": f"{decode['gb_per_s']:8.1f} GB/s"}
    share = result["decode_share_of_bandwidth"]
    limits["decode"] += f", {share:.0%} of the bandwidth" if share <= 1 else ", more than the measured bandwidth"
    for task in _TASKS:
        found, runs = result[task], result[task]["runs"]
        spread = f"{min(runs):.1f} to {max(runs):.1f}"
        line = f"{task:8}{found['tokens']:5d}  {found['tokens_per_s']:9.1f} tokens/s ({spread})"
        click.echo(f"{line}  {limits.get(task, '')}".rstrip())
    if (seen := result.get("image")) is not None:
        pixels, what = f"{seen['width']} x {seen['height']}", f"{seen['patches']} patches, {seen['tokens']} tokens"
        times = f"prepared in {seen['preprocess_ms']:.1f} ms, encoded in {seen['encode_ms']:.1f} ms"
        click.echo(f"image   {pixels}, {what}: {times}, {seen['gflop_per_s']:.1f} GFLOP/s")
    for phase in ("decode", "prefill"):
        click.echo(f"\none {phase} step:")
        heads = "kernel", "regions", "ms", "share", "GB/s", "GFLOP/s", "near"
        table(heads, _cells(result[f"{phase}_kernels"]), right=heads[1:-1])


def _cells(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The time of one step by kernel, and the limit of the machine that each kernel is nearest to."""
    total = sum(r["ms"] for r in rows)
    for r in rows:
        figures = f"{r['ms']:.3f}", f"{r['ms'] / total:.0%}", f"{r['gb_per_s']:.1f}", f"{r['gflop_per_s']:.1f}"
        yield r["kernel"], str(r["regions"]), *figures, r["near"]
