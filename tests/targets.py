"""The targets that the tests run for: this machine's best level, then those that other machines have.

`make test` runs the tests marked `machine` as a machine of each lower level, and then all tests at the best level. The
mark is that of tests in which a whole model is computed, and of those that depend on the level by themselves: of some
files, and of single tests. With `--all-cases`, as in `make test-all`, it is that of all tests in folders that depend on
kernels, packing or printed text; a file there that depends on nothing of this is marked `any_machine`. What names its
target itself is not repeated. `python tests/targets.py` prints the lower levels, `python tests/targets.py files` the
files with such tests.
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
FOLDERS = ("audio", "backends", "e2e", "passes", "runners", "runtime", "vision")
#: What of these runs at lower levels in every run of the tests: folders and files.
FILES = (
    "backends/test_verify.py", "e2e/test_same_bits.py", "runners/test_every_way.py", "runtime/test_whole_models.py",
    "vision/test_towers.py",
)  # fmt: skip
OTHERS = ("avx2", "generic")
_NAMES_ITS_TARGET = {"level", "target"}


def lower_levels() -> list[str]:
    """The levels that tests are repeated for: those below the one that they run at anyway."""
    levels = supported_levels()
    return [level for level in OTHERS if level in levels[: levels.index(Target.host().level)]]


def mark(items: Iterable[pytest.Item], *, every: bool) -> None:
    """Marks the tests that are repeated at lower levels, `every` one or some."""
    places = [TESTS / name for name in (FOLDERS if every else FILES)]
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
    """Folders and files that have tests marked `machine`, from the root of the repository."""
    marked = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.machine" in path.read_text("utf-8")]
    return sorted(str(path.relative_to(TESTS.parent)) for path in [*marked, *(TESTS / name for name in FILES)])


if __name__ == "__main__":
    print(*(files() if "files" in sys.argv else lower_levels()))
