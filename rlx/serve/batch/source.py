"""The input of a batch: a file with a request a line, of which only an index is kept in memory.

Serve stage. The form is that of OpenAI's batch API: `{"custom_id": "a", "method": "POST", "url":
"/v1/chat/completions", "body": {...}}` (https://platform.openai.com/docs/guides/batch).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from rlx.closing import Closing
from rlx.errors import BatchError
from rlx.json_file import open_regular
from rlx.serve.errors import ApiError
from rlx.serve.http import check_size
from rlx.serve.prefixes import prefix_keys, prompt_text

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE = 64 << 20  # bytes
WINDOW = 1024  # requests that are sorted at once
WINDOW_BYTES = 64 << 20  # and how many bytes of them at most
ALONE = 0  # the group of a prompt that is too short to share a prefix

_FIELDS = ("custom_id", "method", "url", "body")


class LineProblem(Exception):
    """A mistake in a line of the input. It becomes a line of the output, and the others are answered.

    Args:
        code: what OpenAI's batch API calls it, where it has a name for it.
        what: a sentence.
        custom_id: that of the line, if it has one.
    """

    def __init__(self, code: str, what: str, custom_id: str | None = None) -> None:
        super().__init__(what)
        self.code, self.what, self.custom_id = code, what, custom_id


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input.

    Attributes:
        custom_id: how the caller calls it.
        url: the path that it is for, one of `URLS`.
        body: that of the HTTP request.
    """

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def answers(self) -> int:
        """How many answers the engine computes for it, as far as its body is valid: `n` of each of its prompts."""
        each = max([1, *(n for name in ("n", "best_of") if type(n := self.body.get(name)) is int)])
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and any(isinstance(one, list | str) for one in prompt)
        return each * len(prompt) if isinstance(prompt, list) and several else each

    @classmethod
    def parse(cls, line: bytes) -> BatchRequest:
        """A line of the input.

        Raises:
            LineProblem: it is no request.
        """
        if len(line) > MAX_LINE:
            raise LineProblem("line_too_long", f"the line has more than {MAX_LINE >> 20} MB")
        try:
            check_size(line, "the line")
            found = json.loads(line.decode("utf-8-sig"))
        except ApiError as error:
            raise LineProblem("invalid_json_line", error.what) from None
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise LineProblem("invalid_json_line", f"the line is no JSON: {reason}") from None
        if not isinstance(found, dict):
            raise LineProblem("invalid_json_line", f"the line is a {type(found).__name__}, expected an object")
        return cls._checked(found)

    @classmethod
    def _checked(cls, found: dict[str, Any]) -> BatchRequest:
        custom_id, method, url, body = (found.get(name) for name in _FIELDS)
        if not isinstance(custom_id, str) or not custom_id:
            raise LineProblem("missing_required_parameter", "`custom_id` is missing, or no text")
        if method != "POST":
            raise LineProblem("invalid_method", f"`method` is {method!r}, expected 'POST'", custom_id)
        if url not in URLS:
            raise LineProblem(
                "invalid_url", f"`url` is {str(url)[:80]!r}, expected one of {', '.join(URLS)}", custom_id
            )
        if not isinstance(body, dict):
            raise LineProblem("missing_required_parameter", "`body` is missing, or no object", custom_id)
        if body.get("stream"):
            raise LineProblem("invalid_request", "`body.stream` is true: an answer in a file is whole", custom_id)
        if unknown := sorted(set(found) - set(_FIELDS)):
            raise LineProblem("unknown_parameter", f"unknown field {unknown[0][:80]!r}", custom_id)
        return cls(custom_id, url, body)


