"""States between steps: KV caches, updated in place.

A cache has room for `ctx` positions, a multiple of 16. Its memory is anonymous, so positions that were never written
cost no memory. Forgetting is free: attention reads positions below the current length only.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import ArgumentError, GraphError
from rlx.ir import dims
from rlx.ir.dtypes import DTYPES, DType
from rlx.ir.graph import Graph
from rlx.runtime.memory import AlignedBuffer

TILE = 16
KV_DTYPES = ("f32", "f16", "bf16")


def kv_dtype(name: str | None, precision: str) -> DType:
    """The cache's type: f32 in exact precision, else f16 by default (docs/caches.md states the error of each)."""
    chosen = name or ("f32" if precision == "exact" else "f16")
    if chosen not in KV_DTYPES:
        raise ArgumentError(f"KV cache type {chosen!r} is unknown", hint=f"Choose one of {', '.join(KV_DTYPES)}.")
    return DTYPES[chosen]


class States:
    """Memory for every state of a graph.

    Args:
        graph: a graph before or after specialization.
        ctx: positions the caches have room for; rounded up to a multiple of 16.

    Raises:
        GraphError: a key cache of fixed size has no whole tiles.
    """

    def __init__(self, graph: Graph, ctx: int) -> None:
        self.ctx = -(-ctx // TILE) * TILE
        for name, node in graph.leaves("state").items():
            if node["layout"] == "tiles" and dims.value(node.shape[1], {"CTX": self.ctx}) % TILE:
                hint = f"Keys lie in tiles of {TILE} positions: take a multiple of it, or CTX."
                raise GraphError(f"the cache has {node.shape[1]} positions", where=f"state {name!r}", hint=hint)
        self._buffers = {
            name: AlignedBuffer(node.dtype.size([dims.value(d, {"CTX": self.ctx}) for d in node.shape]))
            for name, node in graph.leaves("state").items()
        }

    @property
    def addresses(self) -> Mapping[str, int]:
        return {name: buffer.address for name, buffer in self._buffers.items()}

    @property
    def nbytes(self) -> int:
        """Bytes when every position is used."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
