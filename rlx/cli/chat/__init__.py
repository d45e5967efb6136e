"""`rlx chat`: the command, the line editor, the slash commands, and what the terminal shows of an answer."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.cli.chat import editor, markdown

__all__ = ["editor", "markdown"]

# What only a terminal needs, imported when it is first used.
__getattr__ = modules_of(__name__, __all__)
