"""What the operating system knows of the processors: the plain form of one part of the interface."""

from __future__ import annotations

import math
import os


class Processors:
    """The plain form. `Platform` has it, and the other forms override what their system can do better."""

    def allowed_cpus(self) -> frozenset[int]:
        """The logical CPUs that this process may run on."""
        return frozenset(range(os.cpu_count() or 1))

    def cores(self, cpus: frozenset[int]) -> int:
        """The number of physical cores that logical CPUs belong to; that of the CPUs if the system does not say."""
        return len(cpus)

    def cpu_quota(self) -> float:
        """CPUs that this process may use on average; infinity without a limit."""
        return math.inf

    def processor(self) -> str | None:
        """The processor's model, for people and to tell machines apart; None if the system does not say."""
        return None

    def cache_bytes(self) -> list[int]:
        """The sizes of the processor's caches; none if the system does not say."""
        return []

    def permit_tiles(self) -> bool:
        """Asks for the processor's tile registers (AMX); whether this process and its threads may use them."""
        return False

    def arm_features(self) -> frozenset[str]:
        """What an aarch64 processor can do, by LLVM name; `neon`, which all have, if the system does not say more.

        It is not asked on other processors. LLVM's own detection reads `/proc/cpuinfo`, which containers and emulators
        may hide or take from another machine.
        """
        return frozenset({"neon"})
