"""The steps of a program on one of its cards: launches that are ready but for numbers of blocks, and records of steps.

Device "cuda", below `program.py`, which has the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import c_void_p
from dataclasses import dataclass
from itertools import chain, cycle, pairwise
from typing import Any

from rlx.backends.cuda import driver
from rlx.backends.cuda.agreed.steps import SHARING, THREADS
from rlx.backends.cuda.clocks import Begin, ClockedStep
from rlx.backends.cuda.driver import Card, LaunchConfig
from rlx.backends.program import Manifest
from rlx.errors import DeviceError
from rlx.ir import dims
from rlx.ir.dims import DimLike

_RECORDS = 16  # recorded steps of a program
#: Numbers of blocks, in the order in which a program has them.
Counts = tuple[int, ...]
#: Slots of states that are read and written.
Slots = tuple[int, int]
#: Gives the address of what a pointer is: its kind, and its name or offset.
Address = Callable[[str, Any], int]


class CardCode:
    """The loaded kernels of a program, which its instances share.

    Args:
        read: the contents of a file of the compiled program.

    Attributes:
        functions: the kernels by name, of each card.
        overlaps: whether a kernel may start while the one before ends.
    """

    def __init__(self, cards: Sequence[Card], manifest: Manifest, read: Callable[[str], bytes]) -> None:
        self.cards, self.overlaps = cards, manifest["overlaps"]
        shared = {name: 0 for name, of in (("advance", "loop"), ("meet", "meets")) if of in manifest}
        for row in manifest["launches"]:
            shared[row["entry"]] = max(shared.get(row["entry"], 0), row["shared"])
        files = {name: read(f"{name}.cubin") for name in shared}
        self._modules = [(card, {name: card.module(code) for name, code in files.items()}) for card in cards]
        self.functions = [
            {name: card.function(modules[name], name, nbytes) for name, nbytes in shared.items()}
            for card, modules in self._modules
        ]
        self.nbytes = sum(map(len, files.values()))

    def __del__(self) -> None:
        for card, modules in getattr(self, "_modules", []):
            for module in modules.values():
                with suppress(DeviceError):  # the card is lost: who used it was told
                    card.unload(module)


@dataclass(frozen=True)
class Blocks:
    """How many blocks a kernel has, see `launches.Blocks`."""

    count: DimLike
    per: int
    times: int
    split: bool
    least: int
    most: int

    def value(self, extents: Mapping[str, int]) -> int:
        """Their number."""
        count = dims.value(self.count, extents)
        if not self.least <= count <= self.most:
            return 0
        found = -(-count // self.per) * self.times
        return found * extents[SHARING] if self.split else found


@dataclass(frozen=True)
class Launch:
    """A launch.

    Attributes:
        kernels: of each, kind and name or offset of its pointers, and which of the program's numbers of blocks it has.
    """

    entry: str
    shared: int
    region: int
    kernels: tuple[tuple[tuple[tuple[str, Any], ...], int], ...]


def launches_of(manifest: Manifest) -> tuple[list[Blocks], list[Launch]]:
    """The launches of a program, and the different numbers of blocks that their kernels have."""
    numbers, found = dict[Blocks, int](), list[Launch]()
    for row in manifest["launches"]:
        kernels = []
        for each in row["kernels"]:
            count, *more = each["blocks"]
            number = numbers.setdefault(Blocks(dims.parse_dim(count), *more), len(numbers))
            kernels.append((tuple((str(kind), place) for kind, place in each["pointers"]), number))
        found.append(Launch(row["entry"], row["shared"], row["kernels"][0]["region"], tuple(kernels)))
    return list(numbers), found


@dataclass(frozen=True)
class Call:
    """A launch as the driver takes it, but for the numbers of blocks.

    Attributes:
        given: where the arguments lie.
        memory: the arguments.
        ends: place in `memory` where the last block of a kernel stands, and the number of its blocks as in `Launch`;
            without any it is one block.
    """

    function: c_void_p
    config: LaunchConfig
    given: Any
    memory: Any
    ends: tuple[tuple[int, int], ...]
    region: int


class CardSteps:
    """The steps on a card.

    Args:
        number: of the card among those of the program.
        launches: of a step, in order.
        address: of memory there.
        pieces: of a step, each of which is recorded.

    Attributes:
        card, number: see above.
    """

    def __init__(
        self, code: CardCode, number: int, manifest: Manifest, launches: Sequence[Launch], address: Address,
        pieces: int = 1,
    ) -> None:  # fmt: skip
        self.card, self._code, self.number = code.cards[number], code, number
        self._manifest, self._launches, self._address = manifest, launches, address
        self._calls, self._most = dict[Slots, list[Call]](), _RECORDS * pieces
        self._records: OrderedDict[tuple[Any, ...], c_void_p | None] = OrderedDict()
        self._clocked: tuple[tuple[Any, ...], ClockedStep] | None = None

    def forget(self) -> None:
        """Drops what is ready: the memory that it uses has changed."""
        self._calls.clear()
        for record in self._records.values():
            if record is not None:
                self.card.forget(record)
        self._records.clear()
        self.forget_clocks()

    def forget_clocks(self) -> None:
        """Drops the step with clocks."""
        if self._clocked:
            self._clocked[1].close()
            self._clocked = None

    # -- launches -----------------------------------------------------------------------------------------------------

    def ready(self, slots: Slots) -> list[Call]:
        """All launches with the addresses of what is bound."""
        if slots not in self._calls:
            while len(self._calls) >= _RECORDS:
                del self._calls[next(iter(self._calls))]
            self._calls[slots] = list(self._prepared())
        return self._calls[slots]

    def advance(self, drawn: Sequence[int] = ()) -> Call:
        """The launch between two steps of a run.

        Args:
            drawn: where the first token and its random number lie, if tokens are drawn.
        """
        own = (self._address("loop", place) for place in ("loop", "found"))
        places = (self._address("arena", offset) for _, offset in self._manifest["loop"])
        return self._call("advance", 0, -1, [1, *own, *drawn, *places])

    def _prepared(self) -> Iterator[Call]:
        meets = self._manifest.get("meets", ())
        if -1 in meets:
            yield self._meeting(-1)
        for launch, following in pairwise([*self._launches, None]):
            assert launch is not None
            arguments, ends = list[int](), list[tuple[int, int]]()
            for pointers, number in launch.kernels:
                ends.append((len(arguments), number))
                arguments += [0, *(self._address(*pointer) for pointer in pointers)]
            yield self._call(launch.entry, launch.shared, launch.region, arguments, tuple(ends))
            if launch.region in meets and (following is None or following.region != launch.region):
                yield self._meeting(launch.region)

    def _meeting(self, region: int) -> Call:
        return self._call("meet", 0, region, [1, *(self._address("meeting", at) for at in ("lines", "places"))])

    def _call(
        self, entry: str, shared: int, region: int, arguments: list[int], ends: tuple[tuple[int, int], ...] = ()
    ) -> Call:
        given, memory = driver.pointers([*arguments, self._address("extents", None)])
        config = driver.config(1, THREADS, shared, self.card, overlaps=self._code.overlaps)
        return Call(self._code.functions[self.number][entry], config, given, memory, ends, region)

    # -- records ------------------------------------------------------------------------------------------------------

    def record(self, key: tuple[Any, ...], begin: Callable[[], object]) -> c_void_p | None:
        """The record of a kind of step or piece, made when it comes again; None if it never came.

        Args:
            begin: begins all of its launches on this card.
        """
        if key not in self._records:
            return None
        self._records.move_to_end(key)
        if (found := self._records[key]) is None:
            found = self._records[key] = self.card.recorded(begin)
        return found

    def remember(self, key: tuple[Any, ...]) -> None:
        """A step of this kind has run."""
        self._records[key] = None
        while len(self._records) > self._most:
            _, record = self._records.popitem(last=False)
            if record is not None:
                self.card.forget(record)

    def clocked(self, key: tuple[Any, ...], pieces: Sequence[Begin | None]) -> ClockedStep:
        """A step of this kind with clocks; `pieces` as those of `ClockedStep`."""
        if self._clocked is None or self._clocked[0] != key:
            self.forget_clocks()
            calls = [len(region) for region in self._manifest["regions"]]
            self._clocked = key, ClockedStep(self.card, calls, pieces)
        return self._clocked[1]


def begin_calls(
    some: Sequence[tuple[Card, Sequence[Call]]], counts: Counts, after: Callable[[int], object] = lambda region: None
) -> None:
    """Begins the launches of a step on some cards, one after the other on all: none waits long for the others.

    Args:
        after: called with the number of each region after its launches.
    """
    cards, several = cycle([card for card, _ in some]), len(some) > 1
    some[0][0].use()
    calls = list(chain.from_iterable(zip(*(own for _, own in some), strict=True)))
    for card, call, following in zip(cards, calls, [*calls[1:], None], strict=False):
        end = 0 if call.ends else 1
        for place, number in call.ends:
            end += counts[number]
            call.memory[place] = end
        if end:
            call.config.grid[0] = end
            if several:
                card.use()
            card.launch(call.function, call.config, call.given)
        if call.region >= 0 and (following is None or following.region != call.region):
            after(call.region)
