"""Backends: what turns a scheduled program into something that runs. Between the passes and the runtime.

A backend is a module whose `BACKEND` implements `rlx.backends.device.Backend`; `register` gives it a name. Backends are
imported at first use.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlx import env
from rlx.arguments import did_you_mean
from rlx.errors import ArgumentError, RlxError, TargetError

if TYPE_CHECKING:
    from rlx.backends.cpu.target import Target as Target
    from rlx.backends.device import Backend

#: In place of a device: the card if it works and the model fits, else the CPU.
AUTO = "auto"

#: Device -> the module of its backend. The first is the default.
MODULES: dict[str, str] = {}


def register(device: str, module: str) -> None:
    """Adds a device.

    Args:
        module: its dotted name. `BACKEND` in it is the `Backend` of the device. Where there may be several machines of
            its kind, `chosen` gives that of some, which the name of the device tells after a colon.

    Raises:
        ArgumentError: the name is in use, or has capitals.
    """
    if device in MODULES or device != device.lower():
        raise ArgumentError(f"a device cannot be called {device!r}", hint="Give a new name, in lower case.")
    MODULES[device] = module


_CARDS = ("gpu", "nvidia")  # what others call cuda

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
        backend(device).description()
    except RlxError as error:
        return str(error)
    return None


class DeviceWarning(UserWarning):
    """The CPU computes what a card was wanted for."""


def is_auto(device: str | None) -> bool:
    """Whether a name is `AUTO`, in any case."""
    return str(device).lower() == AUTO


def chosen_device(device: str | None) -> str:
    """The name of a device, also of the one that `AUTO` stands for: the card if it works, else the CPU with a warning.

    Raises:
        TargetError: as `checked_device`.
    """
    if not is_auto(device):
        return checked_device(device)
    if (reason := why_missing(Device.CUDA)) is None:
        return Device.CUDA
    warn_of_cpu(reason)
    return Device.CPU


def warn_of_cpu(reason: object) -> None:
    """Warns that `AUTO` takes the CPU."""
    warnings.warn(f"the CPU computes: {reason}", DeviceWarning, stacklevel=2)


def checked_device(device: str | None) -> str:
    """The name of a device, which may be in any case; that of the default one for None. `AUTO` is no device.

    After a colon it may say which one of several, or which ones: "cuda:1", "cuda:0,1".

    Raises:
        TargetError: there is no such device.
    """
    name = next(iter(MODULES)) if device is None else str(device).lower()
    kind = name.partition(":")[0]
    if kind not in MODULES:
        hint = f"did you mean {Device.CUDA!r}?" if kind in _CARDS else did_you_mean(kind, MODULES)
        raise TargetError(f"device {device!r} is not there", where="device", hint=hint)
    return name


def backend(device: str | None = None) -> Backend:
    """The backend of the device of that name, see `chosen_device`; of the default one for None.

    Raises:
        TargetError: as `checked_device`.
    """
    kind, colon, which = chosen_device(device).partition(":")
    module = import_module(MODULES[kind])
    if colon and not hasattr(module, "chosen"):
        raise TargetError(f"there is one device {kind!r}", where="device", hint=f"Leave out {f':{which}'!r}.")
    found: Backend = module.chosen(which) if colon else module.BACKEND
    return found if env.jit() else found.without_code()
