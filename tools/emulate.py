"""Runs rlx and its tests on an aarch64 machine that qemu emulates, with the Python of Debian for arm64.

    python tools/emulate.py                         # kernels and whole programs on every CPU of `CPUS`: some hours
    python tools/emulate.py --cpu neoverse-n1       # on one
    python tools/emulate.py --kernels               # only kernels: some ten minutes a CPU
    python tools/emulate.py --programs -k gemma     # only whole programs
    python tools/emulate.py --cpu max --python -m rlx run "Hello"

Other arguments are those of pytest, or of Python. The first call downloads the emulator, Python and the wheels of the
dependencies (0.9 GB unpacked) into a folder under ~/.cache, or under XDG_CACHE_HOME, which can be removed at any time.
It needs apt-get, dpkg-deb, Debian's keys, clang and lld, but no root and nothing installed for arm64.

Kernels are compiled on this machine and called in the emulator, one by one (`tests/backends/cpu/foreign.py`). Whole
programs run in Python for arm64, which takes ten to thirty times as long as the machine itself. For their tests, LLVM
runs outside (`tests/outside_llvm.py`), and what it made is kept. A cold start of `rlx run` runs inside.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlx-aarch64"
SUITE, PYTHON = "trixie", "3.13"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("python3:arm64", "libstdc++6:arm64", "libgomp1:arm64", "qemu-user:amd64")
#: Tags of wheels that run with Debian's C library (2.41).
WHEELS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in (17, 24, 26, 27, 28, 31, 34, 35, 39)))

KERNELS = "tests/backends/cpu"
# What these test is no kernel of Arm: this machine's features, timings, threads, files, Numba's front end, tiles.
HERE = (
    "test_arm", "test_target", "test_tuning", "test_work_stealing", "test_templates", "test_llvm", "test_layouts",
    "test_memory_order", "test_isa", "test_loops", "test_linear_tiles", "test_expert_tiles",
)  # fmt: skip
#: Tests of whole programs, in Python for arm64: levels and their names, the worker loop, a checkpoint of each family,
#: towers, the engine.
PROGRAMS = (
    "tests/backends/cpu/test_target.py", "tests/runtime/test_threads.py", "tests/runners/test_native_goldens.py",
    "tests/vision/test_towers.py", "tests/e2e/test_engine.py",
)  # fmt: skip

#: qemu's CPUs, which differ in their features, and on each the level whose kernels are tested: every level once, on a
#: CPU that has no more than it if there is one. `max` has SVE of 2048 bits, which no code may touch.
CPUS = {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max,sve=off": "i8mm", "neoverse-v1": "bf16", "max": "bf16"}

# Python in the emulator, as a command. Python takes it for itself (-0), so that it can start further processes.
_COMMAND = f"""#!/bin/sh
exec {FOLDER}/host/usr/bin/qemu-aarch64 -L {FOLDER}/root -0 "$0" {FOLDER}/root/usr/bin/python{PYTHON} "$@"
"""


def apt(*arguments: str) -> None:
    """Runs apt-get on a state of its own, which knows nothing of this machine's packages."""
    own = FOLDER / "apt"
    if not own.exists():
        for name in ("lists/partial", "cache/archives/partial"):
            (own / name).mkdir(parents=True)
        (own / "status").touch()
        (own / "sources.list").write_text(f"deb [signed-by={KEYS}] http://deb.debian.org/debian {SUITE} main\n")
        options = {
            "Dir::State": own, "Dir::State::status": own / "status", "Dir::Cache": own / "cache",
            "Dir::Etc::sourcelist": own / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": "arm64", "APT::Install-Recommends": "false", "Debug::NoLocking": "true",
            "APT::Sandbox::User": "root",
        }  # fmt: skip
        lines = [f'{name} "{value}";' for name, value in options.items()] + [
            'APT::Architectures { "arm64"; "amd64"; };'
        ]
        (own / "apt.conf").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "APT_CONFIG": str(own / "apt.conf")}
    subprocess.run(["apt-get", "-qq", *arguments], env=environment, check=True)


def unpack() -> None:
    """The emulator in `host`, Python and its libraries in `root`."""
    apt("update")
    apt("install", "--yes", "--download-only", *PACKAGES)
    for package in sorted((FOLDER / "apt/cache/archives").glob("*.deb")):
        where = FOLDER / ("host" if package.name.endswith("_amd64.deb") else "root")
        where.mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "--extract", package, where], check=True)
        package.unlink()
    (FOLDER / "root/lib").symlink_to("usr/lib")  # the last step: it says that all others are done


