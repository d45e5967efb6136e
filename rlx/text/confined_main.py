"""The main program of a confined process: read a request, let a program answer it, write the reply, until the end.

Text stage; `confined.py` starts it as `python -I -S confined_main.py`. It imports nothing of rlx, so that it starts
quickly. A message is a length (u64, little-endian) and that many bytes of JSON.

The first message holds the module search path and the program: a module with `prepare()`, which imports everything it
needs, and `handle(request) -> result`. Then the process drops its privileges: it can open no file or socket
(`RLIMIT_NOFILE` 0), start no process or thread (`RLIMIT_NPROC` 0, which the kernel ignores for root), and use a fixed
amount of memory (`RLIMIT_AS`). An empty message says that it is ready. A timer over CPU time kills the process if a
request takes too long. Where a system has no such limits, the parent watches the process.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_BYTES = 1 << 20  # of a request that add its CPU time once more: long texts may take longer
_OUT_OF_MEMORY = b'{"error": "it takes too much memory", "type": "MemoryError"}'


def main() -> NoReturn:
    hello, _ = _receive()
    sys.path[:] = hello["path"]
    handle = _load(hello["program"])
    if hello["limits"]:
        _give_up(hello["memory"] if hello["limits_memory"] else None, hello["stack"])
    _send(b"")  # ready
    while True:
        request, size = _receive()
        if hello["limits"]:
            _limit_time(hello["cpu_seconds"] * (1 + size / _BYTES))
        reply = _answer(handle, request)
        if hello["limits"]:
            _limit_time(0)
        _send(reply)


def _send(reply: bytes) -> None:
    sys.stdout.buffer.write(len(reply).to_bytes(8, "little") + reply)
    sys.stdout.buffer.flush()


def _receive() -> tuple[Any, int]:
    """A message and its bytes."""
    length = sys.stdin.buffer.read(8)
    if len(length) < 8:  # the parent is gone
        sys.exit()
    size = int.from_bytes(length, "little")
    return json.loads(sys.stdin.buffer.read(size)), size


def _load(program: str) -> Callable[[Any], Any]:
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare()
    handle: Callable[[Any], Any] = module.handle
    return handle


def _give_up(memory: int | None, stack: int | None) -> None:
    if sys.platform != "win32":  # there the parent asks for no limits
        import resource

        time.localtime()  # reads the time zone from a file
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
            resource.setrlimit(kind, (0, 0))
        if stack is not None:
            _, most = resource.getrlimit(resource.RLIMIT_STACK)
            resource.setrlimit(resource.RLIMIT_STACK, (stack, most))
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _limit_time(seconds: float) -> None:
    """SIGPROF ends the process after so much CPU time; 0 takes the limit back."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(handle: Callable[[Any], Any], request: Any) -> bytes:
    try:
        return json.dumps({"result": handle(request)}).encode()
    except MemoryError:
        return _OUT_OF_MEMORY
    except Exception as error:
        found = {"error": str(error), "type": type(error).__name__, "line": getattr(error, "lineno", None)}
        return json.dumps(found).encode()


if __name__ == "__main__":
    main()
