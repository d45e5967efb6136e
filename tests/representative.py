"""A few of many cases: with `--representative`, of every test those that show each value of each of its parameters.

Types of weights are shown at every level, because a level has code of its own for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import DType


def chosen(cases: Sequence[dict[str, Any]]) -> list[int]:
    """The numbers of the cases that are enough, in order. A case: the values of a test's parameters by name."""
    shown = [_shown(case) for case in cases]
    left, found = set[object]().union(*shown), list[int]()
    while left:
        best = max(range(len(cases)), key=lambda at: len(shown[at] & left))
        found.append(best)
        left -= shown[best]
    return sorted(found)


def _shown(case: dict[str, Any]) -> set[object]:
    """What a case shows: its values, and its level together with each type."""
    targets = [value for value in case.values() if isinstance(value, Target)]
    types = [(name, value) for name, value in case.items() if isinstance(value, DType)]
    return (
        {(name, repr(value)) for name, value in case.items()}
        | {(target, *pair) for target in targets for pair in types}
        | {"the test"}
    )


def split(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run and those that are left out, both in order."""
    tests = dict[tuple[object, str], list[pytest.Item]]()
    for item in items:
        tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for same in tests.values():
        enough = set(chosen([item.callspec.params if hasattr(item, "callspec") else {} for item in same]))
        for at, item in enumerate(same):
            (kept if at in enough else others).append(item)
    return kept, others
