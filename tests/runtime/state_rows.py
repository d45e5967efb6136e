"""Positions of a cache in the memory of states, wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.compiler.state_memory import StateMemory

Array = np.ndarray[Any, Any]


def positions(states: StateMemory, name: str, start: int, stop: int) -> Array:
    """Positions start .. stop: [heads, stop - start, width]."""
    return states.read(name, _pages(states, name, start, stop), 0, start, stop)


def _pages(states: StateMemory, name: str, start: int, stop: int) -> Array:
    count = states.table[name].shape[1] // states.page
    return np.arange(start // states.page, -(-stop // states.page)) % count
