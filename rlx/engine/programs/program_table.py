"""A table of native programs in memory with least-recently-used eviction and counters.

Runners stage, under `programs.py`, which has one table per phase.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from rlx.backends.program import Program
from rlx.errors import ArgumentError


@dataclass
class TableStats:
    """Counters of a table.

    Attributes:
        hits, misses: requests whose program was in the table, and was not.
        compiles: misses that ran the compiler; the other misses were found in the compile cache.
        evictions: programs evicted for others.
        seconds: total time of the misses.
        code_bytes: total object code of the programs that the misses loaded.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    evictions: int = 0
    seconds: float = 0.0
    code_bytes: int = 0


@dataclass(frozen=True)
class Made:
    """A program after a miss, and what it cost."""

    program: Program
    compiled: bool
    seconds: float
    code_bytes: int


class ProgramTable:
    """Programs by key.

    Attributes:
        capacity: maximum number of programs; None for any number.
        stats: the counters.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.stats = TableStats()
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Made]) -> Program:
        """The program of a key; calls `make` on a miss."""
        if key in self._programs:
            self._programs.move_to_end(key)
            self.stats.hits += 1
            return self._programs[key]
        made = make()
        self._programs[key] = made.program
        self.stats.misses += 1
        self.stats.compiles += made.compiled
        self.stats.seconds += made.seconds
        self.stats.code_bytes += made.code_bytes
        self._evict()
        return made.program

    def __contains__(self, key: Hashable) -> bool:
        return key in self._programs

    def limit(self, capacity: int | None) -> None:
        """Sets the capacity; excess programs are evicted at once.

        Raises:
            ArgumentError: it is not above 0.
        """
        if capacity is not None and capacity <= 0:
            raise ArgumentError(f"the capacity is {capacity}", where="program table", hint="Give a number above 0.")
        self.capacity = capacity
        self._evict()

    def _evict(self) -> None:
        while self.capacity is not None and len(self._programs) > self.capacity:
            self._programs.popitem(last=False)[1].close()
            self.stats.evictions += 1

    @property
    def order(self) -> list[Any]:
        """The keys, the least recently used first."""
        return list(self._programs)

    def items(self) -> list[tuple[Any, Program]]:
        """Keys and programs, the least recently used first."""
        return list(self._programs.items())

    def __iter__(self) -> Iterator[Program]:
        return iter(list(self._programs.values()))

    def clear(self) -> None:
        """Closes every program."""
        for program in self:
            program.close()
        self._programs.clear()
