#!/usr/bin/env python3
"""A simulation of many replicas behind a router: prefix-aware routing beside taking turns.

    python benchmarks/replicas.py                           # 10 to 1,000 replicas, a synthetic trace
    python benchmarks/replicas.py --trace trace.jsonl       # a trace of your own

A trace has a JSON object a line, in the form of the published Mooncake traces: `timestamp` in ms, `input_length` and
`output_length` in tokens, and `hash_ids`, an id for each block of 512 tokens of the prompt; equal ids are equal
prefixes. The synthetic one is drawn with a seed: conversations of several turns begin with one of some system prompts,
whose popularity falls as 1 / rank; a turn's prompt is all that was said before, and more.

A replica takes step times from `scaling.py`. It computes one prompt at a time beside the answers under way, and each
gets half of the time; blocks of earlier prompts stay in its cache, the least recently used go first. The prefix-aware
router sends a request where most of its blocks are, unless that replica has far more to do than the better of two
others drawn at random.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from scaling import ASSUMED, MODELS, Machine, Model, prompt_ms, step_ms

BLOCK = 512  # tokens of a block
SLOTS = 32  # answers that a replica computes at once
FAR_MORE = 4  # requests that a replica may have more than another, and still get one whose prefix it has


@dataclass
class Request:
    """A request: its arrival in seconds, its tokens, and the blocks of its prompt. `first` and `end` are found."""

    at: float
    prompt: int
    answer: int
    blocks: Sequence[int]
    first: float = 0.0
    end: float = 0.0


def synthetic(seconds: float, rate: float, seed: int, systems: int = 200) -> list[Request]:
    """Requests of conversations: `rate` a second, in the order of their arrival."""
    rng, found, ids = random.Random(seed), list[Request](), iter(range(1 << 60))
    starts = [[next(ids) for _ in range(rng.randint(1, 4))] for _ in range(systems)]
    popular = [1 / (rank + 1) for rank in range(systems)]
    turns_on_average = 3
    for _ in range(int(seconds * rate / turns_on_average)):
        at, blocks = rng.uniform(0, seconds), [*rng.choices(starts, popular)[0]]
        length = BLOCK * len(blocks)
        for _ in range(1 + int(rng.expovariate(1 / (turns_on_average - 1)))):
            answer = max(1, min(1500, int(rng.lognormvariate(5.0, 0.8))))
            length += max(16, min(4000, int(rng.lognormvariate(5.5, 1.0))))
            blocks += [next(ids) for _ in range(length // BLOCK - len(blocks))]
            if length > 16_000 or at > seconds:
                break
            found.append(Request(at, length, answer, tuple(blocks)))
            at += answer * 0.1 + rng.expovariate(1 / 20)
            length += answer
    return sorted(found, key=lambda request: request.at)


def read(path: str) -> list[Request]:
    """The requests of a trace."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    found = [Request(r["timestamp"] / 1e3, r["input_length"], r["output_length"], r["hash_ids"]) for r in rows]
    return sorted(found, key=lambda request: request.at)


