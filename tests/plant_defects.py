"""Plants the defects of `defects.py` in a copy of the tree, one at a time, and says which of them tests find.

`python tests/plant_defects.py [PART OF A NAME ...]` tries those whose names contain a part; without one, all. It ends
with status 1 if a defect is missed. `--check` only looks whether the texts that the defects replace are still there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from defects import DEFECTS, ROOT, Defect

_LEFT_OUT = (".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".pytest_cache", ".hypothesis")
_FAILED = (1, 2)  # pytest's exit status: tests failed, or could not be collected; others are troubles of its own


def problems(defects: Sequence[Defect] = DEFECTS) -> list[str]:
    """What must change in `defects.py` because the sources or the tests changed."""
    found = []
    for defect in defects:
        try:
            defect.place()
        except LookupError as error:
            found.append(str(error))
        gone = [name for name in defect.tests.split() if not (ROOT / name.partition("::")[0]).exists()]
        found += [f"{defect.name}: there is no {name}" for name in gone]
    return found


def is_found(defect: Defect, tree: Path) -> tuple[bool, str]:
    """Whether a test fails with the defect in a copy of the tree; and the first that does, or the last line."""
    place = defect.place(tree)
    before = place.read_text("utf-8")
    place.write_text(before.replace(defect.old, defect.new), "utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:randomly"]
        command += ["-o", f"cache_dir={ROOT / '.pytest_cache'}", *defect.tests.split()]
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True
        )
    finally:
        place.write_text(before, "utf-8")
    lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return done.returncode in _FAILED, failed


def main(arguments: Sequence[str]) -> int:
    parts = [each for each in arguments if each != "--check"]
    chosen = [each for each in DEFECTS if not parts or any(part in each.name for part in parts)]
    if found := problems(chosen):
        print(*found, sep="\n")
        return 1
    if "--check" in arguments:
        return 0
    missed = 0
    with tempfile.TemporaryDirectory(prefix="rlx-defects-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for defect in chosen:
            found_it, by = is_found(defect, tree)
            missed += not found_it
            print(f"{'found' if found_it else 'MISSED'}  {defect.name}\n        {by}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} defects found")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
