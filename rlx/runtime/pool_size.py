"""How large the cache pool is: what the user says, or a share of the memory that is there.

Runtime, under `pool.py`. The default is half of the memory that this process may still use once the weights are
loaded, at least what one sequence of the whole context needs, and at most what 64 of them need. Memory that is there is
the least of: what the system calls available, what the cgroup (v1 or v2, each of its levels) leaves, and what the limit
of the address space leaves.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from rlx.runtime.pool_memory import Sizes

MOST_SEQUENCES = 64
SHARE = 2  # the pool takes one part in so many of the memory that is left
RESERVE = 128 << 20
LOOK = 1.0  # seconds between two looks at how much memory there is
_UNKNOWN = 8 << 30  # of systems that do not say how much memory there is
_UNLIMITED = 1 << 60  # cgroups of version 1 say so with a number near 2^63


def pool_bytes(chosen: int | None, sizes: Sizes, max_seq: int, weight_bytes: int) -> int:
    """The size of the pool in bytes.

    Args:
        chosen: what the user says, or None.
        sizes: of the model's states.
        max_seq: maximum number of positions of a sequence.
        weight_bytes: memory that the weights take, which are not loaded yet.
    """
    if chosen is not None:
        return chosen
    one = sizes.sequence_bytes(max_seq)
    left = max(0, available_memory() - weight_bytes) // SHARE
    return max(one, min(left, MOST_SEQUENCES * one))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may still use; 8 GiB where the system does not say."""
    found = known_memory(root)
    return int(found) if math.isfinite(found) else _UNKNOWN


def known_memory(root: Path = Path("/")) -> float:
    """Bytes of memory that this process may still use; infinite where the system does not say."""
    return min(_system(root), *_cgroups(root), _address_space(root))


class Reserve:
    """Memory that the pool leaves to others, whatever its size: 128 MiB, or an eighth of what there is at the start."""

    def __init__(self) -> None:
        self._bytes, self._look_at = min(RESERVE, available_memory() // 8), 0.0

    def short(self, needed: int) -> int:
        """How many bytes the system lacks for `needed` more beside the reserve; looks once a second, 0 meanwhile."""
        now = time.monotonic()
        if now < self._look_at:
            return 0
        self._look_at = now + LOOK
        return max(0, needed + self._bytes - available_memory())


def _system(root: Path) -> float:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


def _cgroups(root: Path) -> list[float]:
    """What each level of the cgroup leaves; page cache that can be dropped counts as free."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = ([*line.split(":", 2), "", ""])[:3]
        if names == "" or "memory" in names.split(","):
            base = root / "sys/fs/cgroup" / ("memory" if names else "")
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if names else ("memory.max", "memory.current")
            parts = [part for part in path.split("/") if part]
            found += [_left(base.joinpath(*parts[:count]), *files) for count in range(len(parts) + 1)]
    return found


def _left(folder: Path, limit_file: str, used_file: str) -> float:
    limit, used = (_number(folder / name) for name in (limit_file, used_file))
    if limit is None or used is None or limit >= _UNLIMITED:
        return math.inf
    rows = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    cached = int(rows.get("inactive_file", rows.get("total_inactive_file", 0)))
    return max(0, limit - used + cached)


def _address_space(root: Path) -> float:
    try:
        import resource
    except ImportError:  # not on Windows
        return math.inf
    limit, pages = resource.getrlimit(resource.RLIMIT_AS)[0], _lines(root / "proc/self/statm")
    if limit == resource.RLIM_INFINITY or not pages:
        return math.inf
    return max(0, limit - int(pages[0].split()[0]) * resource.getpagesize())


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file, or it says "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