@dataclass(eq=False)
class Replica:
    """A replica: what it computes, and which blocks its cache holds.

    Attributes:
        capacity: blocks that the cache has room for.
        spoken: tokens that an answer under way all the time would have by now.
    """

    model: Model
    machine: Machine
    capacity: int
    now: float = 0.0
    spoken: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    left: float = 0.0  # seconds of the first waiting prompt, alone
    answers: list[tuple[float, int, Request]] = field(default_factory=list)  # when `spoken` is the first, it ends
    depth: float = 0.0  # sum over all answers
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.answers)

    def known(self, request: Request) -> int:
        """How many of the first blocks of a prompt the cache has."""
        return next((i for i, block in enumerate(request.blocks) if block not in self.cache), len(request.blocks))

    def add(self, request: Request) -> None:
        """Takes a request that arrives now."""
        self.waiting.append(request)
        if len(self.waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        """Begins with the first waiting prompt."""
        request = self.waiting[0]
        rows = max(1, request.prompt - BLOCK * self.known(request))
        each = prompt_ms(self.model, self.machine, min(rows, BLOCK), request.prompt - rows / 2)
        self.left = -(-rows // BLOCK) * each / 1e3
        for block in request.blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.capacity:
            self.cache.popitem(last=False)

    def advance(self, until: float) -> None:
        """Computes until a time."""
        while self.now < until:
            is_reading = bool(self.waiting) and len(self.answers) < SLOTS
            if not (is_reading or self.answers):
                self.now = until
                return
            share = 0.5 if is_reading and self.answers else 1.0
            rows = len(self.answers)
            pace = share / step_ms(self.model, self.machine, rows, self.depth / rows) * 1e3 if rows else 0.0
            reads = self.left / share if is_reading else float("inf")
            speaks = (self.answers[0][0] - self.spoken) / pace if rows else float("inf")
            passed = min(reads, speaks, until - self.now)
            self.now, self.spoken = self.now + passed, self.spoken + passed * pace
            self.left -= passed * share if is_reading else 0.0
            if passed == reads:
                self._read()
            elif passed == speaks:
                _, _, request = heapq.heappop(self.answers)
                request.end = self.now
                self.depth -= request.prompt

    def _read(self) -> None:
        """Ends the first waiting prompt; its answer begins."""
        request = self.waiting.pop(0)
        request.first = self.now
        heapq.heappush(self.answers, (self.spoken + request.answer, id(request), request))
        self.depth += request.prompt
        if self.waiting:
            self._begin()


Router = Callable[[Request], int]


def turns(replicas: Sequence[Replica], rng: random.Random) -> Router:
    """Replicas in turn."""
    numbers: Iterator[int] = (i % len(replicas) for i in range(1 << 60))
    return lambda request: next(numbers)


def prefixes(replicas: Sequence[Replica], rng: random.Random) -> Router:
    """Where most blocks of the prompt are, unless that is far busier than the better of two drawn at random."""
    last = dict[int, int]()  # the replica that a block was sent to last

    def choose(request: Request) -> int:
        drawn = rng.sample(range(len(replicas)), 2)
        best = next((last[block] for block in reversed(request.blocks) if block in last), drawn[0])
        for i in (best, *drawn):
            replicas[i].advance(request.at)
        other = min(drawn, key=lambda i: replicas[i].load)
        found = best if replicas[best].load <= replicas[other].load + FAR_MORE else other
        last.update(dict.fromkeys(request.blocks, found))
        return found

    return choose


ROUTERS = {"in turn": turns, "prefix-aware": prefixes}


def simulate(requests: Sequence[Request], replicas: Sequence[Replica], router: Router) -> float:
    """Computes all requests. Returns the share of their prompts' tokens that caches had."""
    known = 0
    for request in requests:
        replica = replicas[router(request)]
        replica.advance(request.at)
        known += BLOCK * replica.known(request)
        replica.add(request)
    for replica in replicas:
        replica.advance(float("inf"))
    return known / sum(request.prompt for request in requests)


def main() -> None:
    args = arguments()
    machine, model = ASSUMED[args.machine], MODELS[args.model]
    capacity = int(args.kv_gb * 1e9 / model.position / BLOCK)
    print(
        f"{args.model} on {args.machine} each, {args.kv_gb:g} GB of caches, {args.rate:g} requests a second and replica"
    )
    print("| replicas | router | cached | first token, median | 95% | goodput | of all | $ a million tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for count in args.replicas:
        for name, make in ROUTERS.items():
            requests = read(args.trace) if args.trace else synthetic(args.seconds, args.rate * count, args.seed)
            replicas = [Replica(model, machine, capacity) for _ in range(count)]
            cached = simulate(requests, replicas, make(replicas, random.Random(args.seed)))
            print(f"| {count} | {name} | {cached:.0%} | {summary(requests, count, args)} |")


def summary(requests: Sequence[Request], replicas: int, args: argparse.Namespace) -> str:
    """The other columns of a line."""
    waits = [request.first - request.at for request in requests]
    good = [
        request
        for request, wait in zip(requests, waits, strict=True)
        if wait <= args.first and request.end - request.first <= args.each / 1e3 * request.answer
    ]
    seconds = max(request.end for request in requests) - requests[0].at
    tokens = sum(request.answer for request in good)
    price = replicas * args.price * seconds / 3600 / max(1, tokens) * 1e6
    late = quantiles(waits, n=20)[-1]
    rate = len(good) / seconds
    return f"{median(waits):.2f} s | {late:.2f} s | {rate:.1f}/s | {len(good) / len(requests):.0%} | {price:.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=lambda text: [int(n) for n in text.split(",")], default=[10, 100, 1000])
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--machine", choices=ASSUMED, default="64 cores")
    parser.add_argument("--kv-gb", type=float, default=32.0, help="memory for the caches of a replica")
    parser.add_argument("--trace", help="a file of requests; all replica counts get the same")
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the synthetic trace")
    parser.add_argument("--rate", type=float, default=0.35, help="its requests a second and replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=float, default=3.0, help="seconds to the first token of a good answer")
    parser.add_argument("--each", type=float, default=150.0, help="milliseconds a token of a good answer, on average")
    parser.add_argument("--price", type=float, default=1.5, help="dollars of a replica an hour")
    return parser.parse_args()


if __name__ == "__main__":
    main()
