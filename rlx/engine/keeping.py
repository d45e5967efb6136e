"""Makes what keeps states of prompts on disk, for an engine with the option `cache_kv`.

Runners stage, under the engine. Files are of use only to an engine that would compute the same bits. So their key holds
the content of the model's files, the graph, the formats of the caches, the target, the options that change arithmetic,
and the versions of everything that makes code or reads weights.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rlx.compiler.compile import Compiler, program_name
from rlx.engine.kv.kept_prefixes import KeptPrefixes
from rlx.engine.kv.pool import CachePool
from rlx.engine.kv.prefix_store import PrefixStore
from rlx.engine.opening.content import ContentDigest
from rlx.engine.opening.setup import Setup
from rlx.engine.prefix_writer import PrefixWriter
from rlx.ir.graph import Graph
from rlx.passes.effective import effective
from rlx.store.key import CompileKey, digest_text, source_digest
from rlx.weights import WeightLoader

KIND = "prefixes"
_SOURCES = ("models/**/*.py", "weights/**/*.py", "vision/**/*.py", "audio/**/*.py", "runtime/p*.py", "runtime/s*.py")
_ARITHMETIC = ("precision", "bf16_dots", "bf16_tiles", "deterministic", "fusions", "passes")


def keeping(
    setup: Setup, compiler: Compiler, graph: Graph, pool: CachePool, loader: WeightLoader
) -> tuple[KeptPrefixes | None, PrefixWriter | None]:
    """What reads states of prompts, and what writes them; None without the option."""
    if setup.cache_kv is None:
        return None, None
    sizes, has_states = pool.sizes, pool.memory.has_slots
    store = PrefixStore(
        setup.cache_kv, setup.cache_kv_bytes, page=sizes.page, page_bytes=sizes.page_bytes, has_states=has_states
    )
    kept = pool.kept = KeptPrefixes(pool, store)
    content = ContentDigest([Path(path) for path, _, _ in loader.stamps()], store.root)
    return kept, PrefixWriter(kept, content, partial(prefix_key, setup, compiler, graph, pool))


def prefix_key(setup: Setup, compiler: Compiler, graph: Graph, pool: CachePool, content: str) -> CompileKey:
    """The key of all that the bits of states depend on.

    Args:
        content: digest of the model's files.
    """
    phases: dict[str, Any] = {}
    for bucket in setup.profile.ranges:
        options = effective(setup.profile.options(bucket, paged=True), graph, setup.target.capabilities)
        chosen = {name: getattr(options, name) for name in _ARITHMETIC}
        phases["-".join(map(str, bucket))] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()
        }
    return compiler.key(
        kind=KIND,
        name=program_name(graph),
        graph=digest_text(graph.canonical()),
        states={name: state.format for name, state in pool.memory.table.items()},
        profile=phases,
        options={"content": content, "readers": source_digest(None, _SOURCES)},
    )
