"""Estimates what the kernels of linear layers cost on Arm processors, beside those of llama.cpp. Needs no Arm machine.

    python benchmarks/arm_cost.py --llama-cpp FOLDER            # FOLDER holds ggml/src/ggml-cpu/arch/arm
    python benchmarks/arm_cost.py --llama-cpp FOLDER --cpu neoverse-v1 --format Q4_K

Each kernel is linked into a program and runs in qemu, which writes down every instruction. Two calls that differ in the
number of weights give the instructions for a byte of weight in the file's format, without what happens once a call.
Memory is set to zeros by 64 bytes a step, as by C libraries. llvm-mca then estimates cycles of the same instructions
from LLVM's model of a processor, as if all data were in the first-level cache. For llama.cpp the cheapest of its
functions for a format counts. Quantizing the activations is left out on both sides.

It needs clang, lld, llvm-mca, llvm-objdump and llvm-nm (--llvm 19 takes clang-19 and so on), the headers of
libc6-dev-arm64-cross and libstdc++-12-dev-arm64-cross, and the emulator that tools/emulate.py downloads.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite.binding as binding

from rlx.backends.cpu import llvm
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.levels import AARCH64, feature_string
from rlx.backends.cpu.target import Target
from rlx.ir import dtypes

TRIPLE = "aarch64-unknown-linux-gnu"
#: Processor as LLVM names it -> level of rlx.
CPUS = {"neoverse-n1": "dotprod", "neoverse-v1": "bf16", "neoverse-v2": "bf16", "apple-m1": "dotprod"}
FORMATS = ("Q8_0", "Q4_K", "Q6_K", "BF16")
#: Bytes of a register of SVE, where code for the processor uses it.
SVE = {"neoverse-v1": 32, "neoverse-v2": 16}
#: Inputs; weight rows of the smaller call; rows of a prompt.
K, WIDTH, ROWS = 2048, 16, 48
_QEMU = Path.home() / ".cache/rlx-aarch64/host/usr/bin/qemu-aarch64"
_HEADERS = ("include/c++/12", "include/c++/12/aarch64-linux-gnu", "include")
_GEMM = "int, float *, size_t, const void *, const void *, int, int"
_DOT = "int, float *, size_t, const void *, size_t, const void *, size_t, int"

_PROGRAM = """
typedef unsigned long size_t;
#ifdef __cplusplus
extern "C" {
#endif
typedef char Vector __attribute__((vector_size(64), aligned(1)));
void *memset(void *to, int value, size_t n) {
  char *p = to;
  for (; n >= 64; n -= 64, p += 64) *(volatile Vector *)p = (Vector){} + (char)value;
  while (n--) *(volatile char *)p++ = value;
  return to;
}
int ggml_cpu_get_sve_cnt(void) { return SVE; }
void FUNCTION(TYPES);
static char x[1 << 22] __attribute__((aligned(64))), w[1 << 22] __attribute__((aligned(64)));
static char out[1 << 22] __attribute__((aligned(64)));
void start(void) {
  FUNCTION(ARGUMENTS);
  register long number asm("x8") = 94, code asm("x0") = 0;
  asm volatile("svc #0" : : "r"(number), "r"(code));
}
__attribute__((naked)) void _start(void) { asm("mov x29, #0\\n b start"); }
"""


@dataclass(frozen=True)
class Tools:
    """The programs, by the version of LLVM, and the source of llama.cpp."""

    llvm: str
    source: Path

    def name(self, tool: str) -> str:
        return f"{tool}{self.llvm and '-' + self.llvm}"

    def output(self, tool: str, *arguments: object) -> str:
        return subprocess.run(
            [self.name(tool), *map(str, arguments)], check=True, capture_output=True, text=True
        ).stdout


@dataclass(frozen=True)
class Call:
    """A call of a kernel: its object file, name, parameter types, and arguments.

    Attributes:
        nbytes: bytes of weights in the file's format, times the rows that multiply them.
    """

    code: Path
    name: str
    types: str
    arguments: str
    nbytes: int


@dataclass(frozen=True)
class Cost:
    """Instructions and estimated cycles for a byte of weight in the file's format and a row of activations."""

    instructions: float
    cycles: float


def our_calls(dtype: dtypes.DType, cpu: str, rows: int, folder: Path) -> list[Call]:
    """The kernel of rlx for one and for two blocks of 16 weight rows."""
    level = next(each for each in AARCH64.levels if each.name == CPUS[cpu])
    target = Target(level.name, TRIPLE, level.cpu, feature_string(level, level.usable))
    act = "q8a" if dtype.has_integer_codes else "bf16" if target.has_bf16_dots and rows > 1 else "f32"
    kernel = linear(dtype, 2 * WIDTH, K, act, target, single=rows == 1)
    code = folder / f"{kernel.symbol}.o"
    code.write_bytes(llvm.compile_module(kernel.llvm, target).code)
    calls = []
    for blocks in (1, 2):
        numbers = [2 * WIDTH, 0, blocks] if rows == 1 else [rows, 2 * WIDTH, 0, blocks]
        types = ", ".join(["void *"] * 3 + ["long"] * len(numbers))
        arguments = ", ".join(["x", "w", "out", *map(str, numbers)])
        calls.append(Call(code, kernel.symbol, types, arguments, blocks * WIDTH * rows * dtype.row_bytes(K)))
    return calls


def peer_calls(name: str, cpu: str, rows: int, tools: Tools, folder: Path) -> Iterator[list[Call]]:
    """Two calls of each of llama.cpp's functions for a format: over repacked weights, and over those of the file."""
    dtype = getattr(dtypes, name)
    if name == "BF16":
        yield _dot_calls("ggml_vec_dot_bf16", _compiled(tools, "vec.cpp", cpu, folder), 1, dtype)
        return
    has_products = CPUS[cpu] in ("i8mm", "bf16")
    block, width = ("q8_K", 8) if name.endswith("_K") else ("q8_0", 4)
    form, kind = name.lower().replace("_k", "_K"), "gemv" if rows == 1 else "gemm"
    function = f"ggml_{kind}_{form}_{width}x{8 if has_products else 4}_{block}"
    code = _compiled(tools, "arch/arm/repack.cpp", cpu, folder)
    yield [
        Call(code, function, _GEMM, f"{K}, (float *)out, {n}, w, x, {rows}, {n}", n * rows * dtype.row_bytes(K))
        for n in (WIDTH, 2 * WIDTH)
    ]
    together = 2 if rows > 1 and has_products else 1
    yield _dot_calls(
        f"ggml_vec_dot_{form}_{block}", _compiled(tools, "arch/arm/quants.c", cpu, folder), together, dtype
    )


def _dot_calls(function: str, code: Path, together: int, dtype: dtypes.DType) -> list[Call]:
    """Dot products of `together` rows with as many, of two lengths."""
    arguments = "{k}, (float *)out, 64, w, 1 << 16, x, 1 << 16, {n}"
    return [
        Call(code, function, _DOT, arguments.format(k=k, n=together), together**2 * dtype.row_bytes(k))
        for k in (K, 2 * K)
    ]


@cache
def _compiled(tools: Tools, file: str, cpu: str, folder: Path) -> Path:
    """The object file of a source file of llama.cpp, compiled for a processor."""
    base = tools.source / "ggml"
    made = folder / f"{Path(file).stem}-{cpu}.o"
    includes = [f"-I{base / part}" for part in ("include", "src", "src/ggml-cpu")]
    system = [word for part in _HEADERS for word in ("-isystem", f"/usr/aarch64-linux-gnu/{part}")]
    options = ["--target=aarch64-linux-gnu", f"-mcpu={cpu}", "-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-w", "-c"]
    compiler = "clang++" if file.endswith("cpp") else "clang"
    tools.output(compiler, *options, *includes, *system, base / "src/ggml-cpu" / file, "-o", made)
    return made


def cost(calls: Sequence[Call], cpu: str, tools: Tools, folder: Path) -> Cost | None:
    """The difference of two calls, for a byte of weight and a row; None if the function does nothing on this CPU."""
    short, long = (_executed(call, cpu, tools, folder) for call in calls)
    nbytes = calls[1].nbytes - calls[0].nbytes
    if len(long) == len(short):
        return None
    return Cost((len(long) - len(short)) / nbytes, (_cycles(long, cpu, tools) - _cycles(short, cpu, tools)) / nbytes)


def _executed(call: Call, cpu: str, tools: Tools, folder: Path) -> list[str]:
    """The instructions of a call in the order of their execution, as assembler text."""
    text = _PROGRAM.replace("FUNCTION", call.name).replace("TYPES", call.types).replace("ARGUMENTS", call.arguments)
    text = text.replace("SVE;", f"{SVE.get(cpu, 0)};")
    source, program, log = folder / "program.c", folder / "program", folder / "trace"
    source.write_text(text)
    flags = "--target=aarch64-linux-gnu -O1 -w -fno-builtin -ffreestanding -nostdlib -static -fuse-ld=lld".split()
    loose = "-Wl,--unresolved-symbols=ignore-all"
    tools.output("clang", *flags, loose, source, call.code, "-o", program)
    listing = tools.output("llvm-objdump", "-d", "--no-show-raw-insn", program)
    known = {int(at, 16): line for at, line in re.findall(r"^\s*([0-9a-f]+):\s+(\S.*)$", listing, re.MULTILINE)}
    log.unlink(missing_ok=True)
    options = [
        "-cpu",
        f"max,sve-default-vector-length={SVE.get(cpu, 16)}",
        "-one-insn-per-tb",
        "-d",
        "exec,nochain",
        "-D",
        log,
    ]
    subprocess.run([_QEMU, *options, program], check=True)
    places = re.findall(r"\[[0-9a-f]+/([0-9a-f]+)/", log.read_text())
    return [known[int(at, 16)] for at in places]


def _cycles(lines: Sequence[str], cpu: str, tools: Tools) -> int:
    """Cycles of llvm-mca's model for a sequence of instructions."""
    text = "place:\n" + "\n".join(map(_relative, lines)) + "\n"
    arguments = [
        "-mtriple=aarch64-linux-gnu",
        f"-mcpu={cpu}",
        "-mattr=+sve,+i8mm,+bf16,+dotprod,+fullfp16",
        "-iterations=1",
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write(text)
        file.flush()
        found = tools.output("llvm-mca", *arguments, "-instruction-info=false", "-resource-pressure=false", file.name)
    match = re.search(r"Total Cycles:\s+(\d+)", found)
    assert match
    return int(match[1])


def _relative(line: str) -> str:
    """A disassembled instruction as the assembler takes it: places in the program become a label."""
    line = line.split("//")[0].strip()
    if re.match(r"(b|bl|cbn?z|tbn?z|b\.\w+|adrp?)\s", line):
        line = re.sub(r"0x[0-9a-f]+( <.*>)?$", "place", line)
    return "b place" if line.startswith(("bl ", "bl\t")) else line


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder with llama.cpp's source")
    parser.add_argument("--cpu", action="append", choices=CPUS, help="default: all")
    parser.add_argument("--format", action="append", choices=FORMATS, help="default: all")
    parser.add_argument("--rows", action="append", type=int, choices=(1, ROWS), help="1 is decode; default: both")
    parser.add_argument("--llvm", default="", help="version in the names of LLVM's programs, such as 19")
    given = parser.parse_args()
    tools = Tools(given.llvm, given.llama_cpp)
    if not _QEMU.exists():
        sys.exit(f"{_QEMU} not found: run python tools/emulate.py --python --version")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    print(
        "| processor | weights | rows | instructions a byte | llama.cpp | ratio | cycles a byte | llama.cpp | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for cpu in given.cpu or CPUS:
            for name in given.format or FORMATS:
                for rows in given.rows or (1, ROWS):
                    print(_row(cpu, name, rows, tools, folder), flush=True)


def _row(cpu: str, name: str, rows: int, tools: Tools, folder: Path) -> str:
    own = cost(our_calls(getattr(dtypes, name), cpu, rows, folder), cpu, tools, folder)
    found = [cost(calls, cpu, tools, folder) for calls in peer_calls(name, cpu, rows, tools, folder)]
    peers = [each for each in found if each]
    assert own and peers
    fewest, fastest = min(p.instructions for p in peers), min(p.cycles for p in peers)
    counts = f"{own.instructions:.3f} | {fewest:.3f} | {own.instructions / fewest:.2f}"
    return f"| {cpu} | {name} | {rows} | {counts} | {own.cycles:.3f} | {fastest:.3f} | {own.cycles / fastest:.2f} |"


if __name__ == "__main__":
    main()
