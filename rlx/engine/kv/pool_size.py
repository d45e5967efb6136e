"""How large the cache pool is: what the user says, or a share of the memory that is there.

Runtime, under `pool.py`. The default is half of the memory that this process may still use once the weights are
loaded, divided among the models of a server, at least what one sequence of the whole context needs, and at most what 64
of them need. Memory that is there is the least of: what the system calls available, what the cgroup (v1 or v2, each of
its levels) leaves, and what the limit of the address space leaves.

Where a buffer takes its memory at once, such as on a card, everything is planned before anything is loaded.
"""

from __future__ import annotations

import math
import time

from rlx.backends.memory import Memory
from rlx.compiler.kv import Sizes
from rlx.env import size
from rlx.errors import ResourceError

MOST_SEQUENCES = 64
SHARE = 2  # the pool takes one part in so many of the memory that is left
RESERVE = 128 << 20
WORK = 512 << 20  # of a device whose memory is planned: what programs work on, and code
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
    one, work = sizes.sequence_bytes(max_seq), 0 if memory.lazy else pools * WORK
    left = max(0, available_memory(memory) - weight_bytes - work) // (SHARE * pools)
    return max(one, min(left, MOST_SEQUENCES * one))


def check_plan(memory: Memory, pool: int, sizes: Sizes, max_seq: int, weight_bytes: int) -> None:
    """Checks that a model fits, before anything of it is loaded, if buffers take their memory at once.

    Args:
        pool: size of the pool in bytes.

    Raises:
        ResourceError: it does not; says what is short, and what helps.
    """
    free = available_memory(memory)
    if memory.lazy or weight_bytes + pool + WORK <= free:
        return
    parts = f"weights {size(weight_bytes)}, caches {size(pool)}, work {size(WORK)}"
    short = size(weight_bytes + pool + WORK - free)
    room, tokens = free - weight_bytes - WORK, 0
    for step in (1 << i for i in reversed(range(max_seq.bit_length()))):
        if tokens + step <= max_seq and sizes.sequence_bytes(tokens + step) <= room:
            tokens += step
    if tokens >= sizes.page:
        hint = f"Give max_seq={min(max_seq, tokens)} or less, kv_bytes={room >> 20}MiB or less, or kv_dtype=\"q8_0\"."
    else:
        hint = "Use a smaller file (rlx quantize), end other programs that use the device, or choose device=\"cpu\"."
    what = f"the model lacks {short} of the device's memory: {size(free)} are free, and it takes {parts}"
    raise ResourceError(what, where="memory", hint=hint)


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
        if now < self._look_at or not self._memory.lazy:  # the pool has all of its memory already
            return 0
        self._look_at = now + LOOK
        return max(0, needed + self._bytes - available_memory(self._memory))
