"""NVIDIA's driver, `libcuda`, through ctypes. This is the only module that knows its functions and their numbers.

Source of the functions and error codes: the CUDA Driver API reference (docs.nvidia.com/cuda/cuda-driver-api).
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from rlx.errors import CompileError, DeviceError, ResourceError, RlxError, TargetError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_LOG_BYTES = 8192
_PTX, _CUBIN_ERROR_LOG, _ERROR_LOG_BYTES = 1, 5, 6  # CUjitInputType, CUjit_option
_MAX_DYNAMIC_SHARED, _CARVEOUT = 8, 9  # CUfunction_attribute
MULTIPROCESSORS = 16  # CUdevice_attribute
_CAPTURE_RELAXED = 2
_CARD = 2  # CUmemorytype

_OUT_OF_MEMORY, _NOT_READY, _REACHED = 2, 600, 704

#: How long a wait may last, in seconds. The longest steps, prompts of large models on small cards, take a few.
WAIT_SECONDS = 60.0
_STAGED = 64 << 10  # bytes that the driver takes at once, of any memory
_SPIN_SECONDS, _TRIES = 0.05, 4000  # how long a wait asks without a pause, and how often in one native call

_BUG = "this is a bug of rlx, please report it"
#: Codes after which the context is lost, and what a user may do.
_LOST = {
    46: "another program uses the card alone (compute mode): end it",
    214: "the card found an error in its memory that it cannot correct: restart it",
    700: f"a kernel read or wrote memory that it does not own: {_BUG}",
    702: "a kernel ran longer than this system allows: use a card without a display, or shorter prompts",
    709: "the card was reset or given away by another program: start this process again",
    710: f"a kernel found an assertion broken: {_BUG}",
    714: f"the card met an instruction that it does not know: {_BUG}",
    715: f"the card met an instruction that it does not know: {_BUG}",
    716: f"a kernel read an address that is not aligned: {_BUG}",
    717: f"a kernel used an address of another kind of memory: {_BUG}",
    718: f"a kernel jumped to an address that is no code: {_BUG}",
    719: f"a kernel failed, or one of several cards did not come to where they meet: {_BUG}",
    721: "the card or its cable failed, see `dmesg`: restart the machine",
}

#: Codes of a driver that finds no card, and what a user may do.
_NO_CARD = {
    3: "the driver was ended: start this process again",
    34: "this is the stub of a toolkit, not a driver: remove its folder from LD_LIBRARY_PATH",
    100: "the machine has none, CUDA_VISIBLE_DEVICES hides it, or a container was started without access (--gpus all)",
    101: "there is no card of this number, or CUDA_VISIBLE_DEVICES names one that is not there",
    802: "the switches of this machine are not ready: start NVIDIA's fabric manager",
    803: "library and kernel module are of different drivers: restart the machine",
    804: "the library is newer than the kernel module: install one driver for both",
    999: "load the kernel module nvidia_uvm, or restart the machine",
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


class Place(ctypes.Structure):
    """One side of a CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", c_size_t), ("y", c_size_t), ("memory", c_uint), ("host", c_void_p), ("address", c_uint64),
        ("array", c_void_p), ("pitch", c_size_t),
    )  # fmt: skip


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", Place), ("target", Place), ("width", c_size_t), ("height", c_size_t))


