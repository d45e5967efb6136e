"""Checks of numbers from the caller: threads, context length."""

from __future__ import annotations

import warnings
from typing import Any

from rlx import env
from rlx.arguments import whole
from rlx.passes.options import MAX_PAST
from rlx.platform import MAX_WORKERS, cpu_count, usable_cpus

MAX_PER_CPU = 8  # worker threads: enough for tests, few enough that the machine still makes progress


class ThreadsWarning(UserWarning):
    """More worker threads were asked for than there are CPUs."""


def worker_count(*choices: Any) -> int:
    """The first choice that is not None; else RLX_THREADS, else the physical cores this process may use.

    More workers than CPUs wait for each other: 1024 of them on two CPUs took 17 times as long. Above the number of CPUs
    there is a warning; the limit is `MAX_PER_CPU` per CPU.

    Raises:
        ArgumentError: it is not a whole number from 1 to 1024.
    """
    found = next((choice for choice in choices if choice is not None), None)
    if found is None and env.threads() is None:
        return cpu_count()
    chosen = env.threads() if found is None else whole("threads", found, 1, MAX_WORKERS)
    assert chosen is not None
    cpus = max(1, int(usable_cpus()))
    if chosen <= cpus:
        return chosen
    used = min(chosen, MAX_PER_CPU * cpus)
    few = f"this process may use {cpus} CPU{'s' * (cpus != 1)}"
    cut = f"; {used} are used" if used < chosen else ""
    what = f"{chosen} threads are slower than {cpu_count()}, because {few}{cut}"
    warnings.warn(what, ThreadsWarning, stacklevel=4)
    return used


def context_length(name: str, value: Any) -> int:
    """Checks a context length.

    Raises:
        ArgumentError: it is not a whole number from 1 to 2^20, the maximum that programs are compiled for.
    """
    return whole(name, value, 1, MAX_PAST)


class ContextWarning(UserWarning):
    """The context is longer than the one the model was trained with."""


def warn_beyond(trained: int, max_seq: int) -> None:
    """Warns if the context of `max_seq` tokens is longer than the model's own, rope scaling included."""
    if max_seq > trained:
        what = f"a context of {max_seq} tokens is longer than the model's {trained}: beyond them answers get worse"
        warnings.warn(what, ContextWarning, stacklevel=7)
