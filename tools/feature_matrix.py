"""Runs the kernel tests for every combination of CPU features that exists in the wild, as far as this machine has them.

    python tools/feature_matrix.py [--list] [arguments of pytest]

A combination is the name of a target, which masks the features that its processors lack. One that this machine cannot
execute is listed as such. Each takes about as long as `pytest tests/backends/cpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlx.backends.cpu.target import Target
from rlx.errors import TargetError

ROOT = Path(__file__).parent.parent
TESTS = "tests/backends/cpu"

#: Target -> processors that have exactly its features, of those that rlx uses. The names are for people only.
COMBINATIONS = {
    "generic": "x86-64 without AVX2",
    "avx2-vnni": "Haswell to Comet Lake, Zen 1 to 3",
    "avx2+avxvnni": "Alder Lake to Lunar Lake",
    "avx512-vnni-bf16-vbmi-fp16": "Skylake-SP",
    "avx512+avx512vnni-bf16-vbmi-fp16-avxvnni": "Cascade Lake",
    "avx512+avx512vnni+bf16-vbmi-fp16-avxvnni": "Cooper Lake",
    "avx512+avx512vnni+vbmi-bf16-fp16-avxvnni": "Ice Lake, Tiger Lake, Rocket Lake",
    "avx512+avx512vnni+vbmi+bf16-fp16-avxvnni": "Zen 4",
    "avx512+vnni+avxvnni+vbmi+bf16-fp16": "Zen 5",
    "amx": "Sapphire Rapids and later Xeons",
    "neon": "aarch64 without dot products: Cortex-A72, Raspberry Pi 4",
    "dotprod": "Cortex-A76, Raspberry Pi 5, Neoverse N1, Apple M1",
    "bf16": "Neoverse V1 and later, Apple M2 and later",
}


def lacking(name: str) -> str | None:
    """Why this machine cannot execute the code of a target; None if it can."""
    try:
        Target.host(name)
    except TargetError as error:
        return error.what
    return None


def main(arguments: list[str]) -> int:
    """Runs pytest once for each combination; returns the number of those that failed."""
    failed = 0
    for name, processors in COMBINATIONS.items():
        reason = lacking(name)
        print(f"{name}  ({processors}): {reason or 'runs here'}", flush=True)
        if reason is None and "--list" not in arguments:
            command = [sys.executable, "-m", "pytest", TESTS, *arguments]
            failed += subprocess.run(command, cwd=ROOT, env={**os.environ, "RLX_TARGET": name}).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