class Source(Closing):
    """A file of requests. Of each line it keeps 24 bytes in memory: where it is, a digest, and a group.

    Requests are numbered from 0, in the order of their lines; empty lines do not count.

    Args:
        file: can be read and sought.
        salt: what else decides an answer, such as the name of the model: part of the digests.
        name: for messages.
        most: lines that it may have; None for no limit.

    Raises:
        BatchError: there is no request, or there are too many lines.
    """

    def __init__(self, file: BinaryIO, salt: str, name: str = "the input", most: int | None = None) -> None:
        self.name, self._most = name, most
        self._file, self._salt = file, blake2b(salt.encode("utf-8", "surrogatepass")).digest()
        self._starts, self._digests, self._groups = array("Q"), array("Q"), array("Q")
        self._again: set[int] = set()
        self._index()
        if not self._starts:
            hint = "give a JSON object a line, with custom_id, method, url and body"
            raise BatchError("there are no requests", where=name, hint=hint)

    @classmethod
    def open(cls, path: str, salt: str, most: int | None = None) -> Source:
        """The source in a file, or for `-` what stdin brings, which is kept in a temporary file.

        Raises:
            BatchError: it cannot be read, has no requests, or more than `most` lines.
        """
        if path == "-":
            kept = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  `close` closes it
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.seek(0)
            return cls(kept, salt, "stdin", most)
        with open_regular(Path(path), BatchError) as (_, _):
            pass
        return cls(Path(path).open("rb"), salt, path, most)

    def _index(self) -> None:
        """Reads the file once."""
        ids = array("Q")
        for start, line in self._lines():
            custom_id, group = _glance(line)
            self._starts.append(start)
            self._digests.append(_digest(line, self._salt))
            self._groups.append(group)
            ids.append(0 if custom_id is None else _digest(custom_id.encode("utf-8", "surrogatepass")))
        self._again = self._repeated(ids)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Where each line starts, and the line; of one that is too long, its begin."""
        self._file.seek(0)
        start = count = 0
        while line := self._file.readline(MAX_LINE + 1):
            count += 1
            if self._most is not None and count > self._most:
                hint = "make several batches"
                raise BatchError(f"there are more than {self._most} lines", where=self.name, hint=hint)
            if line.strip():
                yield start, line
            while not line.endswith(b"\n") and (rest := self._file.readline(MAX_LINE + 1)):
                line = rest
            start = self._file.tell()

    def _repeated(self, ids: array[int]) -> set[int]:
        """The lines whose custom_id an earlier line has."""
        digests = np.frombuffer(ids, np.uint64)
        order = np.argsort(digests, kind="stable")
        same = np.zeros(len(order), bool)
        same[1:] = (digests[order][1:] == digests[order][:-1]) & (digests[order][1:] != 0)
        suspects = order[same | np.append(same[1:], False)]
        seen: set[str] = set()
        found = set()
        for number in sorted(map(int, suspects)):  # equal digests are nearly always equal ids; nearly
            custom_id, _ = _glance(self.line(number))
            if custom_id in seen:
                found.add(number)
            elif custom_id is not None:
                seen.add(custom_id)
        return found

    def __len__(self) -> int:
        return len(self._starts)

    def digest(self, number: int) -> int:
        """A number that tells a line from any other, and from the same one for another model."""
        return self._digests[number]

    def line(self, number: int) -> bytes:
        """The bytes of a line; of one that is too long, its begin."""
        self._file.seek(self._starts[number])
        return self._file.readline(MAX_LINE + 1)

    def request(self, number: int) -> BatchRequest:
        """The request of a line.

        Raises:
            LineProblem: it is no request, or an earlier line has its custom_id.
        """
        found = BatchRequest.parse(self.line(number))
        if number in self._again:
            what = f"an earlier line has the custom_id {found.custom_id!r}, too"
            raise LineProblem("duplicate_custom_id", what, found.custom_id)
        return found

    def ordered(self, done: Sequence[int]) -> Iterator[int]:
        """The numbers of all lines that are not `done`, those with a common prefix one after the other.

        The groups are those of equal beginnings, in the order of their first lines. In a group, windows of some
        thousand lines are sorted by their whole prompts: no more than a window is in memory.

        Args:
            done: for each line whether it is to be left out.
        """
        rank = self._rank()
        for window in self._windows(np.argsort(rank, kind="stable"), done):
            texts = {number: _text(self.line(number)) for number in window}
            yield from sorted(window, key=lambda number: (rank[number], texts[number], number))

    def _rank(self) -> npt.NDArray[np.int64]:
        """For each line the first one of its group."""
        groups = np.frombuffer(self._groups, np.uint64)
        _, first, which = np.unique(groups, return_index=True, return_inverse=True)
        return np.where(groups == ALONE, np.arange(len(groups)), first[which])

    def _windows(self, order: npt.NDArray[np.int64], done: Sequence[int]) -> Iterator[list[int]]:
        window: list[int] = []
        size = 0
        for number in map(int, order):
            if done[number]:
                continue
            window.append(number)
            size += self._size(number)
            if len(window) >= WINDOW or size >= WINDOW_BYTES:
                yield window
                window, size = [], 0
        if window:
            yield window

    def _size(self, number: int) -> int:
        """About how many bytes a line has: to the start of the next one."""
        following = self._starts[number + 1] if number + 1 < len(self) else self._starts[number]
        return following - self._starts[number]

    def close(self) -> None:
        self._file.close()


def _glance(line: bytes) -> tuple[str | None, int]:
    """The custom_id of a line and its group, for the index; None and `ALONE` if it is no request."""
    try:
        request = BatchRequest.parse(line)
    except LineProblem as problem:
        return problem.custom_id, ALONE
    keys = prefix_keys(prompt_text(request.body))
    return request.custom_id, keys[0] if keys else ALONE


def _text(line: bytes) -> str:
    try:
        return prompt_text(BatchRequest.parse(line).body)
    except LineProblem:
        return ""


def _digest(data: bytes, salt: bytes = b"") -> int:
    """64 bits of a text, never 0."""
    return int.from_bytes(blake2b(data.rstrip(b"\r\n"), digest_size=8, key=salt[:64]).digest(), "big") or 1
