"""The target machine of code generation: instruction set level, features and number of cores.

A level is a set of required instructions. `amx` means AVX-512 with its dot products and tile registers; `avx512` means
F, BW, VL and DQ; `avx2` means AVX2, FMA and F16C; `generic` is the triple's baseline and portable vector IR. Within a
level, the machine's dot-product instructions (VNNI, AVX-VNNI) are used if present. A name such as `avx512-vnni-bf16` is
a level without some of these features. It makes this machine run the code of a machine that lacks them. `describe()`
and `tuning` together contain everything that changes code, so both belong in cache keys.

Tile registers need permission from the operating system. This module requests it before it reports that the machine has
them. The permission holds for the whole process, including threads that already run and children after a fork.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx import env
from rlx.backends import backend
from rlx.backends.base import Backend
from rlx.backends.cpu.tuning import Tuning
from rlx.errors import TargetError
from rlx.passes.capabilities import Capabilities

if TYPE_CHECKING:
    from rlx.backends.cpu.isa.base import Isa

#: Levels from the narrowest to the widest. `native` is the widest one that the machine supports.
LEVELS = ("generic", "avx2", "avx512", "amx")

_AVX512 = frozenset({"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
_TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})
_SLOW_BESIDE_TILES = frozenset({"avx512bf16"})  # on processors with tiles, these dot products run at half the f32 rate

#: Features that a level requires: the machine must have all of them.
REQUIRED: dict[str, frozenset[str]] = {
    "generic": frozenset(),
    "avx2": frozenset({"avx", "avx2", "fma", "f16c"}),
    "avx512": _AVX512,
    "amx": _AVX512 | _TILES | {"avx512vnni", "avx512bf16"},
}

_AVX2_EXTRAS = frozenset(
    {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "movbe", "bmi", "bmi2", "lzcnt", "cx16", "sahf", "xsave", "avxvnni"}
)

_AVX512_EXTRAS = frozenset({"avx512cd", "avx512vnni", "avx512bf16", "avx512vbmi", "avx512fp16"})

#: Features that a level uses if the machine has them, beyond the required ones.
OPTIONAL: dict[str, frozenset[str]] = {
    "generic": frozenset(),
    "avx2": _AVX2_EXTRAS,
    "avx512": _AVX2_EXTRAS | _AVX512_EXTRAS,
    "amx": _AVX2_EXTRAS | _AVX512_EXTRAS,
}

_CPU = {"generic": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4", "amx": "x86-64-v4"}
_BASELINE_OF_CPU: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v3": REQUIRED["avx2"] | {"bmi", "bmi2", "lzcnt", "movbe", "popcnt", "sse4.2", "ssse3", "sse3", "sse4.1"},
    "x86-64-v4": _AVX512 | {"avx512cd", "bmi", "bmi2", "lzcnt", "movbe", "popcnt"},
}

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # the system call, ARCH_REQ_XCOMP_PERM, the state


@dataclass(frozen=True)
class Target:
    """The machine that code is generated for. Immutable and hashable.

    Attributes:
        level: `generic`, `avx2`, `avx512` or `amx`.
        triple: LLVM target triple.
        cpu: LLVM name of the level's processor model, not of this machine's, so that equal levels give equal code.
        features: LLVM feature string: the features that the level may use and that this machine has.
        tuned: tuning measured for the machine; None takes the cache folder's, else the level's defaults.
    """

    level: str
    triple: str
    cpu: str
    features: str
    tuned: Tuning | None = None

    @staticmethod
    def host(level: str | None = None) -> Target:
        """The target of this machine at `level`: `native`, `generic`, `avx2`, `avx512` or `amx`.

        A level may be followed by `-feature` for each feature to leave out, as in `avx512-vnni-bf16`. `native` is then
        the widest level that does not require them. None means the environment variable RLX_TARGET, or `native` if
        that is unset or empty.

        Raises:
            TargetError: the level or a feature is unknown, this machine lacks the level's instructions, or the level
                requires a feature that is to be left out.
        """
        name, *names = (level or env.target() or "native").split("-")
        triple, features = _host()
        masked = frozenset().union(*(_features(each) for each in names))
        left = features - masked if name == "native" else features
        return _target(_resolve(name, left), triple, features).without(*masked)

    @property
    def tuning(self) -> Tuning:
        """The tuning that kernels use: the measured one, or the level's defaults."""
        return self.tuned or Tuning.default(self.level)

    @property
    def backend(self) -> Backend:
        """The CPU backend."""
        return backend("cpu")

    @property
    def isa(self) -> Isa:
        """The instructions that tile kernels use."""
        from rlx.backends.cpu.isa import of  # imports llvmlite, which is slow

        return of(self)

    @property
    def numbers(self) -> Mapping[str, int]:
        """The tuning, by name."""
        return self.tuning.as_dict()

    @property
    def capabilities(self) -> Capabilities:
        """What passes may ask of this target."""
        return Capabilities(bf16_dots=self.has_bf16_dots, bf16_tiles=self.has_bf16_tiles)

    @property
    def has_vnni512(self) -> bool:
        """Whether `vpdpbusd` on 512-bit registers may be used."""
        return self.has("avx512vnni")

    @property
    def has_vnni256(self) -> bool:
        """Whether `vpdpbusd` on 256-bit registers may be used (AVX-VNNI, or AVX-512 VNNI with VL)."""
        return self.has("avxvnni") or self.has("avx512vnni")

    @property
    def has_bf16_dots(self) -> bool:
        """Whether `vdpbf16ps` on 512-bit registers may be used."""
        return self.has("avx512bf16")

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether `tdpbf16ps` on tile registers may be used."""
        return self.has("amx-bf16")

    @property
    def vectors(self) -> str:
        """The level of the vector registers, `generic`, `avx2` or `avx512`. It decides how vector code is tiled."""
        return "avx512" if self.level == "amx" else self.level

    @property
    def vector_bits(self) -> int:
        """Width of the vector registers."""
        return {"generic": 128, "avx2": 256, "avx512": 512}[self.vectors]

    @property
    def vector_room(self) -> int:
        """Number of 16-lane f32 vectors that the registers hold."""
        return {"generic": 4, "avx2": 8, "avx512": 32}[self.vectors]

    def has(self, feature: str) -> bool:
        """Whether code for this target may use an LLVM feature such as `avxvnni`."""
        return f"+{feature}" in self.features.split(",")

    def without(self, *features: str) -> Target:
        """The same target without some optional features, given by LLVM name. It generates another machine's code.

        Raises:
            TargetError: the level requires a feature.
        """
        fixed = REQUIRED[self.level] & set(features)
        if fixed:
            what, where = f"{', '.join(sorted(fixed))} belongs to the level", f"target {self.level}"
            raise TargetError(what, where=where, hint="Choose a lower level.")
        kept = [f"-{f[1:]}" if f[1:] in features else f for f in self.features.split(",")]
        return replace(self, features=",".join(kept))

    def machine(self) -> Any:
        """A new `llvmlite.binding.TargetMachine` that emits code for this target."""
        import llvmlite.binding as llvm

        _initialize_llvm()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=3, reloc="pic", codemodel="small", jit=True
        )

    def describe(self) -> dict[str, str]:
        """The properties of the target that change code, without the tuning. For cache keys."""
        return {"level": self.level, "triple": self.triple, "cpu": self.cpu, "features": self.features}


def supported_levels(features: frozenset[str]) -> tuple[str, ...]:
    """The levels that a machine with these LLVM features supports."""
    return tuple(level for level in LEVELS if REQUIRED[level] <= features)


def cpu_count() -> int:
    """Physical cores that this process may use, by affinity and cgroup quota. Hyper-threads count once. At least 1."""
    allowed = _affinity()
    cores = len({_siblings(cpu) & allowed for cpu in allowed})
    return max(1, int(min(cores, cgroup_quota())))


def usable_cpus() -> float:
    """Logical CPUs that this process may use at a time: the smaller of its affinity and its cgroup quota."""
    return min(len(_affinity()), cgroup_quota())


def cgroup_quota(root: Path = Path("/")) -> float:
    """CPUs that the cgroup (v1 or v2) of this process may use on average; infinity without a limit.

    Every ancestor's limit counts, because the kernel enforces each of them.
    """
    return min([*_quotas_v2(root), *_quotas_v1(root)], default=float("inf"))


def _resolve(name: str, features: frozenset[str]) -> str:
    have = supported_levels(features)
    if name == "native":
        return have[-1]
    if name not in LEVELS:
        raise TargetError(f"unknown target level {name!r}", hint=f"Use native or one of {', '.join(LEVELS)}")
    if name not in have:
        missing = ", ".join(sorted(REQUIRED[name] - features))
        raise TargetError(
            f"this machine lacks {missing}", where=f"target level {name}", hint=f"It has: {', '.join(have)}"
        )
    return name


def _features(name: str) -> frozenset[str]:
    """The LLVM features that a name in RLX_TARGET leaves out: `vnni` is both `avx512vnni` and `avxvnni`."""
    found = frozenset(f for f in frozenset().union(*OPTIONAL.values()) if name in (f, _short(f)))
    if not found:
        known = ", ".join(sorted({_short(f) for f in frozenset().union(*OPTIONAL.values())}))
        raise TargetError(f"unknown feature {name!r} to leave out", where="target", hint=f"There are: {known}")
    return found


def _short(feature: str) -> str:
    """`vnni` of `avx512vnni`."""
    return feature.removeprefix("avx512").removeprefix("avx")


def _target(level: str, triple: str, features: frozenset[str]) -> Target:
    if level == "generic":
        return Target(level, triple, _CPU[level] if triple.startswith("x86_64") else "generic", "")
    allowed = REQUIRED[level] | OPTIONAL[level]
    if level == "avx512" and features >= _TILES:
        allowed -= _SLOW_BESIDE_TILES
    # The level's processor model implies a few features. Those that this machine lacks are disabled by name.
    missing = _BASELINE_OF_CPU[_CPU[level]] - features
    flags = [f"+{f}" for f in sorted(allowed & features)] + [f"-{f}" for f in sorted(missing)]
    # On the v4 model LLVM splits 512-bit vectors in two unless this feature is off.
    return Target(level, triple, _CPU[level], ",".join(flags + ["-prefer-256-bit"] * (level in ("avx512", "amx"))))


@lru_cache(maxsize=1)
def _host() -> tuple[str, frozenset[str]]:
    import llvmlite.binding as llvm

    _initialize_llvm()
    triple: str = llvm.get_process_triple()
    if not triple.startswith("x86_64"):
        return triple, frozenset()
    features = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    if not features >= _TILES:
        return triple, features - _TILES
    return triple, features if _tiles_permitted() else features - _TILES - _SLOW_BESIDE_TILES


def _tiles_permitted() -> bool:
    """Requests the tile registers from the Linux kernel, for this process and its children. Other systems: false."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@lru_cache(maxsize=1)
