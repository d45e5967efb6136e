"""Hints for a name that is not known: the nearest known one, or the list of all.

Every part may ask this module. `difflib` is imported at the first mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

CUTOFF = 0.6  # similarity from which on a name is suggested; 1 is equal


def nearest(name: object, known: Collection[str], most: int = 1, cutoff: float = CUTOFF) -> list[str]:
    """The known names that are spelled most like `name`, the nearest first; at most `most`."""
    from difflib import get_close_matches

    return get_close_matches(str(name), known, most, cutoff)


def did_you_mean(
    name: object,
    known: Collection[str],
    *,
    shown: Callable[[str], str] = repr,
    most: int = 1,
    cutoff: float = CUTOFF,
    otherwise: str | None = None,
) -> str:
    """The hint for an unknown name: "did you mean 'x'?", or "there is a, b" where no known name is near.

    Args:
        shown: how a suggested name is written.
        most: maximum number of suggestions.
        otherwise: the hint in place of the list of all known names.
    """
    found = nearest(name, known, most, cutoff)
    if found:
        return f"did you mean {' or '.join(map(shown, found))}?"
    return f"there is {', '.join(known)}" if otherwise is None else otherwise
