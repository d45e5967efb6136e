"""NVIDIA's driver, `libcuda`, through ctypes. This is the only module that knows its functions and their numbers.

Source of the functions and error codes: the CUDA Driver API reference (docs.nvidia.com/cuda/cuda-driver-api).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, NoReturn

from rlx.errors import CompileError, DeviceError, ResourceError, RlxError, TargetError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_LOG_BYTES = 8192
_PTX, _CUBIN_ERROR_LOG, _ERROR_LOG_BYTES = 1, 5, 6  # CUjitInputType, CUjit_option
_MAX_DYNAMIC_SHARED, _CARVEOUT = 8, 9  # CUfunction_attribute
_CAPTURE_RELAXED = 2

_OUT_OF_MEMORY = 2

#: Codes after which the context is lost, and what a user may do.
_LOST = {
    700: "a kernel read or wrote memory that it does not own: this is a bug of rlx, please report it",
    702: "a kernel ran longer than this system allows: use a card without a display, or shorter prompts",
    715: "the card met an instruction that it does not know: this is a bug of rlx, please report it",
    716: "a kernel read an address that is not aligned: this is a bug of rlx, please report it",
    719: "a kernel failed: this is a bug of rlx, please report it",
    46: "another program uses the card alone (compute mode): end it",
    214: "the card found an error in its memory that it cannot correct: restart it",
}


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)), ("count", c_uint),
    )  # fmt: skip


@cache
def _library() -> Any:
    """The driver, initialized.

    Raises:
        TargetError: there is none, or it finds no card.
    """
    hint = 'Choose device="cpu", or install NVIDIA\'s driver. In a container, start it with access to the card.'
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise TargetError(f"NVIDIA's driver is not there: {error}", where="device cuda", hint=hint) from error
    code = library.cuInit(0)
    if code:
        raise TargetError(f"NVIDIA's driver finds no card: {_name(library, code)}", where="device cuda", hint=hint)
    return library


def _name(library: Any, code: int) -> str:
    text = c_char_p()
    library.cuGetErrorName(code, byref(text))
    return f"{text.value.decode() if text.value else 'error'} ({code})"


def call(function: str, *arguments: Any, what: str = "") -> None:
    """Calls a function of the driver.

    Args:
        what: was asked for, for the error.

    Raises:
        ResourceError: the card has not enough memory.
        DeviceError: any other error.
    """
    if code := getattr(_library(), function)(*arguments):
        _refuse(function, code, what)


def _refuse(function: str, code: int, what: str) -> NoReturn:
    found = f"{what or function}: {_name(_library(), code)}"
    if code == _OUT_OF_MEMORY:
        hint = "use a shorter context, a smaller model or a smaller type of cache, or end other programs on this card"
        raise ResourceError(f"the card has not enough memory for {found}", where="device cuda", hint=hint)
    hint = _LOST.get(code, "see the CUDA driver's error codes; please report it if it comes back")
    raise DeviceError(f"the card refuses {found}", where="device cuda", hint=hint)


class Card:
    """The first card: its context, and its one stream, in which everything runs in order.

    Raises:
        TargetError: there is none.
    """

    def __init__(self) -> None:
        self._device, self._context, self._stream = c_int(), c_void_p(), c_void_p()
        self._thread = threading.local()
        library = _library()
        if code := library.cuDeviceGet(byref(self._device), 0):
            raise TargetError(f"there is no card: {_name(library, code)}", where="device cuda")
        call("cuDevicePrimaryCtxRetain", byref(self._context), self._device, what="a context")
        self.use()
        call("cuStreamCreate", byref(self._stream), 1, what="a stream")  # it does not wait for the default stream

    @property
    def stream(self) -> c_void_p:
        """The stream, for functions of the driver."""
        return self._stream

    def use(self) -> None:
        """Makes the card that of the calling thread."""
        if not getattr(self._thread, "set", False):
            call("cuCtxSetCurrent", self._context)
            self._thread.set = True

    def attribute(self, number: int) -> int:
        """A number of the card, see CUdevice_attribute."""
        value = c_int()
        call("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    @property
    def name(self) -> str:
        """What the card is called."""
        text = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode(errors="replace")

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""
        self.use()
        free, total = c_size_t(), c_size_t()
        call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """The address of new memory of the card, zeroed."""
        self.use()
        found = c_uint64()
        call("cuMemAlloc_v2", byref(found), c_size_t(max(nbytes, 1)), what=f"{nbytes / 2**20:.0f} MiB")
        self.zero(found.value, max(nbytes, 1))
        return found.value

    def free(self, address: int) -> None:
        """Frees memory, once nothing runs that may use it."""
        self.wait()
        call("cuMemFree_v2", c_uint64(address))

    def pinned(self, nbytes: int) -> int:
        """The address of new memory of the host that the card copies from directly."""
        self.use()
        found = c_void_p()
        call("cuMemAllocHost_v2", byref(found), c_size_t(max(nbytes, 1)), what=f"{nbytes / 2**20:.0f} MiB of the host")
        return int(found.value or 0)

    def free_pinned(self, address: int) -> None:
        """Frees memory of `pinned`."""
        self.wait()
        call("cuMemFreeHost", c_void_p(address))

    def send(self, target: int, source: int, nbytes: int) -> None:
        """Begins to copy from the host, whose memory must stay as it is until `wait`."""
        self.use()
        call("cuMemcpyHtoDAsync_v2", c_uint64(target), c_void_p(source), c_size_t(nbytes), self._stream)

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        """Copies to the host."""
        self.use()
        call("cuMemcpyDtoHAsync_v2", c_void_p(target), c_uint64(source), c_size_t(nbytes), self._stream)
        self.wait()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begins to copy within the card."""
        self.use()
        call("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(nbytes), self._stream)

    def zero(self, target: int, nbytes: int) -> None:
        """Begins to set memory to zeros."""
        self.use()
        call("cuMemsetD8Async", c_uint64(target), 0, c_size_t(nbytes), self._stream)

    def wait(self) -> None:
        """Returns when everything that was begun is done."""
        self.use()
        call("cuStreamSynchronize", self._stream, what="a step")

    # -- code ---------------------------------------------------------------------------------------------------------

    def module(self, cubin: bytes) -> c_void_p:
        """Loads machine code."""
        self.use()
        found = c_void_p()
        call("cuModuleLoadData", byref(found), cubin, what="its code")
        return found

    def unload(self, module: c_void_p) -> None:
        """Removes machine code, once nothing runs."""
        self.wait()
        call("cuModuleUnload", module)

    def function(self, module: c_void_p, name: str, shared: int) -> c_void_p:
        """A kernel of a module, which may use so many bytes of shared memory."""
        found = c_void_p()
        call("cuModuleGetFunction", byref(found), module, name.encode(), what=f"the kernel {name}")
        call("cuFuncSetAttribute", found, _CARVEOUT, 100)
        if shared > 48 << 10:
            call("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, shared, what=f"{shared} bytes of shared memory")
        return found

    def launch(self, function: c_void_p, config: LaunchConfig, arguments: Any) -> None:
        """Begins to run a kernel."""
        call("cuLaunchKernelEx", byref(config), function, arguments, None, what="a kernel")

    def capture(self) -> None:
        """What is begun from now on is recorded instead of run, until `recorded`."""
        self.use()
        call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_RELAXED)

    def recorded(self) -> c_void_p:
        """What was recorded since `capture`, to run with `replay`."""
        graph, found = c_void_p(), c_void_p()
        call("cuStreamEndCapture", self._stream, byref(graph), what="the record of a step")
        try:
            call("cuGraphInstantiateWithFlags", byref(found), graph, c_uint64(0), what="the record of a step")
        finally:
            call("cuGraphDestroy", graph)
        return found

    def replay(self, graph: c_void_p) -> None:
        """Begins to run what was recorded."""
        self.use()
        call("cuGraphLaunch", graph, self._stream, what="a step")

    def forget(self, graph: c_void_p) -> None:
        """Frees a record."""
        call("cuGraphExecDestroy", graph)


def config(grid: int, block: int, shared: int, card: Card, *, overlaps: bool = False) -> LaunchConfig:
    """How a kernel is launched.

    Args:
        grid: number of blocks.
        block: threads of each.
        shared: bytes of shared memory of each.
        overlaps: whether it may start while the kernel before ends (programmatic dependent launch).
    """
    attributes = (LaunchAttribute * 1)(LaunchAttribute(6, 0, (c_uint * 16)(1)))
    return LaunchConfig(
        (c_uint * 3)(grid, 1, 1), (c_uint * 3)(block, 1, 1), shared, card.stream, attributes, int(overlaps)
    )


def link(ptx: str) -> bytes:
    """Machine code of a module of PTX, for the card of the calling thread.

    Raises:
        CompileError: the driver refuses it.
    """
    log, state = ctypes.create_string_buffer(_LOG_BYTES), c_void_p()
    options = (c_int * 2)(_CUBIN_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (c_void_p * 2)(ctypes.cast(log, c_void_p), c_void_p(_LOG_BYTES))
    text = ptx.encode() + b"\0"
    call("cuLinkCreate_v2", 2, options, values, byref(state))
    try:
        call("cuLinkAddData_v2", state, _PTX, text, c_size_t(len(text)), b"rlx", 0, None, None)
        found, nbytes = c_void_p(), c_size_t()
        call("cuLinkComplete", state, byref(found), byref(nbytes))
        return ctypes.string_at(found, nbytes.value)
    except RlxError as error:
        what = f"{error}\n{log.value.decode(errors='replace')}".strip()
        raise CompileError(f"the driver refuses the code: {what}", where="device cuda") from error
    finally:
        call("cuLinkDestroy", state)


def version() -> int:
    """The CUDA version that the driver supports: 1000 times the major number, 10 times the minor one."""
    found = c_int()
    call("cuDriverGetVersion", byref(found))
    return found.value


def pointers(values: Sequence[int]) -> tuple[Any, Any]:
    """The arguments of a kernel, all of 8 bytes: (what the driver takes, the memory that it points to)."""
    memory = (c_uint64 * len(values))(*values)
    start = ctypes.addressof(memory)
    return (c_void_p * len(values))(*(start + 8 * i for i in range(len(values)))), memory
