"""The machine code of a card as text (SASS), by NVIDIA's tools where they are installed: rlx does not bring them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rlx.errors import ArgumentError, CompileError

#: Packages that may have NVIDIA's tools, in a folder `bin`.
_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvcc", "nvidia.cuda_nvdisasm")

_MADE = "made"  # the file that a tool makes


def tool(name: str) -> str | None:
    """The path of a tool of NVIDIA's: of a package, or of a toolkit."""
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (found := Path(folder) / "bin" / name).exists():
                return str(found)
    return shutil.which(name)


def assembled(ptx: str) -> bytes:
    """Machine code of a module of PTX, where no driver makes it.

    Raises:
        ArgumentError: ptxas is not there.
        CompileError: it refuses the code.
    """
    level = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    return _run("ptxas", "nvidia-cuda-nvcc", ptx.encode(), f"-arch={level}", "-o", _MADE)


def disassembled(cubin: bytes) -> str:
    """Machine code as text.

    Raises:
        ArgumentError: nvdisasm is not there.
        CompileError: it refuses the code.
    """
    return _run("nvdisasm", "nvidia-cuda-nvdisasm", cubin, "-c").decode()


def _run(name: str, package: str, given: bytes, *options: str) -> bytes:
    """What a tool makes of a file, or prints of it."""
    found = tool(name)
    if found is None:
        hint = f"Install a CUDA toolkit, or `pip install {package}`; or look at --emit ptx."
        raise ArgumentError(f"NVIDIA's {name} is not there", where="--emit sass", hint=hint)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "code").write_bytes(given)
        run = subprocess.run([found, "code", *options], cwd=folder, capture_output=True, check=False)
        if run.returncode:
            refusal = run.stderr.decode(errors="replace").strip()
            raise CompileError(f"{name} refuses the code: {refusal}", where="--emit sass")
        made = Path(folder) / _MADE
        return made.read_bytes() if made.exists() else run.stdout
