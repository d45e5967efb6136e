"""The list of planted defects fits the sources: `python tests/plant_defects.py` shows that tests find them."""

from __future__ import annotations

from defects import DEFECTS
from plant_defects import problems


def test_each_defect_has_its_place() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(set(names)) == len(names) >= 40
    assert problems() == [], "write the same defects for the changed texts in tests/defects.py"
