"""The targets that the tests run for: this machine's best level, then those that other machines have.

`make test` runs the tests marked `machine` as a machine of each lower level, and then all tests at the best level. The
mark is that of the tests in some files, in which whole models are computed. With `--all-cases`, as in `make test-all`,
it is that of all tests in folders and files that depend on kernels, packing or printed text. What depends on nothing of
this there is marked `any_machine`. What names its target itself is not repeated. `python tests/targets.py` prints the
lower levels, `python tests/targets.py files` the files with such tests.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from rlx.backends.cpu.target import Target, supported_levels

TESTS = Path(__file__).parent
PLACES = (
    "backends", "e2e", "passes", "runners", "runtime", "vision",
    "cli/test_structured_cli.py", "test_doc_blocks.py", "test_docs.py", "test_notebook.py", "test_recipes.py",
)  # fmt: skip
#: What of these runs at lower levels in every run of the tests.
FILES = (
    "backends/test_verify.py", "e2e/test_same_bits.py", "runners/test_every_way.py", "vision/test_towers.py",
)  # fmt: skip
OTHERS = ("avx2", "generic")
_NAMES_ITS_TARGET = {"level", "target"}


def lower_levels() -> list[str]:
    """The levels that tests are repeated for: those below the one that they run at anyway."""
    levels = supported_levels()
    return [level for level in OTHERS if level in levels[: levels.index(Target.host().level)]]


def mark(items: Iterable[pytest.Item], *, every: bool) -> None:
    """Marks the tests that are repeated at lower levels, `every` one or some."""
    places = [TESTS / name for name in (PLACES if every else FILES)]
    is_there = cache(lambda path: any(path.is_relative_to(place) for place in places))
    for item in items:
        depends = is_there(item.path) and item.get_closest_marker("any_machine") is None
        if depends and not _names_its_target(item):
            item.add_marker("machine")


def _names_its_target(item: pytest.Item) -> bool:
    values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return bool(_NAMES_ITS_TARGET & values.keys()) or any(isinstance(value, Target) for value in values.values())


def summary(nodeids: Iterable[str]) -> str:
    """Which cases ran: their number by folder or file."""
    counts = Counter(nodeid.removeprefix("tests/").split("::")[0].split("/")[0] for nodeid in nodeids)
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"target {Target.host().level}: {counts.total()} cases ran ({parts})"


def files() -> list[str]:
    """The files that run at lower levels in every run, from the root of the repository."""
    return [str((TESTS / name).relative_to(TESTS.parent)) for name in FILES]


if __name__ == "__main__":
    print(*(files() if "files" in sys.argv else lower_levels()))
