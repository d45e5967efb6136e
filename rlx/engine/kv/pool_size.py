"""How large the cache pool is: what the user says, or a share of the memory that is there.

Runtime, under `pool.py`. The default is half of the memory that this process may still use once the weights are
loaded, divided among the models of a server, at least what one sequence of the whole context needs, and at most what 64
of them need. Memory that is there is the least of: what the system calls available, what the cgroup (v1 or v2, each of
its levels) leaves, and what the limit of the address space leaves.
"""

from __future__ import annotations

import math
import time

from rlx.backends.memory import Memory
from rlx.compiler.kv import Sizes

MOST_SEQUENCES = 64
SHARE = 2  # the pool takes one part in so many of the memory that is left
RESERVE = 128 << 20
LOOK = 1.0  # seconds between two looks at how much memory there is
_UNKNOWN = 8 << 30  # of systems that do not say how much memory there is


def pool_bytes(
    memory: Memory, chosen: int | None, sizes: Sizes, max_seq: int, weight_bytes: int, pools: int = 1
) -> int:
    """The size of the pool in bytes.

    Args:
        memory: of the device.
        chosen: what the user says, or None.
        sizes: of the model's states.
        max_seq: maximum number of positions of a sequence.
        weight_bytes: memory that the weights take, which are not loaded yet.
        pools: how many share the memory that the weights leave.
    """
    if chosen is not None:
        return chosen
    one = sizes.sequence_bytes(max_seq)
    left = max(0, available_memory(memory) - weight_bytes) // (SHARE * pools)
    return max(one, min(left, MOST_SEQUENCES * one))


def available_memory(memory: Memory) -> int:
    """Bytes of a memory that this process may still use; 8 GiB if nobody knows."""
    found = memory.available()
    return int(found) if math.isfinite(found) else _UNKNOWN


class Reserve:
    """Memory that the pool leaves to others, whatever its size: 128 MiB, or an eighth of what there is at the start."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._bytes, self._look_at = min(RESERVE, available_memory(memory) // 8), 0.0

    def short(self, needed: int) -> int:
        """How many bytes the system lacks for `needed` more beside the reserve; looks once a second, 0 meanwhile."""
        now = time.monotonic()
        if now < self._look_at:
            return 0
        self._look_at = now + LOOK
        return max(0, needed + self._bytes - available_memory(self._memory))
