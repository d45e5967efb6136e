"""Runs the kernel tests as an aarch64 machine: every kernel is compiled for it and called under qemu-user.

    python tools/emulate.py [arguments of pytest]

It needs clang and lld. Without `qemu-aarch64` or `qemu-aarch64-static` in PATH it downloads Debian's package
`qemu-user-static` with apt-get into a folder of its own, and unpacks it there. It takes about twenty minutes on two
cores. Tests of what only the machine itself has are left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = Path.home() / ".cache" / "rlx-emulator"
NAMES = ("qemu-aarch64", "qemu-aarch64-static")
TESTS = "tests/backends/cpu"
# What these test is no kernel: this machine's features, timings, threads, files, the loading of objects.
HERE = ("test_target", "test_tuning", "test_work_stealing", "test_templates", "test_llvm", "test_layouts")


def emulator() -> str:
    """The path of qemu-user for aarch64."""
    unpacked = FOLDER / "root/usr/bin/qemu-aarch64-static"
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and not unpacked.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "qemu-user-static"], cwd=FOLDER, check=True)
        (package,) = FOLDER.glob("qemu-user-static_*.deb")
        subprocess.run(["dpkg-deb", "-x", package, FOLDER / "root"], check=True)
        package.unlink()
    return found or str(unpacked)


def main(arguments: list[str]) -> int:
    """Runs pytest; returns its exit code."""
    missing = [tool for tool in ("clang", "ld.lld") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not found: install clang and lld")
    left_out = [f"--ignore={TESTS}/{name}.py" for name in HERE]
    command = [sys.executable, "-m", "pytest", TESTS, *left_out, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "RLX_TEST_EMULATOR": emulator()}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
