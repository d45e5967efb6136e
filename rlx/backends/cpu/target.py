"""The target machine of code generation: instruction set level, features and number of cores.

A level is a set of required instructions (`rlx.backends.cpu.levels`). On x86, `amx` means AVX-512 with its dot products
and tile registers; `avx512` means F, BW, VL and DQ; `avx2` means AVX2, FMA and F16C; `generic` is the triple's baseline
and portable vector IR. Within a level, the machine's dot-product instructions (VNNI, AVX-VNNI) are used if present. A
name such as `avx512-vnni-bf16` makes this machine run the code of a machine that lacks them. `describe()` and `tuning`
together contain everything that changes code, so both belong in cache keys.

Tile registers need permission from the operating system (`rlx.platform`). This module requests it before it reports
that the machine has them. The permission holds for the whole process, including threads that already run and children
after a fork.

`feature_use` says for `rlx doctor` which of this CPU's instructions the code for a target uses, and why it leaves the
others out. Only the features that change how fast a model runs are listed: vector, dot product and matrix instructions.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm

from rlx import env, platform
from rlx.backends import backend, cpu
from rlx.backends.cpu.layouts import LAYOUTS
from rlx.backends.cpu.levels import (
    AARCH64,
    NATIVE,
    SLOW_BESIDE_TILES,
    TILES,
    Level,
    architecture,
    choose,
    feature_string,
    with_implied,
)
from rlx.backends.cpu.tuning import Tuning
from rlx.backends.device import Backend, FeatureUse
from rlx.errors import TargetError
from rlx.passes.capabilities import Capabilities

if TYPE_CHECKING:
    from rlx.backends.cpu.isa.portable import Isa

# With fewer rows int8 products of codes as they are packed are faster than tiles over unpacked weights (docs/batch.md).
_TILED_ROWS = 9


@dataclass(frozen=True)
class Target:
    """The machine that code is generated for. Immutable and hashable.

    Attributes:
        level: a level of the triple's architecture, such as `avx2`.
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
    def host(name: str | None = None) -> Target:
        """The target of this machine by name: `native`, or a level and changes to its features (`levels.py`).

        `avx512-vnni-bf16` is the level avx512 without two features; `avx2+vnni` requires one. None means the
        environment variable RLX_TARGET, or `native` if that is unset or empty.

        Raises:
            TargetError: the level or a feature is unknown, this machine lacks it, or the level requires a feature that
                is to be left out; or the machine is big-endian.
        """
        triple, features = _host()
        try:
            chosen = choose(name or env.target() or NATIVE, architecture(triple), features)
        except TargetError as error:
            if name or not env.target():
                raise
            what = error.what if error.where in (None, "target") else f"{error.where}: {error.what}"
            raise TargetError(what, where="RLX_TARGET", hint=error.hint) from None
        level = chosen.level
        return Target(level.name, triple, level.cpu, feature_string(level, chosen.features))

    @property
    def tuning(self) -> Tuning:
        """The tuning that kernels use: the measured one, or the default."""
        return self.tuned or self.default_tuning

    @property
    def default_tuning(self) -> Tuning:
        """The tuning before anything is measured."""
        return Tuning.default(self.level, (name[1:] for name in self.features.split(",") if name.startswith("+")))

    @property
    def backend(self) -> Backend:
        """The CPU backend; with RLX_JIT=0 the one without machine code."""
        return backend("cpu")

    @property
    def isa(self) -> Isa:
        """The instructions that tile kernels use."""
        return cpu.isa.of(self)

    @property
    def capabilities(self) -> Capabilities:
        """The facts that passes may ask for."""
        found = Capabilities(bf16_dots=self.has_bf16_dots, bf16_tiles=self.has_bf16_tiles, layouts=LAYOUTS)
        return replace(found, bf16_rows=_TILED_ROWS) if self.has_bf16_tiles else found

    @property
    def has_vnni512(self) -> bool:
        """Whether `vpdpbusd` on 512-bit registers may be used."""
        return self.vector_bits == 512 and self.has("avx512vnni")

    @property
    def has_vnni256(self) -> bool:
        """Whether `vpdpbusd` on 256-bit registers may be used (AVX-VNNI, or AVX-512 VNNI with VL)."""
        return self.has("avxvnni") or self.has("avx512vnni")

    @property
    def has_bf16_dots(self) -> bool:
        """Whether one instruction sums products of bf16: `vdpbf16ps` on 512-bit registers, `bfdot` on those of NEON."""
        return self.has("avx512bf16") or self.has("bf16")

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether `tdpbf16ps` on tile registers may be used."""
        return self.has("amx-bf16")

    @property
    def _level(self) -> Level:
        return next(level for level in architecture(self.triple).levels if level.name == self.level)

    @property
    def vectors(self) -> str:
        """The kind of the vector registers: `generic`, `avx2`, `avx512` or `neon`. It decides how code is tiled."""
        return self._level.vectors

    @property
    def vector_bits(self) -> int:
        """Width of the vector registers."""
        return self._level.vector_bits

    @property
    def vector_room(self) -> int:
        """Number of 16-lane f32 vectors that the registers hold."""
        return self._level.vector_room

    def has(self, feature: str) -> bool:
        """Whether code for this target may use an LLVM feature such as `avxvnni`."""
        return f"+{feature}" in self.features.split(",")

    def without(self, *features: str) -> Target:
        """The same target without some optional features, given by LLVM name. It generates another machine's code.

        Raises:
            TargetError: the level requires a feature.
        """
        if fixed := self._level.required & set(features):
            what, where = f"{', '.join(sorted(fixed))} belongs to the level", f"target {self.level}"
            raise TargetError(what, where=where, hint="Choose a lower level.")
        used = frozenset(word[1:] for word in self.features.split(",") if word.startswith("+"))
        return replace(self, features=feature_string(self._level, used - set(features)))

    def machine(self) -> Any:
        """A new `llvmlite.binding.TargetMachine` that emits code for this target."""
        _initialize_llvm()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=3, reloc="pic", codemodel="small", jit=True
        )

    def describe(self) -> dict[str, str]:
        """The properties of the target that change code, without the tuning. For cache keys."""
        found = {"level": self.level, "triple": self.triple, "cpu": self.cpu, "features": self.features}
        return found if env.jit() else {**found, "jit": "0"}


def supported_levels(features: frozenset[str] | None = None) -> tuple[str, ...]:
    """The levels that this machine supports, from the narrowest to the widest.

    Args:
        features: what a machine of this architecture has; by default what may be used on this one.
    """
    triple, usable = _host()
    found = architecture(triple).supported(usable if features is None else features)
    return tuple(level.name for level in found)


def processor_features() -> frozenset[str]:
    """The features that the processor has, by LLVM name, whether code may use them or not."""
    if architecture(llvm.get_process_triple()) is AARCH64:
        return platform.current().arm_features()
    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


@lru_cache(maxsize=1)
def _host() -> tuple[str, frozenset[str]]:
    """The triple of this process, and the features that the processor has and the operating system permits."""
    if sys.byteorder == "big":
        raise TargetError("this machine is big-endian", where="target", hint="rlx runs on little-endian machines only")
    _initialize_llvm()
    triple = platform.current().triple(llvm.get_process_triple())
    if architecture(triple) is AARCH64:
        return triple, processor_features()
    features = with_implied(processor_features())
    if not features >= TILES:
        features -= TILES
    elif not platform.current().permit_tiles():
        features -= TILES | SLOW_BESIDE_TILES
    return triple, features


@lru_cache(maxsize=1)
def _initialize_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # for instructions that no intrinsic names


#: LLVM names of vector, dot product and matrix instructions.
_COMPUTES = re.compile(r"(avx|amx|fma$|f16c|sve|sme|neon|dotprod|i8mm|bf16|fullfp16|fp16|vnni)")


def feature_use(target: Target, host: frozenset[str], name: str | None = None) -> FeatureUse:
    """The features of a CPU with `host` that a target uses.

    Args:
        name: how the target was chosen, such as "avx512-vnni"; by default RLX_TARGET, or "native".
    """
    chosen = name or env.target() or "native"
    used = {flag[1:] for flag in target.features.split(",") if flag.startswith("+")}
    known = frozenset[str]().union(*(level.usable for level in architecture(target.triple).levels))
    unused = {f: _reason(f, target, host, chosen) for f in sorted(host - used) if _COMPUTES.match(f)}
    lacking = sorted(f for f in known - host if _COMPUTES.match(f))
    return FeatureUse(tuple(sorted(f for f in used if _COMPUTES.match(f))), unused, tuple(lacking))


def _reason(feature: str, target: Target, host: frozenset[str], name: str) -> str:
    """Why the code for a target does not use a feature that the CPU has."""
    table = architecture(target.triple)
    levels = [level for level in table.levels if feature in level.usable]
    if any(feature in table.features(word) for word in re.findall(r"-([^-+]+)", name)):
        return f"left out by {name}"
    if not levels:
        return "no kernel of rlx uses it"
    widest = table.supported(host)[-1]
    narrower = table.levels[: table.levels.index(widest) + 1]
    if feature in TILES and widest.name == "amx" and name.split("-")[0] in ("native", "amx"):
        return "the operating system does not permit tile registers to this process"
    if feature == "avx512bf16" and host >= TILES and target.level in [level.name for level in levels]:
        return "on CPUs with tiles its dot products run at half the rate of f32"
    if not set(levels) & set(narrower):
        missing = ", ".join(sorted(levels[0].required - host))
        return f"used at level {levels[0].name}, for which this CPU lacks {missing}"
    return f"used from level {levels[0].name} on; the target {name} is of level {target.level}"
