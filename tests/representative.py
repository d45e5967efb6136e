"""A few of many cases: of every test those that show each value of each of its parameters.

What one `parametrize` lists counts as one parameter, whatever its names: a list that was written down, or two things
that are code of their own together. Products of several are not run but by `make test-all`. Of the cases that show
equally much, those are taken whose values were shown least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace

import pytest


def chosen(cases: Sequence[Sequence[object]]) -> list[int]:
    """The numbers of the cases that are enough, in order. A case: the values of a test's parameters."""
    if any(len(set(values)) == len(cases) for values in zip(*cases, strict=False)) or not cases[0]:
        return list(range(len(cases)))  # each shows something of its own
    shown = [set(enumerate(case)) for case in cases]
    left, found, often = set[object]().union(*shown), list[int](), Counter[object]()

    def rank(at: int) -> tuple[int, int, int]:
        return -len(shown[at] & left), sum(often[each] for each in shown[at]), at

    queue = [rank(at) for at in range(len(cases))]
    heapify(queue)
    while left:  # what a case shows only becomes less: where the first one's rank still holds, it is the best
        if (now := rank(queue[0][-1])) != queue[0]:
            heapreplace(queue, now)
            continue
        best = heappop(queue)[-1]
        found.append(best)
        left -= shown[best]
        often.update(shown[best])
    return sorted(found)


def split(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run and those that are left out, both in order."""
    tests = dict[tuple[object, ...], list[pytest.Item]]()
    for item in items:
        name = getattr(item, "originalname", item.name)
        tests.setdefault((item.path, getattr(item, "cls", None), name), []).append(item)
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for same in tests.values():
        enough = set(chosen([_values(item) for item in same]))
        for at, item in enumerate(same):
            (kept if at in enough else others).append(item)
    return kept, others


def _values(item: pytest.Item) -> list[object]:
    """The value of each parameter of a case."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return []
    left = {name: _identity(value) for name, value in item.callspec.params.items()}
    found = list[object]()
    for mark in item.iter_markers("parametrize"):
        listed = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in listed.split(",")] if isinstance(listed, str) else listed
        found.append(tuple(left.pop(name, None) for name in names))
    return [*found, *left.values()]  # those of fixtures


def _identity(value: object) -> object:
    """A stand-in for a value that is equal for equal values only: two objects may have the same `repr`."""
    try:
        hash(value)
    except TypeError:
        return id(value)  # each case of a product has the same object
    return type(value), value
