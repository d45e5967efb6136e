"""Options that both a caller and a compile profile can give an engine; the caller's value wins.

A field here is an argument of `auto_runner`, of the runner classes and of `Engine.open`, a method of the builder, an
option of the command line, a key of the profile and a row in the documentation's tables. `EngineOptions` in the runners
has the options that no profile can set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any

from rlx.env import parse_size
from rlx.errors import ArgumentError
from rlx.ir.dtypes import KV_DTYPES
from rlx.profile.option import Option, option, options_of

MAX_THREADS = 1024
MAX_BYTES = 1 << 62


def parse_bytes(value: Any) -> int:
    """A number of bytes, or a text such as "2GiB", as a number of bytes.

    Raises:
        ArgumentError: it is neither, or not above 0.
    """
    return byte_count("kv_bytes", value)


def parse_cache_kv_bytes(value: Any) -> int:
    """As `parse_bytes`, for `cache_kv_bytes`."""
    return byte_count("cache_kv_bytes", value)


def parse_folder(value: Any) -> str:
    """The path of a folder; `~` is the home folder.

    Raises:
        ArgumentError: it is no path, or an empty one.
    """
    if not isinstance(value, str | PathLike) or not (text := os.fspath(value)) or isinstance(text, bytes):
        raise ArgumentError(f"{value!r} is not the path of a folder", where="cache_kv")
    if "\0" in text:
        raise ArgumentError(f"{value!r} has a NUL character", where="cache_kv")
    return os.path.expanduser(text)


def byte_count(name: str, value: Any, least: int = 1) -> int:
    """As `parse_bytes`, for the option `name`: a number of at least `least`."""
    if isinstance(value, str):
        return parse_size(value, name)
    number = -1 if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if not least <= number <= MAX_BYTES:
        what = f"{value!r} is not a size, expected a number of bytes from {least} to {MAX_BYTES}, or a text"
        raise ArgumentError(what, where=name, hint="Write 500M or 2G")
    return number


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The options; None leaves a choice to the profile, the environment or the default."""

    threads: int | None = option(
        None,
        "Worker threads",
        default="the physical cores",
        key="backend.cpu.threads",
        kind=int,
        low=1,
        high=MAX_THREADS,
        metavar="N",
    )
    kv_dtype: str | None = option(
        None,
        "Type of the KV cache",
        default="f16; f32 in exact precision and for some models",
        key="precision.kv_dtype",
        choices=tuple(dtype.name for dtype in KV_DTYPES),
    )

    kv_bytes: int | str | None = option(
        None,
        "Memory for the KV caches and recurrent states of all sequences, such as 2GiB",
        python="or a number of bytes",
        default="half of the free memory, at most 64 whole contexts",
        key="engine.kv_bytes",
        kind=object,
        parse=parse_bytes,
        metavar="SIZE",
    )
    cache_kv: str | PathLike[str] | None = option(
        None,
        "Folder of the prompt cache on disk; processes may share it",
        default="none",
        key="engine.cache_kv",
        kind=object,
        parse=parse_folder,
        metavar="DIR",
    )
    cache_kv_bytes: int | str | None = option(
        None,
        "Size limit of the folder `cache_kv`, such as 20GiB",
        python="or a number of bytes",
        default="a tenth of the free disk, at most 64GiB",
        key="engine.cache_kv_bytes",
        kind=object,
        parse=parse_cache_kv_bytes,
        metavar="SIZE",
    )
    deterministic: bool | None = option(
        None,
        "Same bits in every batch on CPUs with AMX, too; prompts take longer there",
        default="false",
        key="precision.deterministic",
        kind=bool,
    )

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Option -> the path of its profile key, for the options of this class."""
        return {name: str(each.key) for name, each in profile_options().items()}

    def given(self) -> dict[str, Any]:
        """The options that a profile can set and that have a value, as its parser converts it."""
        values = {name: (each, getattr(self, name)) for name, each in profile_options().items()}
        return {name: each.parsed(value) for name, (each, value) in values.items() if value is not None}


def profile_options() -> dict[str, Option]:
    """The options that a profile can set, by name."""
    return options_of(ProfileOptions)
