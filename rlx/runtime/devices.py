"""Devices that programs run on: only the CPU. Other names are refused with a list of the known ones."""

from __future__ import annotations

import difflib
from enum import StrEnum

from rlx.errors import TargetError


class Device(StrEnum):
    """A kind of device."""

    CPU = "cpu"


def devices() -> list[Device]:
    """The devices of this machine, the default first."""
    return list(Device)


def device(name: str | Device | None) -> Device:
    """The device of that name in any case; the default for None.

    Raises:
        TargetError: there is no such device.
    """
    if name is None:
        return devices()[0]
    known = [d.value for d in devices()]
    if str(name).lower() not in known:
        close = difflib.get_close_matches(str(name).lower(), known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(known)}"
        raise TargetError(f"device {name!r} is not there", where="device", hint=hint)
    return Device(str(name).lower())
