"""The list of planted defects fits the sources: `python tests/plant_defects.py` shows that tests find them."""

from __future__ import annotations

from defects import DEFECTS
from plant_defects import problems
from targets import FILES, TESTS


def test_each_defect_has_its_place() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(set(names)) == len(names) >= 40
    assert problems() == [], "write the same defects for the changed texts in tests/defects.py"


def test_what_runs_at_lower_levels_is_there() -> None:
    assert [name for name in FILES if not (TESTS / name).exists()] == []
