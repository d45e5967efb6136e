"""The command line: the last stage, on top of the public API. `main` is the entry point of the `rlx` command."""

from rlx.cli.main import main

__all__ = ["main"]
