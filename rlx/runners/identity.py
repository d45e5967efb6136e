"""What tells one model from another, for copies of sessions: engines restore only those of their own model."""

from __future__ import annotations

import hashlib

from rlx.ir.graph import Graph
from rlx.weights import WeightLoader

SAMPLES, SAMPLE_BYTES = 256, 64  # tensors of a file that are looked at, spread evenly, and bytes of each


def identity(graph: Graph, loader: WeightLoader) -> str:
    """SHA-256 over a model's equations with the types of its states, its constants, and samples of its weights.

    It is there to catch mistakes: files that differ in places not sampled have one identity.
    """
    digest = hashlib.sha256(graph.canonical().encode())
    for name in sorted(graph.constants):
        digest.update(graph.constants[name].tobytes())
    names = sorted(loader.tensors)
    for name in names[:: max(1, -(-len(names) // SAMPLES))]:
        digest.update(name.encode())
        digest.update(loader.raw(name)[:SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
