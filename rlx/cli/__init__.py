"""The command line: the last stage, on top of the public API. `main` is the entry point of the `rlx` command."""

from typing import TYPE_CHECKING

from rlx.cli.main import main
from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.cli import drawing as drawing
    from rlx.cli import tail as tail

__all__ = ["main"]

# What only a terminal needs, imported when it is first used.
__getattr__ = modules_of(__name__, ("drawing", "tail"))
