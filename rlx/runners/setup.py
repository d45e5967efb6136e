"""What a user may choose about an engine: arguments and profile merged, every default filled in.

Runners stage, under the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx import models
from rlx.profile import CompileProfile
from rlx.runtime.cache import CompileCache
from rlx.runtime.kv import kv_dtype
from rlx.runtime.limits import context_length, worker_count

DEFAULT_CONTEXT = 4096  # positions, where the model allows more and the user asked for nothing


@dataclass(frozen=True)
class Setup:
    """The choices of one engine, arguments and profile merged; `caches` is the KV type that the model would choose."""

    profile: CompileProfile
    precision: str
    kv_type: Any
    threads: int
    max_seq: int
    cache: CompileCache | None
    dump_ir: Path | None

    @staticmethod
    def of(
        config: models.ModelConfig,
        caches: str,
        threads: int | None,
        max_seq: int | None,
        kv: str | None,
        precision: str | None,
        profile: Any,
        cache: CompileCache | None,
        dump_ir: str | Path | None,
    ) -> Setup:
        chosen = CompileProfile.load(profile)
        mode = precision or chosen.precision or "auto"
        workers = worker_count(threads, chosen.threads)
        room = min(config.context, DEFAULT_CONTEXT) if max_seq is None else context_length("max_seq", max_seq)
        kv_type = kv_dtype(kv or chosen.kv_dtype, mode, caches)
        return Setup(chosen, mode, kv_type, workers, room, cache, Path(dump_ir) if dump_ir else None)
