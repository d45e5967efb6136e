"""Positions of a cache in the memory of states, wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.backends.cpu.layouts import LAYOUTS
from rlx.backends.host import HOST
from rlx.compiler.kv import extents_of
from rlx.compiler.state_memory import StateMemory
from rlx.ir.graph import Graph

Array = np.ndarray[Any, Any]


def states_of(graph: Graph) -> StateMemory:
    """Room for 512 positions, and rings of 64."""
    return StateMemory(graph, HOST, LAYOUTS, extents_of(graph, LAYOUTS, 512, 16, 64))


def positions(states: StateMemory, name: str, start: int, stop: int) -> Array:
    """Positions start .. stop: [heads, stop - start, width]."""
    return states.read(name, _pages(states, name, start, stop), 0, start, stop)


def put_positions(states: StateMemory, name: str, start: int, values: Array) -> None:
    """The inverse of `positions`."""
    states.write(name, _pages(states, name, start, start + values.shape[1]), 0, start, values)


def _pages(states: StateMemory, name: str, start: int, stop: int) -> Array:
    count = states.table[name].shape[1] // states.page
    return np.arange(start // states.page, -(-stop // states.page)) % count
