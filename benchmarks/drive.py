"""The sides of `versus.py` as seen from outside: processes that are told what to do, one JSON object a line.

What runs inside them is `sides.py`. Their environment is this process's own, CPU affinity included.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

HERE = Path(__file__).resolve().parent


class SideError(Exception):
    """A side answered with an error, or ended."""


class MissingSide(SideError):
    """A side's package is not installed, or it cannot use the file."""


class Process:
    """A side in a process of its own (`sides.py`); it blocks on its stdin between commands."""

    def __init__(self, name: str, python: str, script: str) -> None:
        self.name = name
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed in __exit__
        pipe, command = subprocess.PIPE, [python, str(HERE / script)]
        try:
            self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        except OSError as error:
            raise MissingSide(f"{name}: {python} cannot be run: {error}") from error

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One command and its answer."""
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            self.child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = ""
        return checked(self.name, do, line, self.errors)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.child.communicate()
        self.errors.close()


def checked(name: str, do: str, line: str, errors: IO[bytes]) -> dict[str, Any]:
    """An answer as a table.

    Raises:
        MissingSide: the side says that it cannot do this here.
        SideError: any other error, or no answer; with the end of what the process said.
    """
    if not line:
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-2000:]
        if "ModuleNotFoundError" in said:
            raise MissingSide(f"{name}: {said.strip().splitlines()[-1]}")
        raise SideError(f"{name} ended at {do!r}:\n{said}")
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise (MissingSide if found["missing"] else SideError)(f"{name}, {do}: {found['error']}")
    return found


def fresh(name: str, python: str, script: str, model: Path, numbers: Sequence[int], cache: str) -> dict[str, Any]:
    """A process that opens the model, computes a prompt, decodes and ends; see `sides.once`.

    Args:
        numbers: threads, context, tokens of the prompt, tokens decoded.
        cache: the folder of compiled programs.

    Returns:
        What the process says, and `seconds` from its start to its first token.
    """
    command = [python, str(HERE / script), "once", str(model), *map(str, numbers)]
    environment = {**os.environ, "RLX_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    with tempfile.TemporaryFile() as errors:
        start = time.time()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        found = checked(name, "once", done.stdout, errors)
    return {"seconds": found["end"] - start, **found}


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Another program that computes without pause on the same CPUs."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            time.sleep(0.1)  # the interpreter has started by then
            yield
        finally:
            child.kill()
