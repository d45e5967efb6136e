"""The machine code of a card as text (SASS), by NVIDIA's disassembler where it is installed: rlx does not bring it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from rlx.errors import ArgumentError, CompileError

#: Packages that may have NVIDIA's tools, in a folder `bin`.
_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvcc", "nvidia.cuda_nvdisasm")


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


def disassembled(cubin: bytes) -> str:
    """Machine code as text.

    Raises:
        ArgumentError: the disassembler is not there.
        CompileError: it refuses the code.
    """
    found = tool("nvdisasm")
    if found is None:
        hint = "Install a CUDA toolkit, or look at --emit ptx."
        raise ArgumentError("NVIDIA's disassembler (nvdisasm) is not there", where="--emit sass", hint=hint)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code.cubin"
        file.write_bytes(cubin)
        run = subprocess.run([found, "-c", str(file)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise CompileError(f"nvdisasm refuses the code: {run.stderr.strip()}", where="--emit sass")
    return run.stdout
