"""How an option of an engine is declared: once, as a field of a dataclass, with what people and programs need of it.

Arguments of functions, methods of builders, options of the command line, keys of profiles and tables of the
documentation are made from the fields. `ProfileOptions` has the options that both a caller and a compile profile can
give an engine; the caller's value wins. `EngineOptions` in the engine has those that no profile can set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from os import PathLike
from typing import Any

from rlx import arguments
from rlx.arguments import did_you_mean
from rlx.env import parse_size
from rlx.errors import ArgumentError, RlxError
from rlx.ir.dtypes import KV_DTYPES

_KIND_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    tuple: "a tuple of strings",
    object: "a value",
}


@dataclass(frozen=True, kw_only=True)
class Values:
    """The values that an option or a profile key may have.

    Attributes:
        kind: their type; `object` for any. A whole number also counts as a float. A tuple has strings, each of which
            `parse` checks.
        choices: the values there are, of any kind of option the strings; empty if they are too many.
        low, high: bounds of a number; None where there is none.
        parse: checks a value further and converts it, such as "2G" to bytes; raises an `RlxError`.
    """

    kind: type = str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    parse: Callable[[Any], Any] | None = None

    def problem(self, name: str, value: Any) -> tuple[str, str | None] | None:
        """The error of a value, and a hint; None if it is one of these."""
        if self.kind is tuple:
            return self._problem_of_several(name, value)
        if not _is_a(self.kind, value) or not self._in_range(value):
            return f"{name} is {value!r}, expected {_KIND_NAMES[self.kind]}{self._bounds}", None
        if self.choices and (self.kind is str or isinstance(value, str)) and value not in self.choices:
            hint = did_you_mean(value, self.choices, otherwise="") or None
            return f"{name} is {value!r}, expected one of {', '.join(self.choices)}", hint
        if self.parse is not None:
            try:
                self.parse(value)
            except RlxError as error:
                return f"{name}: {error.what}", error.hint
        return None

    def _problem_of_several(self, name: str, value: Any) -> tuple[str, str | None] | None:
        if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
            return f"{name} is a {type(value).__name__}, expected {_KIND_NAMES[tuple]}", None
        one = replace(self, kind=str)
        return next(filter(None, (one.problem(name, each) for each in value)), None)

    def parsed(self, value: Any) -> Any:
        """The value as `parse` converts it."""
        if self.parse is None:
            return value
        return tuple(map(self.parse, value)) if self.kind is tuple else self.parse(value)

    @property
    def _bounds(self) -> str:
        """The bounds as words: ` from 1 to 8`, ` of at least 1`, or nothing."""
        if self.low is None:
            return ""
        return f" of at least {self.low}" if self.high is None else f" from {self.low} to {self.high}"

    def _in_range(self, value: Any) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, kw_only=True)
class Option(Values):
    """How one option is explained, and where it can be given besides as an argument.

    Attributes:
        meaning: what it does, as a sentence without its full stop: for `help()`, `--help` and the documentation.
        python: what values an argument may have that the command line has not; "" if there is nothing to say.
        default: what holds where nobody gives it, for people; "" if there is nothing to say.
        key: path of the profile key that sets it, such as `backend.cpu.threads`; None if profiles cannot.
        metavar: what stands for the value in `--help`. None: the command line does not have the option, unless it has
            choices or is a switch.
        flag: False keeps a switch or a choice off the command line.
        secret: the `repr` of the dataclass leaves it out.
    """

    meaning: str
    python: str = ""
    default: str = ""
    key: str | None = None
    metavar: str | None = None
    flag: bool = True
    secret: bool = False

    @property
    def is_flag(self) -> bool:
        """Whether the command line has it."""
        return self.flag and bool(self.metavar or self.choices or self.kind is bool)

    @property
    def help(self) -> str:
        """The text of `--help`: the meaning and the default."""
        return "; ".join(filter(None, (self.meaning, self.default and f"by default {self.default}")))

    @property
    def doc(self) -> str:
        """The text for Python: the meaning, what an argument may be, and the default."""
        return "; ".join(filter(None, (self.meaning, self.python, self.default and f"by default {self.default}")))

    def check(self, name: str, value: Any) -> None:
        """Raises `ArgumentError` if it may not have this value."""
        if found := self.problem(name, value):
            raise ArgumentError(found[0], hint=found[1])


_OPTION = "option"  # key of the metadata of a field
_KINDS = {"int": int, "float": float, "bool": bool, "str": str, "tuple[str, ...]": tuple}


def option(value: Any, meaning: str, **more: Any) -> Any:
    """A field of a dataclass that is an option: its value where none is given, and the arguments of `Option`.

    Where `more` does not say them, the type is that of the field, and the default of a number is the value.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        more.setdefault("default", f"{value:g}" if isinstance(value, float) else str(value))
    return field(default=value, repr=not more.get("secret"), metadata={_OPTION: {"meaning": meaning, **more}})


def _options_of(owner: type) -> dict[str, Option]:
    """The options among the fields of a dataclass, in order."""
    return {
        each.name: Option(**{"kind": _KINDS.get(str(each.type).removesuffix(" | None"), object), **more})
        for each in fields(owner)
        if (more := each.metadata.get(_OPTION))
    }


options_of: Callable[[type], dict[str, Option]] = cache(_options_of)


def check_options(options: Any) -> None:
    """Raises `ArgumentError` where a field of a dataclass of options has a value that it may not have."""
    for name, each in options_of(type(options)).items():
        if (value := getattr(options, name)) is not None:
            each.check(name, value)


def _is_a(kind: type, value: Any) -> bool:
    kinds: dict[type, type] = {int: Integral, float: Real}  # NumPy's numbers, too
    return isinstance(value, kinds.get(kind, kind)) and (kind in (bool, object) or not isinstance(value, bool))


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
    found = arguments.path("cache_kv", value)
    if not os.fspath(value):
        raise ArgumentError("'' is not the path of a folder", where="cache_kv")
    return str(found)


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
        parse=parse_bytes,
        metavar="SIZE",
    )
    cache_kv: str | PathLike[str] | None = option(
        None,
        "Folder of the prompt cache on disk; processes may share it",
        default="none",
        key="engine.cache_kv",
        parse=parse_folder,
        metavar="DIR",
    )
    cache_kv_bytes: int | str | None = option(
        None,
        "Size limit of the folder `cache_kv`, such as 20GiB",
        python="or a number of bytes",
        default="a tenth of the free disk, at most 64GiB",
        key="engine.cache_kv_bytes",
        parse=parse_cache_kv_bytes,
        metavar="SIZE",
    )
    device: str | None = option(
        None,
        "Device, one of `devices()`, `cuda:0,1` for some cards, or `auto`: the card if it works and the model fits, "
        "else the CPU",
        default="the CPU",
        key="engine.device",
        kind=object,
        metavar="DEVICE",
    )
    deterministic: bool | None = option(
        None,
        "Same bits in every batch on CPUs with AMX and on cards, too; prompts take longer there",
        default="false",
        key="precision.deterministic",
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
