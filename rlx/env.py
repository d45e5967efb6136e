"""The environment variables that rlx reads: one table, and one function each that checks and converts the value.

Every part may ask this module. An option given in code or on the command line wins over its variable.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rlx.errors import ArgumentError

DEFAULT_CACHE_LIMIT = 2 << 30

#: Where a program is looked for, in order. "on": memory, store, build. "off": memory, build; nothing is stored. "redo":
#: memory, build, in place of what is stored. "readonly": memory, store; a needed build is an error.
Policy = Literal["on", "off", "redo", "readonly"]
CACHE_POLICIES: tuple[Policy, ...] = get_args(Policy)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST = 1 << 62  # bytes


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it may say, what holds without it, what it does."""

    name: str
    values: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "RLX_TARGET",
        "native | generic | avx2 | avx512 | amx | neon | dotprod | i8mm | bf16 | sm_90a",
        "native",
        "Instruction set level of the code, of x86 or aarch64. avx512-vnni-bf16 leaves two features out, avx2+vnni "
        "requires one. sm_75 to sm_121, with --device cuda, are kinds of NVIDIA cards.",
    ),
    Variable(
        "RLX_CACHE",
        " | ".join(CACHE_POLICIES),
        "on",
        "Compile cache: use it; keep programs in memory only; rebuild its entries; fail where an entry is missing.",
    ),
    Variable("RLX_CACHE_DIR", "a folder", "the user's cache folder", "Where compiled programs are kept; yours alone."),
    Variable("RLX_CACHE_LIMIT", "a size, such as 500M or 2G", "2G", "Size of that folder; the least recently used go."),
    Variable(
        "RLX_THREADS",
        "1 .. 1024",
        "physical cores allowed",
        "Number of worker threads; at most 8 per CPU are used.",
    ),
    Variable(
        "RLX_COMPILE_AHEAD", "0 | 1", "1", "With 1, an idle runner compiles in the background what later calls need."
    ),
    Variable(
        "RLX_PLATFORM",
        "native | plain",
        "native",
        "With plain, nothing that only some operating systems have: what rlx does on an unknown one. Slower.",
    ),
    Variable(
        "RLX_VERIFY",
        "0 | 1",
        "0",
        "With 1, every value of every step is compared with what its op means; slow. The first that differs is named.",
    ),
    Variable(
        "RLX_JIT",
        "0 | 1",
        "1",
        "With 0, no machine code: loop kernels run as the Python functions that they are, for a debugger; very slow.",
    ),
    Variable(
        "RLX_GEMMA_DYNAMIC_DECODE", "0 | 1", "0", "With 1, with_inference_caches of a generator decodes in one program."
    ),
    Variable(
        "RLX_IMPORT",
        "files and modules, with commas between them",
        "none",
        "Python code that the command line runs first, such as definitions of custom ops. Name your own only.",
    ),
    Variable("RLX_API_KEY", "a key", "none", "A key that clients of the server must send, beside those of --api-key."),
    Variable(
        "RLX_DEBUG",
        "0 .. 7",
        "0",
        "Shown on stderr, each level with those before it: 1 the compile cache and tracebacks of errors, 2 times of "
        "kernels, 3 passes, 4 sources of kernels, 5 IR after each pass, 6 LLVM modules, 7 assembly.",
    ),
)

_TABLE = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> str | None:
    """The value of a variable in the table; None where it is unset or empty."""
    return os.environ.get(_TABLE[name].name, "").strip() or None


def target() -> str | None:
    """RLX_TARGET: a level's name and changes to its features, checked where the target is made."""
    return get("RLX_TARGET")


def cache_policy() -> Policy:
    """RLX_CACHE: "on" where it is unset.

    Raises:
        ArgumentError: it is no policy.
    """
    return parse_policy((get("RLX_CACHE") or "on").lower(), "RLX_CACHE")


def parse_policy(text: str, where: str) -> Policy:
    """The policy that a text names.

    Raises:
        ArgumentError: it names none.
    """
    if text not in CACHE_POLICIES:
        hint = f"use one of {', '.join(CACHE_POLICIES)}"
        raise ArgumentError(f"{text!r} is no cache policy", where=where, hint=hint)
    return text


def cache_dir() -> Path | None:
    """RLX_CACHE_DIR, with `~` expanded; None where it is unset.

    Raises:
        ArgumentError: it begins with a `~` that has no meaning.
    """
    value = get("RLX_CACHE_DIR")
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError as error:
        raise ArgumentError(f"{value!r} names a home folder that is not there", where="RLX_CACHE_DIR") from error


def cache_limit() -> int:
    """RLX_CACHE_LIMIT in bytes; 2 GiB by default.

    Raises:
        ArgumentError: it is not a size above 0.
    """
    value = get("RLX_CACHE_LIMIT")
    return DEFAULT_CACHE_LIMIT if value is None else parse_size(value, "RLX_CACHE_LIMIT")


def parse_size(text: str, where: str) -> int:
    """'500M', '2G', '1.5 GiB' or plain bytes -> bytes; a unit is a power of 1024.

    Raises:
        ArgumentError: the text is not a size above 0, or one beyond all memories.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    size = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= size <= _MOST:
        reason = "is too large a size" if size > _MOST else "is not a size above 0"
        raise ArgumentError(f"{text!r} {reason}", where=where, hint="Write 500M or 2G")
    return int(size)


def size(nbytes: float) -> str:
    """A number of bytes for people: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def threads() -> int | None:
    """RLX_THREADS; None where it is unset.

    Raises:
        ArgumentError: it is not a number from 1 to 1024.
    """
    return _integer("RLX_THREADS", 1, 1024)


def compile_ahead() -> bool:
    """RLX_COMPILE_AHEAD: whether idle runners compile in the background; yes where it is unset.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    return _integer("RLX_COMPILE_AHEAD", 0, 1) != 0


def plain_platform() -> bool:
    """RLX_PLATFORM: whether only what every operating system has is used; no where it is unset.

    Raises:
        ArgumentError: it is neither native nor plain.
    """
    value = get("RLX_PLATFORM") or "native"
    if value not in ("native", "plain"):
        raise ArgumentError(f"{value!r} is no platform", where="RLX_PLATFORM", hint="use native or plain")
    return value == "plain"


def verify() -> bool:
    """RLX_VERIFY: whether every step is compared with the reference backend; no where it is unset.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    return bool(_integer("RLX_VERIFY", 0, 1))


def imports() -> list[str]:
    """RLX_IMPORT: files and modules of Python code that the command line imports first."""
    return [name.strip() for name in (get("RLX_IMPORT") or "").split(",") if name.strip()]


def jit() -> bool:
    """RLX_JIT: whether programs become machine code; yes where it is unset.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    return _integer("RLX_JIT", 0, 1) != 0


def dynamic_decode() -> bool:
    """RLX_GEMMA_DYNAMIC_DECODE: whether `with_inference_caches` decodes by one program for every past.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    return bool(_integer("RLX_GEMMA_DYNAMIC_DECODE", 0, 1))


def api_key() -> str | None:
    """RLX_API_KEY, as it is; None where it is unset."""
    return get("RLX_API_KEY")


def debug_level() -> int:
    """RLX_DEBUG: how much is shown, see `rlx.debug_output`; 0 where it is unset.

    Raises:
        ArgumentError: it is not a number from 0 to 7.
    """
    return _integer("RLX_DEBUG", 0, 7) or 0


def _integer(name: str, low: int, high: int) -> int | None:
    value = get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,6}", value) or not low <= int(value) <= high:
        raise ArgumentError(f"{value!r} is not a number from {low} to {high}", where=name)
    return int(value)
