#!/usr/bin/env python3
"""Decode speed with and without speculation: prompt lookup on text that repeats itself and on text that does not, and
the model's own head for further tokens where it has one.

    python benchmarks/speculative.py [MODEL] [--tokens 160] [--runs 9] [--drafts 2 3] [--threads N] [--clock wall|cpu]
        [--watched]

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from rlx import demo
from rlx.errors import UnsupportedModelError
from rlx.runners.engine.engine import Engine
from rlx.runners.generation.checks import check_finite
from rlx.runners.generation.requests import Logits
from rlx.runners.speculation.mtp import HeadDrafter
from rlx.runners.speculation.prompt_lookup import LookedUp
from rlx.runners.speculation.speculative import Counters, Drafter, PromptLookup, Speculation
from rlx.sampling import SampleOpts, Sampler
from rlx.text.chat import chat_ids

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
OPENING, QUESTION = "Once upon a time", "Write a poem about the sea."


@dataclass
class Way:
    """One way to decode.

    Attributes:
        drafter: who guesses, for a prompt; None decodes token by token.
        seconds: a token, of each run.
    """

    name: str
    drafter: Callable[[list[int]], AbstractContextManager[Drafter]] | None
    seconds: list[float] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    equal: int = 0  # tokens before the first that is another than without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(demo.path()))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--drafts", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--watched", action="store_true")
    args = parser.parse_args()
    engine = Engine.open(args.model, threads=args.threads)
    what = f"{engine.stats()['threads']} threads, {args.tokens} tokens, {args.runs} runs, {args.clock} time"
    print(f"{args.model}, {what}{', watched' * args.watched}")
    for text, ids in prompts(engine):
        ways = list(ways_of(engine, args.drafts))
        for _ in range(args.runs + 1):  # the first one compiles
            compare(engine, ids, ways, args)
        for line in report(ways):
            print(f"{text:16} {line}", flush=True)
    engine.close()


def prompts(engine: Engine) -> Iterator[tuple[str, list[int]]]:
    ids = engine.tokenizer.encode(OPENING)
    yield "new text", ids
    yield "repetitive text", chat_ids(engine.tokenizer, [{"role": "user", "content": QUESTION}])


def ways_of(engine: Engine, drafts: list[int]) -> Iterator[Way]:
    yield Way("plain", None)
    yield Way("prompt-lookup", lambda ids: nullcontext(PromptLookup(ids)))
    try:
        with engine.predicting():
            pass
    except UnsupportedModelError:
        return
    for count in drafts:
        yield Way(f"mtp, {count} drafts", lambda ids, count=count: engine.predicting(count))


def compare(engine: Engine, ids: list[int], ways: list[Way], args: argparse.Namespace) -> None:
    """One run of each way."""
    expected = None
    for way in ways:
        way.counters = Counters()
        tokens, seconds = decode(engine, ids, args.tokens, way, CLOCKS[args.clock], args.watched)
        expected = expected or tokens
        pairs = zip(tokens, expected, strict=True)
        way.equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        way.seconds.append(seconds)


def decode(
    engine: Engine,
    ids: list[int],
    count: int,
    way: Way,
    clock: Callable[[], float] = time.perf_counter,
    watched: bool = False,
) -> tuple[list[int], float]:
    """`count` tokens after a prompt, and seconds a token from the second one on."""
    with way.drafter(ids) if way.drafter else nullcontext(None) as drafter:
        engine.reset()
        first = engine.forward(ids)
        start = clock()
        if watched:
            tokens = one_by_one(engine, first, ids, count, drafter, way.counters)
        else:
            tokens = in_runs(engine, int(first.argmax()), count, drafter, way.counters)
        return tokens, (clock() - start) / (count - 1)


def in_runs(engine: Engine, token: int, count: int, drafter: Drafter | None, counters: Counters) -> list[int]:
    """Many tokens a native call."""
    tokens, looked_up = [token], LookedUp(engine, drafter, counters) if isinstance(drafter, PromptLookup) else None
    while left := count - len(tokens):
        if looked_up:
            tokens += looked_up.more(tokens[-1], left, ())
        elif isinstance(drafter, HeadDrafter):
            found = engine.drafted(drafter, tokens[-1], left, (), counters)
            tokens += found or engine.greedy(engine.current, tokens[-1], 1)
        else:
            tokens += engine.greedy(engine.current, tokens[-1], left)
    return tokens


def one_by_one(
    engine: Engine, first: Logits, ids: list[int], count: int, drafter: Drafter | None, counters: Counters
) -> list[int]:
    """Every token comes back to Python before the next one is computed."""
    sampler = Sampler(SampleOpts.greedy(), ids)
    if drafter is None:
        return chosen(first, lambda token: check_finite(engine.forward([token]), "decode"), sampler, count)
    speculation = Speculation(engine, drafter, count - 1, check_finite, counters)
    tokens = chosen(first, speculation.step, sampler, count)
    speculation.finish()
    return tokens


def chosen(logits: Logits, step: Callable[[int], Logits], sampler: Sampler, count: int) -> list[int]:
    tokens = [sampler.sample(logits)]
    for _ in itertools.repeat(None, count - 1):
        tokens.append(sampler.sample(step(tokens[-1])))
    return tokens


def report(ways: list[Way]) -> Iterator[str]:
    plain = statistics.median(ways[0].seconds[1:])
    for way in ways:
        median, c = statistics.median(way.seconds[1:]), way.counters
        line = f"{way.name:14} {1 / median:8.1f} tokens/s  {plain / median:5.2f} times"
        if c.steps:
            rate = f"{c.accepted / c.drafted:.2f}" if c.drafted else "-"
            line += f"  {c.steps} steps, {c.accepted} of {c.drafted} drafts accepted ({rate}), {way.equal} tokens equal"
        yield line


if __name__ == "__main__":
    main()
