"""Tests that run once more in a process of their own, as on another machine or another operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def passes(tests: Sequence[str], **variables: str) -> None:
    """Asserts that some tests pass with some environment variables."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
