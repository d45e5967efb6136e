"""What the test process holds in memory."""

from __future__ import annotations

import mmap
from pathlib import Path


def rss_bytes() -> int:
    """Bytes of this process that are in physical memory now, mapped file pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
