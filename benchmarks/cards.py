"""Measures what joins cards: copies from one to another, and how long it takes until all have met.

    python benchmarks/cards.py cuda:0,1

`cuda:0,0` takes one card as two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from rlx import backends
from rlx.backends.cuda import driver, ptx
from rlx.backends.cuda.agreed.steps import CARD, LINE, MOST_CARDS, THREADS
from rlx.backends.cuda.backend import Cuda
from rlx.backends.cuda.entry import entry
from rlx.backends.cuda.kernels.cards import meet
from rlx.backends.cuda.launches import Context
from rlx.backends.cuda.memory import address
from rlx.backends.cuda.program import Stream

MEETINGS, REPEATS = 500, 9


def copies(backend: Cuda, nbytes: int) -> float:
    """The rate of copies from the first card to the second one, in 10^9 bytes per second."""
    source, target = (backend.memory.allocate(nbytes) for _ in range(2))
    card, found = backend.cards()[0], list[float]()
    begin, end = card.event(timed=True), card.event(timed=True)
    for _ in range(REPEATS):
        card.record(begin)
        card.copy(address(target, 1), address(source, 0), nbytes)
        card.record(end)
        card.wait()
        found.append(nbytes / card.seconds(begin, end) / 1e9)
    for buffer in (source, target):
        buffer.close()
    return statistics.median(found)


def meetings(backend: Cuda) -> float:
    """Microseconds of a meeting, of many in a row."""
    target, cards, stream = backend.target(), backend.cards(), Stream(backend.cards(), backend.memory)
    context = Context((CARD,), {}, target.features, layouts=target.layouts)
    kernel = context.kernel("meet", dict.fromkeys(["lines", "places"]), lambda k: meet(k, len(cards)))
    text = entry("meet", [kernel], target.features)
    (code,) = ptx.compiled([text], target.level, target.ptx)
    cards[0].use()
    cubin, extents = driver.link(code), backend.memory.allocate(LINE)
    assert stream.meeting is not None
    records, kept = [], list[object]()
    for number, card in enumerate(cards):
        own = np.array([number], np.int32)
        card.write(address(extents, number), own.ctypes.data, own.nbytes)
        lines = address(stream.meeting, number)
        given, memory = driver.pointers([1, lines, lines + MOST_CARDS * LINE, address(extents, number)])
        loaded = driver.Loaded(card, cubin, "meet")
        config = driver.config(1, THREADS, 0, card, overlaps=target.features.overlaps)
        kept += [given, memory, loaded]

        def begin(card: driver.Card = card, loaded: driver.Loaded = loaded, config: driver.LaunchConfig = config,
                  given: object = given) -> None:  # fmt: skip
            card.use()
            for _ in range(MEETINGS):
                card.launch(loaded.function, config, given)

        records.append(card.recorded(begin))

    def run() -> None:
        for card, record in zip(cards, records, strict=True):
            card.replay(record)
        for card in cards:
            card.wait()

    return seconds_of(run) / MEETINGS * 1e6


def seconds_of(run: Callable[[], object]) -> float:
    """The median time of some runs."""
    found = list[float]()
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", help='such as "cuda:0,1"')
    backend = backends.backend(parser.parse_args().device)
    assert isinstance(backend, Cuda) and len(backend.numbers) > 1, "name several cards"
    print(backend.description())
    for nbytes in (16 << 10, 256 << 10, 4 << 20, 256 << 20):
        print(f"copy of {nbytes >> 10:7,} KiB: {copies(backend, nbytes):7.1f} GB/s")
    print(f"meeting: {meetings(backend):.2f} us")


if __name__ == "__main__":
    main()
