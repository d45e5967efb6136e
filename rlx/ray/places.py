"""How many processes with a model there are, and what each of them gets.

Ray stage, below deployments, datasets and batches. Nothing here imports Ray.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rlx.compiler.limits import worker_count
from rlx.errors import ArgumentError


def at_least_one(name: str, value: Any) -> int:
    """`value`; `ArgumentError` unless it is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number of at least 1")
    return value


def range_of(replicas: int | tuple[int, int], least: int = 0) -> tuple[int, int]:
    """The least and the largest number of processes.

    Raises:
        ArgumentError: they are no whole numbers in this order.
    """
    if isinstance(replicas, int):
        return at_least_one("replicas", replicas), replicas
    with suppress(TypeError, ValueError):  # not two of them, or no numbers
        low, high = replicas
        if least <= low <= high and high >= 1:
            return int(low), int(high)
    hint = "give a number, or (least, most) such as (1, 4)"
    raise ArgumentError(f"replicas is {replicas!r}", hint=hint)


def cpus_of(num_cpus: int | None) -> int:
    """The cores of a process, which are its threads.

    Args:
        num_cpus: as the caller gave it; None takes the threads that a model has on this machine.

    Raises:
        ArgumentError: it is no whole number from 1 on.
    """
    return worker_count(None) if num_cpus is None else at_least_one("num_cpus", num_cpus)


def path_on_nodes(model: str | os.PathLike[str]) -> str:
    """The name of a model in another process: an absolute path, or the name of a downloaded or embedded model."""
    return os.path.abspath(model) if os.path.exists(model) else os.fspath(model)