def _initialize_llvm() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _affinity() -> frozenset[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> frozenset[int]:
    """The logical CPUs that share the core of `cpu`; only `cpu` if the system does not report them."""
    text = _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
    return parse_cpu_list(text) if text else frozenset({cpu})


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers of a kernel CPU list such as `0-3,8`."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def _quotas_v2(root: Path) -> list[float]:
    folders = [folder for name, path in _groups(root) if name == "" for folder in _ancestors(path)]
    texts = [_read(root / "sys/fs/cgroup" / folder / "cpu.max").split() for folder in folders]
    return [int(t[0]) / int(t[1]) for t in texts if len(t) == 2 and t[0] != "max"]


def _quotas_v1(root: Path) -> list[float]:
    folders = [folder for name, path in _groups(root) if "cpu" in name.split(",") for folder in _ancestors(path)]
    bases = [root / "sys/fs/cgroup" / mount / folder for mount in ("cpu", "cpu,cpuacct") for folder in folders]
    pairs = [(_read(base / "cpu.cfs_quota_us"), _read(base / "cpu.cfs_period_us")) for base in bases]
    return [int(quota) / int(period) for quota, period in pairs if quota and period and int(quota) > 0]


def _groups(root: Path) -> list[tuple[str, str]]:
    """Controllers and path of each hierarchy that this process is in; v2 has no controller names."""
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    return [(line[1], line[2]) for line in lines if len(line) == 3]


def _ancestors(path: str) -> list[str]:
    """The folder, each folder above it and the mount itself. Inside a container the folder may not be visible."""
    parts = [part for part in path.strip("/").split("/") if part]
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
