"""`CompileProfile`: the choices of a compile, complete, for prefill and for decode.

A profile is part of a compile key through what it changes: two that choose the same share their programs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from rlx.errors import ProfileError
from rlx.passes.options import FUSIONS, PASSES, Options, check_precision
from rlx.profile.keys import (
    BUCKETS,
    FAMILIES,
    PHASES,
    Flat,
    Found,
    check_names,
    check_value,
    read_file,
    read_table,
    to_toml,
)
from rlx.profile.option import ProfileOptions

ProfileLike: TypeAlias = "CompileProfile | Mapping[str, Any] | str | Path | None"
"""A profile, or what makes one: a table, the path of a file, None for the defaults."""


@dataclass(frozen=True)
class PhaseProfile:
    """The choices for prefill and for decode separately.

    Attributes:
        precision: "auto" or "exact"; None leaves it to the caller.
        bf16_dots: whether activations may be rounded to bf16 for bf16 and f16 weights and 16-bit caches.
        bf16_tiles: whether they may for quantized weights, where the CPU multiplies tiles.
        fusions: groups of fusion rules that run, of `rlx.passes.options.FUSIONS`.
        passes: passes that run, of `rlx.passes.options.PASSES`.

    Raises:
        ProfileError: a value is unknown.
    """

    precision: str | None = None
    bf16_dots: bool = True
    bf16_tiles: bool = True
    fusions: tuple[str, ...] = FUSIONS
    passes: tuple[str, ...] = PASSES

    def __post_init__(self) -> None:
        where = type(self).__name__
        if self.precision is not None:
            check_value("precision.mode", self.precision, where)
        check_value("precision.bf16_dots", self.bf16_dots, where)
        check_value("precision.bf16_tiles", self.bf16_tiles, where)
        check_names(self.fusions, FUSIONS, where, "fusion")
        check_names(self.passes, PASSES, where, "pass")

    @staticmethod
    def of(flat: Flat) -> PhaseProfile:
        """From the checked choices of a phase."""
        groups = () if flat.get("fusion.skip") else FUSIONS
        return PhaseProfile(
            flat.get("precision.mode"),
            flat.get("precision.bf16_dots", True),
            flat.get("precision.bf16_tiles", True),
            tuple(name for name in groups if flat.get(f"fusion.{name}", True)),
            tuple(name for name in PASSES if flat.get(f"passes.{name}", True)),
        )

    def flat(self) -> Flat:
        """The choices by the paths of their keys; `of` reads them back."""
        return {
            **({} if self.precision is None else {"precision.mode": self.precision}),
            "precision.bf16_dots": self.bf16_dots,
            "precision.bf16_tiles": self.bf16_tiles,
            "fusion.skip": False,
            **{f"fusion.{name}": name in self.fusions for name in FUSIONS},
            **{f"passes.{name}": name in self.passes for name in PASSES},
        }


@dataclass(frozen=True)
class CompileProfile(ProfileOptions):
    """The choices of a user about a compile; None leaves a choice to the caller, the environment or the default.

    It has the attributes of `ProfileOptions`, too, which can be given as keyword arguments.

    Attributes:
        prefill, decode: choices for programs of several rows and of one row.
        family: the family of models it is for, of `FAMILIES`; None for any.
        buckets: largest row count of each program, ascending, starting with 1; empty for the default of the device.
        level: target level: "native", "generic", "avx2", "avx512", "amx", or one of aarch64.
        cache: policy of the compile cache: "on", "off", "redo" or "readonly".
        capacity: compiled programs that the cache keeps in memory.
        model: the model where a caller names none: a path from the profile's folder, or the name of a downloaded one.
        source: the file that it was read from; None if it was not. Profiles of different files can be equal.

    Raises:
        ProfileError: a value is unknown or out of its range.
    """

    prefill: PhaseProfile = field(default_factory=PhaseProfile)
    decode: PhaseProfile = field(default_factory=PhaseProfile)
    family: str | None = None
    buckets: tuple[int, ...] = ()
    level: str | None = None
    cache: str | None = None
    capacity: int | None = None
    model: str | None = None
    source: Path | None = field(default=None, compare=False, repr=False)

    #: Fields that both phases share -> the paths of their keys.
    _PATHS: ClassVar[dict[str, str]] = {
        "model": "model",
        "family": "family",
        "buckets": "buckets.seq",
        "level": "backend.cpu.level",
        "cache": "cache.policy",
        "capacity": "cache.capacity",
        **ProfileOptions.keys(),
    }

    def __post_init__(self) -> None:
        flat = self.common()
        for name, path in self._PATHS.items():
            if path in flat:
                check_value(path, flat[path], f"CompileProfile.{name}")

    # -- ways to one ----------------------------------------------------------------------------------------------

    @staticmethod
    def load(profile: ProfileLike) -> CompileProfile:
        """A profile from a file, a parsed table, or None for the defaults.

        Raises:
            ProfileError: the file is missing or does not parse, or a key or value is unknown.
        """
        if profile is None or isinstance(profile, CompileProfile):
            return profile or CompileProfile()
        if isinstance(profile, str | Path):
            source = Path(profile)
            return replace(CompileProfile._of(read_table(read_file(source), str(profile))), source=source)
        if isinstance(profile, Mapping):
            return CompileProfile._of(read_table(profile, "profile"))
        hint = "Give the path of a TOML file, a table, or a CompileProfile."  # type: ignore[unreachable]
        raise ProfileError(f"{profile!r} is no profile", where="profile", hint=hint)

    @staticmethod
    def _of(found: Found) -> CompileProfile:
        named = {name: found.common[path] for name, path in CompileProfile._PATHS.items() if path in found.common}
        if "buckets" in named:
            named["buckets"] = tuple(named["buckets"])
        prefill, decode = (PhaseProfile.of(found.of(phase)) for phase in PHASES)
        return CompileProfile(prefill, decode, **named)

    @staticmethod
    def preset(family: str, phase: str | None = None) -> CompileProfile:
        """The defaults of a family, for both phases, or with the choices of one phase in both.

        Families differ by name only: what differs between models (cache types, bf16 activations) is read off the model.
        Decode leaves out `last_row`: it has one row.

        Raises:
            ProfileError: the family or phase is unknown.
        """
        check_names([family], FAMILIES, "CompileProfile.preset", "family")
        several = PhaseProfile("auto")
        one = replace(several, passes=tuple(name for name in PASSES if name != "last_row"))
        both = CompileProfile(several, one, family)
        return both if phase is None else both.for_phase(phase)

    @staticmethod
    def of_phases(prefill: ProfileLike, decode: ProfileLike) -> CompileProfile:
        """The prefill of one profile and the decode of another, each as `load` takes it.

        Raises:
            ProfileError: they cannot be read, or differ in what both phases share.
        """
        prefill, decode = CompileProfile.load(prefill), CompileProfile.load(decode)
        for name, path in CompileProfile._PATHS.items():
            a, b = getattr(prefill, name), getattr(decode, name)
            if a != b:
                what = f"{name} is {a!r} for prefill and {b!r} for decode"
                raise ProfileError(what, where=f"CompileProfile [{path}]", hint="Both phases share it: choose one.")
        return replace(prefill, decode=decode.decode)

    def for_phase(self, phase: str) -> CompileProfile:
        """This profile with the choices of one phase, "prefill" or "decode", in both.

        Raises:
            ProfileError: the phase is unknown.
        """
        check_names([phase], PHASES, "CompileProfile", "phase")
        chosen = self.prefill if phase == "prefill" else self.decode
        return replace(self, prefill=chosen, decode=chosen)

    def with_precision(self, precision: str | None, default: str) -> CompileProfile:
        """The same with `precision` in both phases, or if it is None with `default` where a phase leaves it open.

        Raises:
            ArgumentError: the precision is unknown.
        """
        check_precision(precision or default)
        phases = {p: getattr(self, p) for p in PHASES}
        modes = {p: precision or profile.precision or default for p, profile in phases.items()}
        return replace(self, **{p: replace(profile, precision=modes[p]) for p, profile in phases.items()})

    # -- what it says ---------------------------------------------------------------------------------------------

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(smallest, largest) row count of each bucket."""
        ends = self.buckets or BUCKETS
        return tuple((low + 1, high) for low, high in zip((0, *ends[:-1]), ends, strict=True))

    @property
    def precision(self) -> str:
        """Of both phases if they agree, such as "auto", else of each, such as "exact prefill, auto decode"."""
        first, second = self.prefill.precision or "auto", self.decode.precision or "auto"
        return first if first == second else f"{first} prefill, {second} decode"

    @property
    def is_exact(self) -> bool:
        """Whether a phase is exact. It reads what the other wrote, so then the KV cache should be exact, too."""
        return "exact" in (self.prefill.precision, self.decode.precision)

    @property
    def arithmetic_differs(self) -> str | None:
        """The name of a choice of arithmetic that differs between prefill and decode; None if there is none."""
        kept = {"last_row", "reuse_memory"}  # passes that move values and change none
        for row in fields(PhaseProfile):
            first, second = (getattr(phase, row.name) for phase in (self.prefill, self.decode))
            if (set(first) ^ set(second)) - kept if isinstance(first, tuple) else first != second:
                return row.name
        return None

    def options(self, seq: tuple[int, int], **more: Any) -> Options:
        """The compiler's options for a bucket: one row, or a batch of few, is decode, everything else prefill.

        Args:
            seq: (smallest, largest) number of rows.
            more: other fields of `Options`.
        """
        phase = self.decode if Options(seq=seq, segments=more.get("segments", False)).decodes else self.prefill
        chosen = {row.name: getattr(phase, row.name) for row in fields(phase)}
        chosen |= {"precision": phase.precision or "auto", "deterministic": bool(self.deterministic)}
        return Options(seq=seq, **chosen, **more)

    def common(self) -> Flat:
        """The choices for both phases, by the paths of the keys."""
        chosen = {path: getattr(self, name) for name, path in self._PATHS.items()}
        flat = {path: value for path, value in chosen.items() if value not in (None, ())}
        return {path: list(value) if isinstance(value, tuple) else value for path, value in flat.items()}

    def to_toml(self, comments: bool = False, commented_out: Collection[str] = ()) -> str:
        """The profile as a TOML file; `load` reads it back equal.

        Args:
            comments: before each key what it means, and its choices.
            commented_out: paths of shared keys that are written behind a #, such as `cache.policy`; not read back.
        """
        return to_toml(self.common(), {phase: getattr(self, phase).flat() for phase in PHASES}, comments, commented_out)
