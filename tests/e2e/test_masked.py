"""The suite on other machines: a few tests that depend on features, run as a machine without them would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CHOSEN = [
    "tests/backends/cpu/test_expert_tiles.py::test_experts_in_a_program",
    "tests/backends/cpu/test_target.py::test_native_is_the_widest_level_of_this_machine",
    "tests/e2e/test_bf16.py::test_the_key_says_whether_rows_may_be_rounded",
]


def test_a_machine_without_dot_products() -> None:
    env = {**os.environ, "RLX_TARGET": "native-vnni-bf16"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CHOSEN]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
