"""A driver on paper: NVIDIA's functions over memory of the host, which fail when they are told to."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_uint8, c_void_p
from functools import partial
from typing import Any

import numpy as np

from rlx.backends.cuda import driver

#: Takes the arguments of a launch, each of 8 bytes, and its number of threads.
Run = Callable[[list[int], int], None]


class PaperDriver:
    """What `driver._library` returns: each function gives a code.

    Attributes:
        fails: function -> the code that it gives.
        hangs: whether what was begun never ends.
        total: bytes of the card.
        kernels: contents of a module -> what its kernel does.
        calls: names of the functions that were called.
    """

    def __init__(self, total: int = 1 << 30) -> None:
        self.fails: dict[str, int] = {}
        self.hangs, self.total, self.calls = False, total, list[str]()
        self.kernels: dict[bytes, Run] = {}
        self._memory: dict[int, Any] = {}
        self._modules: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        self._graphs: dict[int, list[Callable[[], object]]] = {}
        self._recorded: list[Callable[[], object]] | None = None
        self.cuEventQuery = CFUNCTYPE(c_int, c_void_p)(self._query)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            own = getattr(type(self), f"_{name}", None)
            return own(self, *arguments) or 0 if own else 0

        return function

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        return sum(map(len, self._memory.values()))

    def see(self, address: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The memory from an address to the end of its block."""
        start, block = next((a, b) for a, b in self._memory.items() if a <= address < a + len(b))
        return np.ctypeslib.as_array(block)[address - start :]

    def _query(self, _: int) -> int:
        self.calls.append("query")
        return self.fails.get("query", 600 if self.hangs else 0)

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = f"CUDA_ERROR_{code}".encode()

    def _cuDeviceGetAttribute(self, found: Any, number: int, device: Any) -> None:
        found._obj.value = {driver.MULTIPROCESSORS: 100}.get(number, 0)

    def _cuDriverGetVersion(self, found: Any) -> None:
        found._obj.value = 13000

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.total - self.used, self.total

    def _cuMemAlloc_v2(self, found: Any, nbytes: Any) -> int:
        if self.used + nbytes.value > self.total:
            return 2
        block = (c_uint8 * nbytes.value)()
        found._obj.value = ctypes.addressof(block)
        self._memory[found._obj.value] = block
        return 0

    _cuMemAllocHost_v2 = _cuMemAlloc_v2

    def _cuMemFree_v2(self, address: Any) -> None:
        del self._memory[address.value]

    _cuMemFreeHost = _cuMemFree_v2

    def _cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, nbytes: Any, stream: Any = None) -> None:
        ctypes.memmove(target.value, source.value, nbytes.value)

    _cuMemcpyDtoHAsync_v2 = _cuMemcpyDtoH_v2 = _cuMemcpyHtoD_v2 = _cuMemcpyDtoDAsync_v2 = _cuMemcpyHtoDAsync_v2

    def _cuMemcpy2DAsync_v2(self, how: Any, stream: Any) -> None:
        copy = how._obj
        assert copy.source.memory == copy.target.memory == 2 and ctypes.sizeof(copy) == 128
        for row in range(copy.height):
            old, new = (each.address + row * each.pitch for each in (copy.source, copy.target))
            ctypes.memmove(new, old, copy.width)

    def _cuMemsetD8Async(self, target: Any, value: int, nbytes: Any, stream: Any) -> None:
        ctypes.memset(target.value, value, nbytes.value)

    def _cuModuleLoadData(self, found: Any, cubin: bytes) -> None:
        found._obj.value = next(self._numbers)
        self._modules[found._obj.value] = cubin

    def _cuModuleGetFunction(self, found: Any, module: Any, name: bytes) -> None:
        found._obj.value = module.value

    def _cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> None:
        values = [ctypes.c_uint64.from_address(each).value for each in arguments]
        launch = partial(
            self.kernels[self._modules[function.value]], values, config._obj.grid[0] * config._obj.block[0]
        )
        launch() if self._recorded is None else self._recorded.append(launch)

    def _cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> None:
        self._recorded = []

    def _cuStreamEndCapture(self, stream: Any, found: Any) -> None:
        found._obj.value = next(self._numbers)
        self._graphs[found._obj.value], self._recorded = self._recorded or [], None

    def _cuGraphInstantiateWithFlags(self, found: Any, graph: Any, flags: Any) -> None:
        found._obj.value = graph.value

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        for launch in self._graphs[graph.value]:
            launch()

    def _cuEventCreate(self, found: Any, flags: int) -> None:
        found._obj.value = next(self._numbers)
