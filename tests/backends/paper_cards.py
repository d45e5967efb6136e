"""Cards on paper that compute: a driver whose streams are threads, in which NumPy interprets the kernels (`simt.py`).

All cards of it are one piece of memory, as those of a machine are for each other. Code is LLVM assembly.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import simt
from paper_driver import PaperDriver

from rlx.backends import memory as host
from rlx.backends.cpu.loops import python_form
from rlx.backends.cuda import backend as cuda
from rlx.backends.cuda import build, driver, memory, packing
from rlx.backends.cuda.kernels import pack
from rlx.ir.dtypes import DTYPES

Work = Callable[[], object]
_FAILED = 719


class Stream:
    """A thread that does what is begun, in order.

    Attributes:
        graph: what is recorded meanwhile, if anything is.
        failed: whether something failed.
    """

    def __init__(self) -> None:
        self.graph: list[Work] | None = None
        self.failed: BaseException | None = None
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, work: Work) -> None:
        """Begins something, or records it."""
        if self.graph is None:
            self._queue.put(work)
        else:
            self.graph.append(work)

    def _run(self) -> None:
        while work := self._queue.get():
            try:
                if not self.failed:
                    work()
            except BaseException as error:
                self.failed = error

    def close(self) -> None:
        """Ends it."""
        self._queue.put(None)
        self._thread.join(5)


class Module:
    """The kernels of a module, and what its entry runs."""

    def __init__(self, text: str) -> None:
        functions: dict[str, simt.Program] = {}
        for found in re.finditer(r"^define internal void @([\w.]+)\(.*?^}", text, re.M | re.S):
            functions[found[1]] = simt.Program(found[0], functions)
        self._kernels = [functions[name] for name in re.findall(r"^  call void @(\w+)\(i32 %own\d", text, re.M)]

    def run(self, memory_: simt.Memory, arguments: list[int], blocks: int, shared: int) -> None:
        """Runs all blocks of a launch."""
        at = begin = 0
        for kernel in self._kernels:
            end, names = arguments[at], [name for name in kernel.parameters if name not in ("block", "extents")]
            given = dict(zip(names, arguments[at + 1 :], strict=False)) | {"extents": arguments[-1]}
            at += 1 + len(names)
            for block in range(end - begin):
                simt.Block(kernel, memory_, given | {"block": block}, shared).run()
            begin = end
        assert at == len(arguments) - 1 and begin == blocks


class PaperCards(PaperDriver):
    """The driver.

    Attributes:
        count: of cards.
        level: their compute capability.
        levels: that of some of them.
        reach: whether they reach each other's memory.
    """

    def __init__(self, count: int = 1, level: tuple[int, int] = (8, 0)) -> None:
        super().__init__(1 << 32)
        self.count, self.level, self.memory = count, level, simt.Memory(0)
        self.levels, self.reach = dict[int, tuple[int, int]](), True
        self.memory.raw = raw = np.empty(1 << 30, np.uint8)
        self.memory.base = raw.ctypes.data
        self._free_at, self._streams = -raw.ctypes.data % 256, dict[int, Stream]()
        self._graphs, self._events = dict[int, list[Work]](), dict[int, Stream | None]()
        self._code: dict[bytes, Module] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return sum(self._sizes.values())

    def fail(self, number: int) -> None:
        """A card computes no more."""
        list(self._streams.values())[number].failed = RuntimeError("the card is off")

    def has_recorded(self, event: Any) -> bool:
        """Whether a card was told to record an event."""
        return self._events[event.value] is not None

    def see(self, address: int) -> simt.Array:
        return self.memory.raw[address - self.memory.base :]

    def close(self) -> None:
        """Ends its threads."""
        for stream in self._streams.values():
            stream.close()

    # -- cards --------------------------------------------------------------------------------------------------------

    def _cuDeviceGet(self, found: Any, number: int) -> int:
        found._obj.value = number
        return 0 if number < self.count else 101

    def _cuDeviceGetCount(self, found: Any) -> None:
        found._obj.value = self.count

    def _cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> None:
        found._obj.value = 1000 + device.value

    def _cuDeviceCanAccessPeer(self, found: Any, device: Any, other: Any) -> None:
        found._obj.value = self.reach

    def _cuDeviceGetAttribute(self, found: Any, number: int, device: Any) -> None:
        level = self.levels.get(device.value, self.level)
        found._obj.value = dict(zip((75, 76), level, strict=True)).get(number, 1)

    def _cuStreamCreate(self, found: Any, flags: int) -> None:
        found._obj.value = next(self._numbers)
        self._streams[found._obj.value] = Stream()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _cuMemAlloc_v2(self, found: Any, nbytes: Any) -> int:
        if self.used + nbytes.value > self.total:
            return 2
        with self._lock:
            start = self._free_at
            self._free_at += -(-nbytes.value // 256) * 256 + 256
        assert self._free_at < len(self.memory.raw), "the cards on paper are too small"
        found._obj.value = self.memory.base + start
        self._sizes[found._obj.value] = nbytes.value
        return 0

    _cuMemAllocHost_v2 = _cuMemAlloc_v2

    def _cuMemFree_v2(self, address: Any) -> None:
        del self._sizes[address.value]

    _cuMemFreeHost = _cuMemFree_v2

    def _cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, nbytes: Any, stream: Any) -> None:
        to, at, size = target.value, source.value, nbytes.value
        if at in range(self.memory.base, self.memory.base + len(self.memory.raw)):  # pinned
            self._streams[stream.value].begin(lambda: ctypes.memmove(to, at, size))
        else:
            data = ctypes.string_at(at, size)
            self._streams[stream.value].begin(lambda: ctypes.memmove(to, data, size))

    def _cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, nbytes: Any, stream: Any) -> None:
        to, at, size = target.value, source.value, nbytes.value
        self._streams[stream.value].begin(lambda: ctypes.memmove(to, at, size))

    def _cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, nbytes: Any, stream: Any) -> None:
        self._cuMemcpyDtoDAsync_v2(target, source, nbytes, stream)

    def _cuMemcpyHtoD_v2(self, target: Any, source: Any, nbytes: Any) -> None:
        ctypes.memmove(target.value, source.value, nbytes.value)

    _cuMemcpyDtoH_v2 = _cuMemcpyHtoD_v2

    def _cuMemcpy2DAsync_v2(self, how: Any, stream: Any) -> None:
        copy = how._obj
        rows = [
            (copy.target.address + row * copy.target.pitch, copy.source.address + row * copy.source.pitch)
            for row in range(copy.height)
        ]
        self._streams[stream.value].begin(lambda: [ctypes.memmove(new, old, copy.width) for new, old in rows])

    def _cuMemsetD8Async(self, target: Any, value: int, nbytes: Any, stream: Any) -> None:
        self._streams[stream.value].begin(lambda: ctypes.memset(target.value, value, nbytes.value))

    # -- what is begun ------------------------------------------------------------------------------------------------

    def _cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> None:
        given = [ctypes.c_uint64.from_address(each).value for each in arguments]
        code, shared, blocks = self._modules[function.value], config._obj.shared, config._obj.grid[0]
        if code.startswith(b"pack "):
            work: Work = lambda: self._pack(DTYPES[code[5:].decode()], given)  # noqa: E731
        else:
            if code not in self._code:
                self._code[code] = Module(code.decode())
            work = lambda: self._code[code].run(self.memory, given, blocks, shared)  # noqa: E731
        self._streams[config._obj.stream].begin(work)

    def _pack(self, dtype: Any, arguments: list[int]) -> None:
        places = [at - self.memory.base if at else 0 for at in arguments[:3]]
        with np.errstate(all="ignore"):
            python_form(pack.pack(dtype))(*(self.memory.raw[at:] for at in places), *arguments[3:-1], 0, arguments[-1])

    def _cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> None:
        self._streams[stream.value].graph = []

    def _cuStreamEndCapture(self, stream: Any, found: Any) -> None:
        found._obj.value = next(self._numbers)
        own = self._streams[stream.value]
        assert own.graph is not None
        self._graphs[found._obj.value], own.graph = own.graph, None

    def _cuGraphInstantiateWithFlags(self, found: Any, graph: Any, flags: Any) -> None:
        found._obj.value = graph.value

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        for work in self._graphs[graph.value]:
            self._streams[stream.value].begin(work)

    def _cuEventCreate(self, found: Any, flags: int) -> None:
        found._obj.value = next(self._numbers)
        self._events[found._obj.value] = None

    def _cuEventRecordWithFlags(self, event: Any, stream: Any, flags: int) -> None:
        own, number = self._streams[stream.value], event.value
        self._events[number] = own
        marks = threading.Event()
        self._marks = {**getattr(self, "_marks", {}), number: marks}
        own._queue.put(marks.set)

    def _query(self, event: Any) -> int:
        number = getattr(event, "value", event)
        stream = self._events.get(number)
        if stream is None:
            return 0
        if stream.failed:
            return _FAILED
        return 0 if self._marks[number].wait(0.001) else 600


@contextmanager
def computing(patch: pytest.MonkeyPatch, count: int = 1, level: tuple[int, int] = (8, 0)) -> Iterator[PaperCards]:
    """The device "cuda" has so many cards on paper, in a `with` block."""
    found = PaperCards(count, level)
    with patch.context() as own:
        own.setattr(driver, "_library", lambda: found)
        own.setattr(driver, "_quick", lambda: found)
        own.setattr(driver, "link", lambda text: text.encode())
        own.setattr(build.ptx, "compiled", lambda modules, level, version: list(modules))
        own.setattr(packing, "module_of", lambda dtype: f"pack {dtype.name}")
        own.setattr(packing, "_PIECE", 1 << 16)
        own.setattr(driver, "WAIT_SECONDS", 600.0)
        own.setattr(host, "_SLAB", 1 << 20)
        for module, name, value in ((build, "_known", type(build._known)()), (memory, "_open", {})):
            own.setattr(module, name, value)
        own.setattr(cuda, "BACKEND", cuda.Cuda())
        cuda.backend_of.cache_clear()
        try:
            yield found
        finally:
            for card in memory._open.values():
                card.lost = driver.DeviceError("the test is over")
            cuda.backend_of.cache_clear()
            found.close()
