"""A program on a card: its kernels are launched in order, and a step that comes again is recorded and replayed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import c_uint8, c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rlx.backends.cuda import driver
from rlx.backends.cuda.clocks import ClockedStep
from rlx.backends.cuda.code import THREADS
from rlx.backends.cuda.driver import Card, LaunchConfig
from rlx.backends.cuda.kernels.loop import COUNT, FOUND_AT, STOP_COUNT, STOPS, STOPS_AT, TABLE
from rlx.backends.cuda.kernels.row_attention import KEYS
from rlx.backends.cuda.kernels.row_attention import SPLITS as MOST_SPLITS
from rlx.backends.cuda.kernels.states import RUNS
from rlx.backends.cuda.memory import address
from rlx.backends.cuda.packing import Ring
from rlx.backends.cuda.select import ADDED, SPLITS
from rlx.backends.memory import Buffer, Memory
from rlx.backends.program import Manifest, Program, StepLog, TokenRun
from rlx.errors import CompileError, DeviceError
from rlx.ir import dims
from rlx.ir.dims import DimLike
from rlx.ir.segments import PAST, ROWS

_RECORDS = 16  # recorded steps of a program
_LOOP = 32  # steps of a loop between two looks at its tokens
_ALIGN = 256
#: Numbers of blocks, in the order in which a program has them.
Counts = tuple[int, ...]
#: What kernels of a region pass on.
_PASSED = ("scratch", "per_range", "counters")


class Stream:
    """Runs programs: the one stream of a card, and the ring through which weights come."""

    def __init__(self, card: Card) -> None:
        self.card, self.n, self.ring = card, 1, Ring(card)
        self._ends: list[Callable[[], object]] = [self.ring.close]

    def owns(self, close: Callable[[], object]) -> None:
        """What frees memory that goes with it."""
        self._ends.append(close)

    def close(self) -> None:
        """Waits for what runs, and frees memory."""
        for end in self._ends:
            end()


class CardCode:
    """The loaded kernels of a program, which its instances share.

    Args:
        read: the contents of a file of the compiled program.
        overlaps: whether a kernel may start while the one before ends.

    Raises:
        CompileError: the code was made without a card.
    """

    def __init__(self, card: Card, manifest: Manifest, read: Callable[[str], bytes], overlaps: bool) -> None:
        self._card, self.overlaps = card, overlaps
        shared = {"advance": 0} if "loop" in manifest else {}
        for row in manifest["launches"]:
            shared[row["entry"]] = max(shared.get(row["entry"], 0), row["shared"])
        try:
            files = {name: read(f"{name}.cubin") for name in shared}
        except KeyError as error:
            raise CompileError(f"this code was made to look at: {error}", where="device cuda") from error
        self._modules = {name: card.module(code) for name, code in files.items()}
        self.functions = {name: card.function(self._modules[name], name, nbytes) for name, nbytes in shared.items()}
        self.nbytes = sum(map(len, files.values()))

    def __del__(self) -> None:
        for module in getattr(self, "_modules", {}).values():
            with suppress(DeviceError):  # the card is lost: who used it was told
                self._card.unload(module)


@dataclass(frozen=True)
class _Blocks:
    """How many blocks a kernel has, see `launches.Blocks`."""

    count: DimLike
    per: int
    times: int
    split: bool

    def value(self, extents: Mapping[str, int]) -> int:
        found = -(-dims.value(self.count, extents) // self.per) * self.times
        return found * extents[SPLITS] if self.split else found


@dataclass(frozen=True)
class _Launch:
    """A launch.

    Attributes:
        kernels: of each, kind and name or offset of its pointers, and which of the program's numbers of blocks it has.
    """

    entry: str
    shared: int
    region: int
    kernels: tuple[tuple[tuple[tuple[str, Any], ...], int], ...]


@dataclass(frozen=True)
class _Call:
    """A launch as the driver takes it, but for the numbers of blocks.

    Attributes:
        given: where the arguments lie.
        memory: the arguments.
        ends: place in `memory` where the last block of a kernel stands, and the number of its blocks as in `_Launch`.
    """

    function: c_void_p
    config: LaunchConfig
    given: Any
    memory: Any
    ends: tuple[tuple[int, int], ...]
    region: int


class CardProgram(Program):
    """One instance of a program on a card."""

    def __init__(self, code: CardCode, manifest: Manifest, memory: Memory, workers: Stream) -> None:
        self._pinned = 0
        super().__init__(manifest, workers.n, memory)
        self._card, self._code = workers.card, code
        self._symbols = [*manifest["symbols"], *ADDED]
        self._blocks, self._launches = _launches(manifest)
        self._scratch: dict[tuple[str, int], Buffer] = {}
        self._scratch_sizes = _scratch_sizes(manifest)
        self._own = memory.allocate(_ALIGN)  # the extents
        self._loop: Buffer | None = None
        self._splits_most = 0  # ranges of positions that the memory is for
        self._calls = dict[tuple[int, int], list[_Call]]()  # by the slots of states
        self._records: OrderedDict[tuple[Any, ...], c_void_p | None] = OrderedDict()
        self._logs = self._begins = False
        self._has_inputs = self._card.event()
        self._log: StepLog | None = None
        self._clocked: tuple[tuple[Any, ...], ClockedStep] | None = None
        self._pin_inputs()

    def _pin_inputs(self) -> None:
        """Moves the inputs, and the extents after them, to memory that the card copies from directly."""
        places, end = {}, 0
        for name, array in self.inputs.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        self._pinned = self._card.pinned(end + _ALIGN)
        raw = (c_uint8 * (end + _ALIGN)).from_address(self._pinned)
        memory = np.ctypeslib.as_array(raw)
        for name, array in self.inputs.items():
            new = memory[places[name] : places[name] + array.nbytes].view(array.dtype).reshape(array.shape)
            new[...] = array
            self.inputs[name] = new
        self._extents = memory[end : end + _ALIGN].view(np.int32)
        self._sources = {name: self._pinned + at for name, at in places.items()} | {"": self._pinned + end}

    def _send(self) -> None:
        for name in self.inputs.keys() - self._sent:
            value = self._given[name]
            nbytes = value.nbytes(self.extents)
            if nbytes:
                self._card.send(address(self.arena) + value.offset, self._sources[name], nbytes)
        self._sent.clear()

    # -- places -------------------------------------------------------------------------------------------------------

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        super().bind(buffers)
        self._forget()

    def bind_slots(self, states: Mapping[str, tuple[Buffer, int]]) -> None:
        super().bind_slots(states)
        self._forget()

    def _forget(self) -> None:
        """Drops what is ready: the memory that it uses has changed."""
        self._calls.clear()
        for record in self._records.values():
            if record is not None:
                self._card.forget(record)
        self._records.clear()
        if self._clocked:
            self._clocked[1].close()
            self._clocked = None

    def _address(self, kind: str, place: Any) -> int:
        if kind == "arena":
            return address(self.arena) + int(place)
        return address(self._scratch[kind, int(place)] if kind in _PASSED else self.bound(place))

    def _reserve(self, splits: int) -> None:
        """Makes room for what kernels of a region pass on, which grows with the number of ranges of positions."""
        if splits <= self._splits_most:
            return
        self._forget()
        for which, nbytes in self._scratch_sizes.items():
            if which not in self._scratch or which[0] == "per_range":
                if (old := self._scratch.pop(which, None)) is not None:
                    old.close()
                self._scratch[which] = self.arena.memory.allocate(nbytes * (splits if which[0] == "per_range" else 1))
        self._splits_most = splits

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        counts = self._begin(1)
        if self._logs:
            self._log = self._clocked_step(counts).run()
            return
        if self._begins:
            self._card.record(self._has_inputs)
        self._step(counts, loops=False)
        self._card.wait_for(self._has_inputs) if self._begins else self._card.wait()

    def begin(self, **extents: int) -> None:
        self._begins = not self.observers  # who see how long it takes
        try:
            self.run(**extents)
        finally:
            self._begins = False

    def record(self, logs: bool) -> None:
        self._logs, self._log = logs, None
        if not logs and self._clocked:
            self._clocked[1].close()
            self._clocked = None

    @property
    def log(self) -> StepLog | None:
        return self._log

    def _clocked_step(self, counts: Counts) -> ClockedStep:
        """A step of this kind with clocks."""
        key = counts, self._slots
        if self._clocked is None or self._clocked[0] != key:
            self.record(False)
            calls = [len(region) for region in self.manifest["regions"]]
            step = ClockedStep(self._card, calls, lambda after: self._launch_all(counts, loops=False, after=after))
            self._clocked = key, step
            self._logs = True
        return self._clocked[1]

    def _begin(self, steps: int) -> Counts:
        """Sends the values of the symbols for some steps: the numbers of blocks."""
        extents = {**self.extents, SPLITS: self._splits(steps), RUNS: 1}
        self._reserve(extents[SPLITS])
        self._extents[: len(self._symbols)] = [extents[name] for name in self._symbols]
        self._card.send(address(self._own), self._sources[""], 4 * len(self._symbols))
        return tuple([blocks.value(extents) for blocks in self._blocks])

    def _step(self, counts: Counts, *, loops: bool) -> None:
        """Begins a step; with `loops` its token goes to the next one. One that comes again is recorded."""
        key = loops, counts, self._slots
        if key not in self._records:
            self._launch_all(counts, loops=loops)
            self._remember(key)
            return
        self._records.move_to_end(key)
        record = self._records[key]
        if record is None:
            record = self._records[key] = self._card.recorded(lambda: self._launch_all(counts, loops=loops))
        self._card.replay(record)

    def repeat(self, run: TokenRun) -> list[int]:
        if "loop" not in self.manifest or run.carried or run.first or self.observers or len(run.stops) > STOPS:
            return super().repeat(run)
        self.prepare(run.extents)
        self._send()
        self._loop = self._loop or self.arena.memory.allocate(4 * (FOUND_AT + _LOOP))
        found, end, runs = list[int](), time.monotonic() + run.seconds, True
        while runs and len(found) < run.count and (not found or time.monotonic() < end):
            steps = min(run.count - len(found), _LOOP)
            some = self._looped(run, steps)
            found += some
            runs = len(some) == steps and 0 <= some[-1] < run.rows and some[-1] not in run.stops
            self.extents = {name: v + len(some) if name == "PAST_SEQ" else v for name, v in self.extents.items()}
        return found

    def _looped(self, run: TokenRun, steps: int) -> list[int]:
        """Tokens of some steps, fewer if the last one ends the run."""
        assert self._loop is not None
        head = np.zeros(FOUND_AT, np.int32)
        head[[COUNT, STOP_COUNT, TABLE]] = 0, len(run.stops), run.rows
        head[STOPS_AT : STOPS_AT + len(run.stops)] = run.stops
        self._loop.part(0, head.nbytes).write(head)
        counts = self._begin(steps)
        for _ in range(steps):
            self._step(counts, loops=True)
        result = self._loop.read(np.int32)
        return [int(token) for token in result[FOUND_AT : FOUND_AT + int(result[COUNT])]]

    def _remember(self, key: tuple[Any, ...]) -> None:
        """A step of this kind has run once; it is recorded when it comes again."""
        self._records[key] = None
        while len(self._records) > _RECORDS:
            _, record = self._records.popitem(last=False)
            if record is not None:
                self._card.forget(record)

    def _launch_all(
        self, counts: Counts, *, loops: bool, after: Callable[[int], object] = lambda region: None
    ) -> None:
        """Begins all kernels of a step.

        Args:
            after: called with the number of each region after its kernels.
        """
        self._card.use()
        calls = self._ready()
        for call, following in zip(calls, [*calls[1:], None], strict=True):
            end = 0
            for place, number in call.ends:
                end += counts[number]
                call.memory[place] = end
            if end:
                call.config.grid[0] = end
                self._card.launch(call.function, call.config, call.given)
            if following is None or following.region != call.region:
                after(call.region)
        if loops:
            assert self._loop is not None
            places = (address(self.arena) + offset for _, offset in self.manifest["loop"])
            call = self._call("advance", 0, 0, [1, address(self._loop), *places], ())
            self._card.launch(call.function, call.config, call.given)

    def _ready(self) -> list[_Call]:
        """All launches with the addresses of what is bound."""
        if self._slots not in self._calls:
            while len(self._calls) >= _RECORDS:
                del self._calls[next(iter(self._calls))]
            self._calls[self._slots] = [self._prepared(each) for each in self._launches]
        return self._calls[self._slots]

    def _prepared(self, launch: _Launch) -> _Call:
        arguments, ends = list[int](), list[tuple[int, int]]()
        for pointers, number in launch.kernels:
            ends.append((len(arguments), number))
            arguments += [0, *(self._address(*pointer) for pointer in pointers)]
        return self._call(launch.entry, launch.shared, launch.region, arguments, tuple(ends))

    def _call(
        self, entry: str, shared: int, region: int, arguments: list[int], ends: tuple[tuple[int, int], ...]
    ) -> _Call:
        given, memory = driver.pointers([*arguments, address(self._own)])
        config = driver.config(1, THREADS, shared, self._card, overlaps=self._code.overlaps)
        return _Call(self._code.functions[entry], config, given, memory, ends, region)

    def _splits(self, steps: int) -> int:
        """Blocks that share a row of attention in some steps: a power of two, so that few records serve all lengths."""
        if (segments := self.inputs.get("segments")) is not None:
            used = segments[: self.extents.get("SEGMENTS", len(segments))]
            longest = int((used[:, PAST] + used[:, ROWS]).max(initial=1))
        else:
            longest = self.extents.get("PAST_SEQ", 0) + self.extents.get("SEQ", 1) + steps - 1
        return min(MOST_SPLITS, 1 << max(0, -(-longest // KEYS) - 1).bit_length())

    def close(self) -> None:
        if not self.closed:
            self._forget()
            self._card.forget_event(self._has_inputs)
            for buffer in (*self._scratch.values(), self._own, *filter(None, [self._loop])):
                buffer.close()
        super().close()
        if self._pinned:
            self.inputs = {}
            self._card.free_pinned(self._pinned)
            self._pinned = 0


def _launches(manifest: Manifest) -> tuple[list[_Blocks], list[_Launch]]:
    """The launches of a program, and the different numbers of blocks that their kernels have."""
    numbers, found = dict[_Blocks, int](), list[_Launch]()
    for row in manifest["launches"]:
        kernels = []
        for each in row["kernels"]:
            count, *more = each["blocks"]
            number = numbers.setdefault(_Blocks(dims.parse_dim(count), *more), len(numbers))
            kernels.append((tuple((str(kind), place) for kind, place in each["pointers"]), number))
        found.append(_Launch(row["entry"], row["shared"], row["kernels"][0]["region"], tuple(kernels)))
    return list(numbers), found


def _scratch_sizes(manifest: Manifest) -> dict[tuple[str, int], int]:
    """Bytes of each piece of memory that kernels pass on, for the largest call; those of one range of positions."""
    bounds = {name: tuple(limits) for name, limits in manifest["bounds"].items()}
    found: dict[tuple[str, int], int] = {}
    for each in chain.from_iterable(row["kernels"] for row in manifest["launches"]):
        sizes = {name: dims.bounds(dims.parse_dim(size), bounds)[1] for name, size in each["sizes"].items()}
        for kind, place in each["pointers"]:
            if kind in _PASSED:
                size = 4 * sizes["counters"] if kind == "counters" else sizes["scratch"]
                found[kind, place] = max(found.get((kind, place), 0), size)
    return found
