"""`rlx bench MODEL`: measures speed, compares it with the limits of the machine, and shows where the time goes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from rlx import demo
from rlx.cli import bench_compare, bench_rows
from rlx.cli.answering import read_images
from rlx.cli.command import Command, json_option
from rlx.cli.options import model_argument, some_engine_options
from rlx.cli.output import Bars, counted, size, table
from rlx.compiler.profiling import OpTime
from rlx.engine.engine import Engine
from rlx.engine.programs import reporting
from rlx.runners.auto import runner_class
from rlx.vision.image import Image
from rlx.weights import open_weights

_COUNT = click.IntRange(1)

BUSY_SPREAD = 0.15  # runs that differ by more than this share of the median were disturbed
BUSY_CPU = 0.75  # so were threads that got less than this share of their time from the operating system


@click.command(cls=Command)
@model_argument
@click.option("--prompt", type=_COUNT, default=512, show_default=True, metavar="N", help="Tokens of the prompt.")
@click.option("--generate", type=_COUNT, default=64, show_default=True, metavar="N", help="Number of tokens to decode.")
@click.option("--repeat", type=_COUNT, default=3, show_default=True, metavar="N", help="Runs; the median is shown.")
@click.option("--image", metavar="FILE", help="Also measure the encoding of an image.")
@click.option(
    "--rows", type=bench_rows.COUNTS, metavar="N,...", help="Measure only steps of N sequences, one token each."
)
@click.option(
    "--depth",
    type=bench_rows.COUNTS,
    default="64",
    show_default=True,
    metavar="N,...",
    help="With --rows: tokens of each sequence before the steps.",
)
@some_engine_options("threads", "precision", "kv_dtype", "mmproj", "device")
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
        bench_rows.bench_rows(model, rows, depth, as_json, engine)
        return
    old = None if compare is None else bench_compare.earlier(compare)
    images = read_images([] if image is None else [image])
    usual = demo.path(demo.VISION if images else demo.TEXT)
    loader = open_weights(model if model is not None else usual)
    runner_class(loader)  # whether there is one
    with Bars("opening the model") as bars:
        opened = Engine.open(loader, max_seq=prompt + generate + 16, progress=bars, **engine)
        try:
            bars.waiting("measuring")
            seen = [measure_image(opened, each, repeat) for each in images]
            result = measure(opened, prompt, generate, repeat, bars.close)  # they are gone when the clock runs
            result |= {"image": seen[0]} if seen else {}
            result |= bench_compare.about(opened, prompt, generate, repeat)
        finally:
            opened.close()
    if reasons := disturbances(result):
        click.echo(f"Warning: the machine is busy: {', '.join(reasons)}. Measure again when it is idle.", err=True)
    if as_json:
        click.echo(json.dumps(result | ({} if old is None else {"compared": bench_compare.compared(old, result)})))
    else:
        _show(result)
        if old is not None:
            bench_compare.show(old, result)
    if old is not None and at_least is not None and (slow := bench_compare.too_slow(old, result, at_least)):
        for each in slow:
            click.echo(f"slower: {each.name}, {each.ratio:.2f} times the earlier speed", err=True)
        ctx.exit(bench_compare.SLOWER)


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
    warm()
    prefill, decode, bandwidth, cpu = [], [], [], 0.0
    moved, threads = reporting.step_bytes(engine, prompt + generate // 2), engine.stats()["threads"]
    for _ in range(repeat):
        sequence.rewind(0)
        start, computed = time.perf_counter(), time.process_time()
        engine.append(sequence, ids)
        prefill.append(time.perf_counter() - start)
        start = time.perf_counter()
        for i in range(generate):
            engine.append(sequence, ids[i % prompt : i % prompt + 1])
        decode.append((time.perf_counter() - start) / generate)
        cpu += time.process_time() - computed
        bandwidth.append(reporting.read_bandwidth(engine, moved))  # of a small model that of the cache that holds it
    sequence.discard()
    report = reporting.profile_step(engine, past=prompt)
    report_prefill = reporting.profile_step(engine, ids)
    step, many, read = statistics.median(decode), statistics.median(prefill), max(bandwidth)
    peaks = reporting.arithmetic_peaks(engine)
    flops = sum(t.flops for t in report_prefill)
    return {
        "threads": threads,
        "cpu_share": cpu / threads / (sum(prefill) + generate * sum(decode)),
        "target": engine.stats()["target"],
        "read_gb_per_s": read,
        "read_bytes": moved,
        "peak_gop_per_s": peaks,
        "prefill": {
            "tokens": prompt,
            "tokens_per_s": prompt / many,
            "gflop_per_s": flops / many / 1e9,
            "runs": [prompt / seconds for seconds in prefill],
        },
        "decode": {
            "tokens": generate,
            "tokens_per_s": 1 / step,
            "gb_per_s": moved / step / 1e9,
            "runs": [1 / seconds for seconds in decode],
        },
        "decode_share_of_bandwidth": moved / step / 1e9 / read,
        "decode_kernels": [_row(t, read, peaks) for t in report],
        "prefill_kernels": [_row(t, read, peaks) for t in report_prefill],
    }


def disturbances(result: Mapping[str, Any]) -> list[str]:
    """Signs that other programs, or other guests of the host, took time from a measurement; none on an idle machine."""
    found = []
    for phase in ("prefill", "decode"):
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
    prepare, encode = [], []
    for _ in range(repeat):
        start = time.perf_counter()
        patches = processor.preprocess(image)
        prepare.append(time.perf_counter() - start)
        start = time.perf_counter()
        tower.encode(patches)
        encode.append(time.perf_counter() - start)
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
    for phase, limit in limits.items():
        found, runs = result[phase], result[phase]["runs"]
        spread = f"{min(runs):.1f} to {max(runs):.1f}"
        click.echo(f"{phase:8}{found['tokens']:5d}  {found['tokens_per_s']:9.1f} tokens/s ({spread})  {limit}")
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
