"""Identity of a model, for snapshots: an engine restores only snapshots of its own model."""

from __future__ import annotations

import hashlib

from rlx.ir.graph import Graph
from rlx.weights import WeightLoader

SAMPLES, SAMPLE_BYTES = 256, 64  # number of tensors that are sampled, evenly spread, and bytes of each


def identity(graph: Graph, loader: WeightLoader) -> str:
    """SHA-256 of a model's graph with its state types, its constants, and samples of its weights.

    It detects mistakes, not manipulation: files that differ only outside the samples have the same identity.
    """
    digest = hashlib.sha256(graph.canonical().encode())
    for name in sorted(graph.constants):
        digest.update(graph.constants[name].tobytes())
    names = sorted(loader.tensors)
    for name in names[:: max(1, -(-len(names) // SAMPLES))]:
        digest.update(name.encode())
        digest.update(loader.raw(name)[:SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