@cache
def _library() -> Any:
    """The driver, initialized.

    Raises:
        TargetError: there is none, or it finds no card.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        hint = (
            'Choose device="cpu", or install NVIDIA\'s driver. In a container, start it with access to the card. '
            "RLX_TARGET=sm_90a compiles code to look at, without a card."
        )
        raise TargetError(f"NVIDIA's driver is not there: {error}", where="device cuda", hint=hint) from error
    if code := library.cuInit(0):
        raise no_card(library, code)
    return library


def no_card(library: Any, code: int) -> TargetError:
    """The error of a driver that finds no card."""
    hint = f'Choose device="cpu". {_NO_CARD[code][0].upper()}{_NO_CARD[code][1:]}.' if code in _NO_CARD else ""
    return TargetError(f"NVIDIA's driver finds no card: {_name(library, code)}", where="device cuda", hint=hint)


@cache
def _quick() -> Any:
    """The driver again, for what returns at once: such calls keep Python's lock. Else another thread could take it, and
    they would wait for it for 5 ms.
    """
    return ctypes.PyDLL(_LIBRARY)


@cache
def _repeats() -> Any:
    """A function of the C library that calls another one until it returns 0: `lfind`, which searches a list.

    The driver's waits have no end. This asks it again and again without Python, whose lock others can take meanwhile.
    """
    return ctypes.cdll.msvcrt._lfind if sys.platform == "win32" else ctypes.CDLL(None).lfind


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
        raise _error(function, code, what)


def _error(function: str, code: int, what: str) -> RlxError:
    found = f"{what or function}: {_name(_library(), code)}"
    if code == _OUT_OF_MEMORY:
        hint = "use a shorter context, a smaller model or a smaller type of cache, or end other programs on this card"
        return ResourceError(f"the card has not enough memory for {found}", where="device cuda", hint=hint)
    hint = _LOST.get(code, "see the CUDA driver's error codes; please report it if it comes back")
    return DeviceError(f"the card refuses {found}", where="device cuda", hint=hint)


#: Of each thread: the card whose context is current.
_current = threading.local()


class Context:
    """The context of a card, and a stream, in which everything runs in order.

    After an error that ends its context, or a wait that took too long, the card is lost: everything raises that error,
    but what frees something does nothing, so that whoever uses the card can end.

    Args:
        number: of the card, as the driver counts those that the process may see.

    Attributes:
        lost: why the card is lost, or None.

    Raises:
        TargetError: there is none of that number.
        DeviceError: another program uses it alone.
    """

    def __init__(self, number: int = 0) -> None:
        self._device, self._context, self._stream = c_int(), c_void_p(), c_void_p()
        self._thread, self._alone = threading.local(), threading.RLock()
        self.lost: DeviceError | None = None
        library = _library()
        if code := library.cuDeviceGet(byref(self._device), number):
            raise no_card(library, code)
        call("cuDevicePrimaryCtxRetain", byref(self._context), self._device, what="a context")
        self._call("cuStreamCreate", byref(self._stream), 1, what="a stream")  # it does not wait for the default stream

    @property
    def stream(self) -> c_void_p:
        """The stream, for functions of the driver."""
        return self._stream

    def use(self) -> None:
        """Makes the card that of the calling thread."""
        if getattr(_current, "card", None) is not self:
            self._check_lost()
            self._check("cuCtxSetCurrent", _library().cuCtxSetCurrent(self._context), "")
            _current.card = self

    def same(self, other: Context) -> bool:
        """Whether it is the same card of the machine."""
        return self._context.value == other._context.value

    def reach(self, other: Context) -> None:
        """Lets kernels of this card use the memory of another one.

        Raises:
            TargetError: the machine has no way between them.
        """
        if self.same(other):
            return
        can = c_int()
        self._call("cuDeviceCanAccessPeer", byref(can), self._device, other._device)
        if not can.value:
            what = f"card {self._device.value} cannot use the memory of card {other._device.value}"
            raise TargetError(what, where="device cuda", hint="Choose cards with a link between them, or one card.")
        self.use()
        code = _library().cuCtxEnablePeerAccess(other._context, 0)
        self._check("cuCtxEnablePeerAccess", 0 if code == _REACHED else code, "the memory of another card")

    def wait(self) -> None:
        """Returns when everything that was begun is done.

        Raises:
            DeviceError: it failed, or takes longer than `WAIT_SECONDS`.
        """
        if not hasattr(self._thread, "event"):
            self._thread.event = self.event()
        self.record(self._thread.event)
        self.wait_for(self._thread.event)

    # -- events -------------------------------------------------------------------------------------------------------

    def event(self, *, timed: bool = False) -> c_void_p:
        """A new event, which nothing has to wait for.

        Args:
            timed: `seconds` takes it.
        """
        found = c_void_p()
        self._call("cuEventCreate", byref(found), 0 if timed else 2)
        return found

    def record(self, event: c_void_p, *, in_graph: bool = False) -> None:
        """The event comes when what was begun so far is done.

        Args:
            in_graph: it is a part of the step that is being recorded, and comes each time that this runs.
        """
        self.use()
        self._begin("cuEventRecordWithFlags", event, self._stream, int(in_graph))

    def seconds(self, begin: c_void_p, end: c_void_p) -> float:
        """The time between two events that have come."""
        found = c_float()
        self._call("cuEventElapsedTime", byref(found), begin, end)
        return found.value / 1e3

    def wait_for(self, event: c_void_p) -> None:
        """Returns when an event has come, or was never recorded.

        Raises:
            DeviceError: what it waits for failed, or takes longer than `WAIT_SECONDS`.
        """
        self._check_lost()
        self.use()
        begin, asks = time.monotonic(), _library().cuEventQuery
        while (code := _quick().cuEventQuery(event)) == _NOT_READY:
            seconds = time.monotonic() - begin
            if seconds > WAIT_SECONDS:
                self.lost = _too_long(seconds)
                raise self.lost
            if seconds > _SPIN_SECONDS:
                time.sleep(0.0005)
            else:
                _repeats()(event, None, byref(c_size_t(_TRIES)), c_size_t(0), ctypes.cast(asks, c_void_p))
        self._check("cuEventQuery", code, "a step")

    def forget_event(self, event: c_void_p) -> None:
        """Frees an event."""
        self._end("cuEventDestroy_v2", event)

    # -- errors -------------------------------------------------------------------------------------------------------

    def _call(self, function: str, *arguments: Any, what: str = "") -> None:
        """As `call`, unless the card is lost."""
        self._check_lost()
        self.use()
        self._check(function, getattr(_library(), function)(*arguments), what)

    def _begin(self, function: str, *arguments: Any, what: str = "") -> None:
        """As `_call`, of what runs in the stream: not while another thread records a step, which would contain it.

        The card is in `use`.
        """
        self._check_lost()
        with self._alone:
            self._check(function, getattr(_quick(), function)(*arguments), what)

    def _check_lost(self) -> None:
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    def _check(self, function: str, code: int, what: str) -> None:
        if code:
            error = _error(function, code, what)
            if code in _LOST and isinstance(error, DeviceError):
                self.lost = error
            raise error

    def _end(self, function: str, *arguments: Any) -> None:
        """Frees something, once nothing runs that may use it. Of a lost card the system frees all, with the process."""
        with suppress(DeviceError):
            self.wait()
        if self.lost is None:
            self._call(function, *arguments)


class Card(Context):
    """A card: its memory, and what runs on it."""

    def attribute(self, number: int) -> int:
        """A number of the card, see CUdevice_attribute."""
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    @property
    def name(self) -> str:
        """What the card is called."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode(errors="replace")

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """The address of new memory of the card, zeroed."""
        self.wait()  # the driver may wait itself, without an end
        found = c_uint64()
        self._call("cuMemAlloc_v2", byref(found), c_size_t(max(nbytes, 1)), what=_mib(nbytes))
        self.zero(found.value, max(nbytes, 1))
        return found.value

    def free(self, address: int) -> None:
        """Frees memory, once nothing runs that may use it."""
        self._end("cuMemFree_v2", c_uint64(address))

    def pinned(self, nbytes: int) -> int:
        """The address of new memory of the host that the card copies from directly."""
        self.wait()  # as for `allocate`
        found = c_void_p()
        self._call(
            "cuMemAllocHost_v2", byref(found), c_size_t(max(nbytes, 1)), what=f"{nbytes / 2**20:.0f} MiB of the host"
        )
        return int(found.value or 0)

    def free_pinned(self, address: int) -> None:
        """Frees memory of `pinned`."""
        self._end("cuMemFreeHost", c_void_p(address))

    def write(self, target: int, source: int, nbytes: int) -> None:
        """Copies from memory of the host that need not be pinned."""
        self.wait()  # the copy itself would wait without an end
        if nbytes <= _STAGED:
            self.send(target, source, nbytes)
        else:
            self._call("cuMemcpyHtoD_v2", c_uint64(target), c_void_p(source), c_size_t(nbytes))

    def send(self, target: int, source: int, nbytes: int) -> None:
        """Begins to copy from pinned memory, which must stay as it is until `wait`."""
        self.use()
        self._begin("cuMemcpyHtoDAsync_v2", c_uint64(target), c_void_p(source), c_size_t(nbytes), self._stream)

    def fetch(self, target: int, source: int, nbytes: int) -> None:
        """Copies to the host."""
        self.wait()  # as for `write`
        self._call("cuMemcpyDtoH_v2", c_void_p(target), c_uint64(source), c_size_t(nbytes))

    def bring(self, target: int, source: int, nbytes: int) -> None:
        """Begins to copy to pinned memory, which nobody reads until `wait`."""
        self.use()
        self._begin("cuMemcpyDtoHAsync_v2", c_void_p(target), c_uint64(source), c_size_t(nbytes), self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begins to copy within the card."""
        self.use()
        self._begin("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(nbytes), self._stream)

    def copy_rows(self, target: int, source: int, nbytes: int, rows: int, stride: int) -> None:
        """Begins to copy pieces within the card, each `stride` bytes after the one before."""
        self.use()
        places = Place(memory=_CARD, address=source, pitch=stride), Place(memory=_CARD, address=target, pitch=stride)
        self._begin("cuMemcpy2DAsync_v2", byref(Copy2D(*places, nbytes, rows)), self._stream)

    def zero(self, target: int, nbytes: int) -> None:
        """Begins to set memory to zeros."""
        self.use()
        self._begin("cuMemsetD8Async", c_uint64(target), 0, c_size_t(nbytes), self._stream)

    # -- code ---------------------------------------------------------------------------------------------------------

    def module(self, cubin: bytes) -> c_void_p:
        """Loads machine code."""
        self.wait()  # as for `allocate`
        found = c_void_p()
        self._call("cuModuleLoadData", byref(found), cubin, what="its code")
        return found

    def unload(self, module: c_void_p) -> None:
        """Removes machine code, once nothing runs."""
        self._end("cuModuleUnload", module)

    def function(self, module: c_void_p, name: str, shared: int) -> c_void_p:
        """A kernel of a module, which may use so many bytes of shared memory."""
        found = c_void_p()
        self._call("cuModuleGetFunction", byref(found), module, name.encode(), what=f"the kernel {name}")
        self._call("cuFuncSetAttribute", found, _CARVEOUT, 100)
        if shared > 48 << 10:
            self._call(
                "cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, shared, what=f"{shared} bytes of shared memory"
            )
        return found

    def launch(self, function: c_void_p, config: LaunchConfig, arguments: Any) -> None:
        """Begins to run a kernel. The card is in `use`."""
        self._begin("cuLaunchKernelEx", byref(config), function, arguments, None, what="a kernel")

    def recorded(self, begin: Callable[[], object]) -> c_void_p:
        """Records what a function begins, in place of running it: what `replay` takes."""
        graph, found = c_void_p(), c_void_p()
        try:
            with self._alone:
                self._call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_RELAXED)
                try:
                    begin()
                finally:
                    self._call("cuStreamEndCapture", self._stream, byref(graph), what="the record of a step")
            self._call("cuGraphInstantiateWithFlags", byref(found), graph, c_uint64(0), what="the record of a step")
        finally:
            if graph.value:
                self._call("cuGraphDestroy", graph)
        return found

    def replay(self, graph: c_void_p) -> None:
        """Begins to run what `recorded` has."""
        self.use()
        self._begin("cuGraphLaunch", graph, self._stream, what="a step")

    def forget(self, graph: c_void_p) -> None:
        """Frees a record, once nothing runs."""
        self._end("cuGraphExecDestroy", graph)


class Loaded:
    """A kernel on the card. It stays there as long as this object.

    Args:
        cubin: its machine code.
        name: of the kernel.
        shared: bytes of shared memory of a block.
    """

    def __init__(self, card: Card, cubin: bytes, name: str, shared: int = 0) -> None:
        self._card, self._module, self.shared = card, card.module(cubin), shared
        self.function = card.function(self._module, name, shared)

    def __del__(self) -> None:
        if hasattr(self, "_module"):
            with suppress(DeviceError):  # the card is lost: who used it was told
                self._card.unload(self._module)


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


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _too_long(seconds: float) -> DeviceError:
    hint = "The card hangs, or a kernel does: start this process again, and report it if it comes back."
    return DeviceError(f"the card has not answered for {seconds:.0f} s", where="device cuda", hint=hint)


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
        kind = ", ".join(re.findall(r"^\.(?:version|target) (\S+)", ptx, re.MULTILINE))
        made = f"PTX {kind}; the driver's CUDA is {version() // 1000}.{version() % 1000 // 10}"
        what = f"{error}\n{log.value.decode(errors='replace')}".strip()
        hint = 'Install a newer driver, or choose device="cpu".'
        raise CompileError(f"the driver refuses the code ({made}): {what}", where="device cuda", hint=hint) from error
    finally:
        call("cuLinkDestroy", state)


def version() -> int:
    """The CUDA version that the driver supports: 1000 times the major number, 10 times the minor one."""
    found = c_int()
    call("cuDriverGetVersion", byref(found))
    return found.value


def count() -> int:
    """How many cards the process may see."""
    found = c_int()
    call("cuDeviceGetCount", byref(found))
    return found.value


def pointers(values: Sequence[int]) -> tuple[Any, Any]:
    """The arguments of a kernel, all of 8 bytes: (what the driver takes, the memory that it points to)."""
    memory = (c_uint64 * len(values))(*values)
    start = ctypes.addressof(memory)
    return (c_void_p * len(values))(*(start + 8 * i for i in range(len(values)))), memory
