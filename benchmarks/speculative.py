#!/usr/bin/env python3
"""Decode speed with and without speculation: prompt lookup on text that repeats itself and on text that does not, the
model's own head for further tokens where it has one, and draft models and heads.

    python benchmarks/speculative.py [MODEL] [--draft PATH ...] [--tokens 160] [--runs 9] [--threads N]
        [--clock wall|cpu] [--watched]

Greedy, as `generate` does it: where nobody looks at a token before the next one is computed, many tokens are one native
call, plain ones and those with drafts of the head. With --watched every token comes back to Python, as with a callback
or with sampling. The runs of all ways are interleaved, and their medians compared. Where two tokens are nearly tied,
rounding may choose another one with drafts than without: the number of equal tokens is printed. Without a model the
embedded one runs. Repetitive text: a poem, and what a small model makes of it when it must go on behind its end. The
clock "cpu" counts the time of this process instead, for a machine that others use too; it says something with one
thread only.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlx
from rlx import demo
from rlx.engine.speculation.drafts import Counters
from rlx.errors import UnsupportedModelError

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
OPENING, QUESTION = "Once upon a time", "Write a poem about the sea."


@dataclass
class Way:
    """One way to decode.

    Attributes:
        speculative: as the argument of `generate`.
        seconds: a token, of each run.
    """

    name: str
    speculative: str | None
    seconds: list[float] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    equal: int = 0  # tokens before the first that is another than without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(demo.path()))
    parser.add_argument("--draft", action="append", default=[], help="a draft model or a draft head; may be repeated")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--watched", action="store_true")
    args = parser.parse_args()
    with rlx.auto_runner(args.model, threads=args.threads) as runner:
        what = f"{runner.stats()['threads']} threads, {args.tokens} tokens, {args.runs} runs, {args.clock} time"
        print(f"{args.model}, {what}{', watched' * args.watched}")
        for text, ids in prompts(runner):
            ways = list(ways_of(runner, args.draft))
            for _ in range(args.runs + 1):  # the first one compiles
                compare(runner, ids, ways, args)
            for line in report(ways):
                print(f"{text:16} {line}", flush=True)


def prompts(runner: Any) -> Iterator[tuple[str, list[int]]]:
    yield "new text", runner.tokenizer.encode(OPENING)
    yield "repetitive text", runner.chat_ids([{"role": "user", "content": QUESTION}])


def ways_of(runner: Any, drafts: list[str]) -> Iterator[Way]:
    yield Way("plain", None)
    yield Way("prompt-lookup", "prompt-lookup")
    for path in drafts:
        yield Way("/".join(Path(path).parts[-2:]), f"model:{path}")
    try:
        runner.generate([1, 2], 2, speculative="mtp", stop_at_eog=False)
    except UnsupportedModelError:
        return
    yield Way("mtp", "mtp")


def compare(runner: Any, ids: list[int], ways: list[Way], args: argparse.Namespace) -> None:
    """One run of each way."""
    expected = None
    for way in ways:
        tokens, seconds = decode(runner, ids, args.tokens, way, CLOCKS[args.clock], args.watched)
        expected = expected or tokens
        pairs = zip(tokens, expected, strict=True)
        way.equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        way.seconds.append(seconds)


def decode(
    runner: Any, ids: list[int], count: int, way: Way, clock: Callable[[], float], watched: bool
) -> tuple[list[int], float]:
    """`count` tokens after a prompt whose beginning is known, and seconds a token."""
    runner.prefill_logits(ids)
    before, start = runner.stats()["speculation"], clock()
    options: dict[str, Any] = {"speculative": way.speculative, "stop_at_eog": False}
    tokens = runner.generate(ids, count, (lambda token: None) if watched else None, **options)
    seconds, after = (clock() - start) / count, runner.stats()["speculation"]
    way.counters = Counters(**{name: after[name] - before[name] for name in after})
    return list(tokens), seconds


def report(ways: list[Way]) -> Iterator[str]:
    plain = statistics.median(ways[0].seconds[1:])
    for way in ways:
        median, c = statistics.median(way.seconds[1:]), way.counters
        line = f"{way.name:24} {1 / median:8.1f} tokens/s  {plain / median:5.2f} times"
        if c.steps:
            rate = f"{c.accepted / c.drafted:.2f}" if c.drafted else "-"
            line += f"  {c.steps} steps, {c.accepted} of {c.drafted} drafts accepted ({rate}),"
            line += f" {1 + c.accepted / c.steps:.2f} tokens a step, {way.equal} tokens equal"
        yield line


if __name__ == "__main__":
    main()
