"""Object code, checked and loaded into this process.

CPU backend, under native programs and the worker loop. Object code comes from the compile cache, whose folder machines
of different kinds may share. Its header is checked before it is loaded: code of another architecture would end the
process at its first instruction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import llvmlite.binding as llvm

from rlx import platform
from rlx.backends.cpu.levels import architecture
from rlx.errors import CompileError, ForeignCodeError

_names = itertools.count()

_ELF_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64", 21: "ppc64le", 22: "s390x"}
_MACHO_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_COFF_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}


class NativeCode:
    """Object code loaded into this process. The code is freed with this object.

    Args:
        objects: object files, which may call each other.
        symbols: functions that Python calls.
        what: what it is, for messages.
        imports: addresses of functions that the objects call, beside those of this process.

    Attributes:
        addresses: of the symbols.

    Raises:
        ForeignCodeError: an object is for another kind of machine or system, or no object code.
        CompileError: the objects do not load.
    """

    def __init__(
        self,
        objects: Iterable[bytes],
        symbols: Sequence[str],
        what: str = "object code",
        imports: Mapping[str, int] | None = None,
    ) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        triple = platform.current().triple(llvm.get_process_triple())
        expected, form = architecture(triple).name, format_of_system(triple)
        builder = llvm.JITLibraryBuilder().add_current_process()
        for code in objects:
            check(code, expected, form)
            builder.add_object_img(code)
        for name in symbols:
            builder.export_symbol(name)
        for name, address in (imports or {}).items():
            builder.import_symbol(name, address)
        # JITLink places an object's sections side by side. LLVM's older loader may map them more than 2 GiB apart when
        # a model fills the address space, and then aborts the process.
        self._jit = llvm.create_lljit_compiler(use_jit_link=platform.current().jit_link)
        try:
            self._tracker = builder.link(self._jit, f"rlx{next(_names)}")
        except RuntimeError as error:
            hint = "Raise the limit of memory, if this process has one"
            raise CompileError(f"{what} does not load: {error}", hint=hint) from error
        self.addresses = {name: int(self._tracker[name]) for name in symbols}


def check(code: bytes, expected: str, form: str) -> None:
    """Checks the header of an object file: ELF, Mach-O or COFF.

    Args:
        expected: the architecture, as in LLVM triples.
        form: the format that this system loads.

    Raises:
        ForeignCodeError: it is for another kind of machine or system, or no object file.
    """
    found = machine_of(code)
    if found != expected:
        what = f"it holds code for {found}" if found else "it holds no object code"
        raise ForeignCodeError(f"{what}, this machine is {expected}")
    if (other := _format_of(code)) != form:
        raise ForeignCodeError(f"it holds a file of the format {other}, this system loads {form}")


def format_of_system(triple: str) -> str:
    """The format of object files for an LLVM triple."""
    if any(name in triple for name in ("darwin", "macos")):
        return "Mach-O"
    return "COFF" if "windows" in triple and not triple.endswith("-elf") else "ELF"


def _format_of(code: bytes) -> str:
    return {b"\x7fELF": "ELF", b"\xcf\xfa\xed\xfe": "Mach-O"}.get(code[:4], "COFF")


def machine_of(code: bytes) -> str | None:
    """The architecture that an object file says it is for, such as "aarch64"; None if it is no object file.

    ELF: class at byte 4, byte order at 5, e_machine at 18. Mach-O: magic, then cputype. COFF: the machine comes first.
    """
    if code[:4] == b"\x7fELF":
        if len(code) < 64 or code[4] not in (1, 2) or code[5] not in (1, 2):
            return None
        order = "little" if code[5] == 1 else "big"
        number = int.from_bytes(code[18:20], "little" if code[5] == 1 else "big")
        name = _ELF_MACHINES.get(number, f"ELF machine {number}")
        is_usual = code[4] == 2 and (order == "little") == (name != "s390x")
        return name if is_usual else f"{name} of {32 * code[4]} bits, {order}-endian"
    if code[:4] == b"\xcf\xfa\xed\xfe":
        number = int.from_bytes(code[4:8], "little")
        return _MACHO_MACHINES.get(number, f"Mach-O CPU {number:#x}")
    return _COFF_MACHINES.get(int.from_bytes(code[:2], "little")) if len(code) >= 20 else None
