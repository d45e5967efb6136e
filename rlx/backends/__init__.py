"""Backends: what turns a scheduled program into something that runs. Between the passes and the runtime.

A backend is a module whose `BACKEND` implements `rlx.backends.device.Backend`; `register` gives it a name. Backends are
imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlx import env
from rlx.arguments import did_you_mean
from rlx.errors import ArgumentError, RlxError, TargetError

if TYPE_CHECKING:
    from rlx.backends.cpu.target import Target as Target
    from rlx.backends.device import Backend

#: Device -> the module of its backend. The first is the default.
MODULES: dict[str, str] = {}


def register(device: str, module: str) -> None:
    """Adds a device.

    Args:
        module: its dotted name. `BACKEND` in it is the `Backend` of the device.

    Raises:
        ArgumentError: the name is in use, or has capitals.
    """
    if device in MODULES or device != device.lower():
        raise ArgumentError(f"a device cannot be called {device!r}", hint="Give a new name, in lower case.")
    MODULES[device] = module


register("cpu", "rlx.backends.cpu.backend")
register("reference", "rlx.backends.reference.backend")
register("cuda", "rlx.backends.cuda.backend")


def __getattr__(name: str) -> Any:
    """`Target`: that of the default device, imported at first use."""
    if name == "Target":
        return import_module(MODULES["cpu"]).Target
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Device:
    """The names of the devices that rlx has backends for; `rlx.devices()` lists them."""

    CPU: Final = "cpu"
    REFERENCE: Final = "reference"
    CUDA: Final = "cuda"


def devices() -> list[str]:
    """The devices of this machine that programs run on, the default first.

    "cpu" runs native code made for this CPU. "reference" computes each op with NumPy: slow and exact, to check others.
    "cuda" is the first NVIDIA card, where there is one; `rlx devices` says why there is none.
    """
    return [name for name in MODULES if why_missing(name) is None]


def why_missing(device: str) -> str | None:
    """Why programs cannot run on a device here, and what to do; None if they can."""
    try:
        backend(device).target()
    except RlxError as error:
        return str(error)
    return None


def checked_device(device: str | None) -> str:
    """The name of a device, which may be in any case; that of the default one for None.

    Raises:
        TargetError: there is no such device.
    """
    name = next(iter(MODULES)) if device is None else str(device).lower()
    if name not in MODULES:
        raise TargetError(f"device {device!r} is not there", where="device", hint=did_you_mean(name, MODULES))
    return name


def backend(device: str | None = None) -> Backend:
    """The backend of the device of that name; of the default one for None.

    Raises:
        TargetError: as `checked_device`.
    """
    found: Backend = import_module(MODULES[checked_device(device)]).BACKEND
    return found if env.jit() else found.without_code()
