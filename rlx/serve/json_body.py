"""The JSON of a request body: what it may become in memory is bounded before it is parsed.

Server stage, under `http.py`. Nothing here waits or knows HTTP; large bodies are read in a worker thread.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np

from rlx.serve.errors import ApiError, invalid

MAX_DEPTH = 200  # of nested arrays and objects
MAX_VALUES = 1 << 19  # values and names of a body; parsed, they take 20 to 200 bytes each
VALUE_BYTES = 100  # what a value takes in memory
_MARKS = (b",", b":", b"[", b"{")  # one of them stands before each value and each name
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is something else, not in UTF-8, nested too deeply, or has too many values.
    """
    if not body.strip():
        raise invalid(None, "the body is empty", "send a JSON object")
    if not (encoding := json.detect_encoding(body)).startswith("utf-8"):  # `check_size` reads bytes of UTF-8
        raise invalid(None, f"the body is in {encoding}", "send JSON in UTF-8")
    check_size(body)
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body is a JSON {_NAMES[type(found)]}", "send a JSON object")
    return found


def count_of(body: bytes | bytearray) -> int:
    """How many values and names the JSON of a body has at most: an estimate in which texts may count, too."""
    return sum(map(body.count, _MARKS))


def check_size(body: bytes, what: str = "the body") -> None:
    """Refuses a body that would take far more memory, or deeper calls, than its length says.

    Texts do not count: code has many braces. A body is cut at its quotes only if it may be too large with them. Up to
    the first error of a malformed one everything is counted as the parser would read it, and there the parser stops.

    Args:
        what: what the message calls it.

    Raises:
        ApiError: it has too many values or levels.
    """
    many = count_of(body) > MAX_VALUES
    if not many and body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_VALUES:
        raise _too_many(what)
    outside = b"".join(bare.split(b'"')[::2])
    if many and count_of(outside) > MAX_VALUES:
        raise _too_many(what)
    steps = _STEPS[np.frombuffer(outside.translate(None, _NOT_BRACKETS), np.uint8)]
    if len(steps) and np.cumsum(steps, dtype=np.int64).max() > MAX_DEPTH:
        raise invalid(None, f"{what} is nested more than {MAX_DEPTH} levels deep")


def _too_many(what: str) -> ApiError:
    hint = "send it in several requests"
    return ApiError(413, f"{what} has more than {MAX_VALUES} values", code="body_too_large", hint=hint)


_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
