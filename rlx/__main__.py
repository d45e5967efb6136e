"""The `rlx` command, and `python -m rlx`: an interrupt ends it quietly with exit code 130, from its first moment on.

Nothing is imported before the handler is set: what is imported later may take a second on a cold disk.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """The entry point: runs the command line, exits with its code, or with 130 after an interrupt."""
    leave_quietly()
    from rlx.cli.main import main as run

    run(leave_quietly)


def leave_quietly() -> None:
    """From here on an interrupt ends the process at once: there is nothing to clean up yet, or nothing any more."""
    import _signal as signal  # type: ignore[import-not-found]  # the part of `signal` that is in the interpreter: nothing is read for it

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    import sys

    # What `os` wraps: built in as well. Windows has another one.
    __import__("posix" if "posix" in sys.builtin_module_names else "nt")._exit(130)


if __name__ == "__main__":
    main()