def install() -> None:
    """The dependencies of rlx and of the tests that run here, in `site`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tests = [line for line in extras["test"] if line.startswith(("hypothesis", "pytest", "safetensors"))]
    platforms = [word for tag in WHEELS for word in ("--platform", tag)]
    partial = FOLDER / "site.partial"
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--quiet", "--target", str(partial), "--python-version", PYTHON, "--only-binary", ":all:"]
    needs = [*project["dependencies"], *extras["images"], *extras["structured"], *tests]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *platforms, *needs], check=True)
    partial.rename(FOLDER / "site")


def python(cpu: str, *arguments: str, stdout: IO[str] | None = None) -> int:
    """Runs the emulated Python on the tree beside this file. Returns its exit code."""
    if not (FOLDER / "root/lib").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unpack()
    if not (FOLDER / "site").exists():
        install()
    command = FOLDER / "python"
    command.write_text(_COMMAND)
    command.chmod(0o755)
    # What is compiled is kept apart from the cache of this machine, and the bytecode apart from the tree.
    environment = {
        "QEMU_CPU": cpu,
        "PYTHONHOME": str(FOLDER / "root/usr"),
        "PYTHONPATH": f"{FOLDER / 'site'}:{ROOT}",
        "PYTHONPYCACHEPREFIX": str(FOLDER / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",  # to compile all modules at each start takes half a minute
        "RLX_CACHE_DIR": os.environ.get("RLX_CACHE_DIR", str(FOLDER / "cache")),
    }
    ended = subprocess.run([command, *arguments], cwd=ROOT, stdout=stdout, env={**os.environ, **environment})
    return ended.returncode


def features(cpu: str) -> str:
    """What rlx finds on a CPU, as words with commas."""
    code = "from rlx import platform; print(*sorted(platform.current().arm_features()), sep=',')"
    with tempfile.TemporaryFile("w+") as out:
        if python(cpu, "-c", code, stdout=out):
            sys.exit(f"{cpu}: Python does not start")
        out.seek(0)
        return out.read().strip()


def kernels(cpu: str, arguments: Sequence[str]) -> int:
    """Runs the kernel tests at the level of the CPU: compiled here, called there.

    Args:
        arguments: of pytest; tests among them take the place of all.
    """
    if missing := [tool for tool in ("clang", "ld.lld") if shutil.which(tool) is None]:
        sys.exit(f"{' and '.join(missing)} not found: install clang and lld")
    environment = {
        "RLX_TEST_FEATURES": features(cpu),
        "RLX_TEST_EMULATOR": f"{FOLDER / 'host/usr/bin/qemu-aarch64'} -cpu {cpu}",
        "RLX_TEST_LEVEL": CPUS[cpu],
    }
    tests = [] if _names_tests(arguments) else [KERNELS, *(f"--ignore={KERNELS}/{name}.py" for name in HERE)]
    command = [sys.executable, "-m", "pytest", *tests, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


def programs(cpu: str, arguments: Sequence[str]) -> int:
    """A cold and a warm start of the demo model, unless tests are chosen; then the tests of whole programs."""
    run = ("-m", "rlx", "run", "Hello", "--max-tokens", "8")
    shutil.rmtree(FOLDER / "cache", ignore_errors=True)
    failed = not arguments and any([python(cpu, *run), python(cpu, *run)])
    tests = () if _names_tests(arguments) else PROGRAMS
    options = ("-m", "", "-o", f"cache_dir={FOLDER / 'pytest'}")
    sys.path.insert(0, str(ROOT / "tests"))
    import outside_llvm

    socket = FOLDER / "llvm.socket"
    os.environ[outside_llvm.ENV] = str(socket)
    with outside_llvm.serve(socket):
        return python(cpu, "-m", "pytest", *options, *tests, *arguments) or failed


def _names_tests(arguments: Sequence[str]) -> bool:
    return any(argument.startswith("tests/") for argument in arguments)


def main() -> int:
    """Runs what was asked for; returns an exit code that is not 0 if anything fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="append", choices=CPUS, help="a CPU of qemu; default: each of them")
    parser.add_argument("--programs", action="store_true", help="whole programs; alone: only these")
    parser.add_argument("--kernels", action="store_true", help="kernels; alone: only these")
    parser.add_argument("--python", action="store_true", help="run Python; all other arguments are its own")
    given, rest = parser.parse_known_args()
    failed = 0
    for cpu in given.cpu or CPUS:
        print(f"{cpu}:", flush=True)
        if given.python:
            failed |= python(cpu, *rest)
            continue
        if given.kernels or not given.programs:
            failed |= kernels(cpu, rest)
        if given.programs or not given.kernels:
            failed |= programs(cpu, rest)
    return failed


if __name__ == "__main__":
    sys.exit(main())
