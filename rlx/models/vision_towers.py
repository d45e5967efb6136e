"""The towers by family: which graphs a tower has.

Part of the models stage, over the family files; `rlx.vision` builds and runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlx.ir.graph import Graph
from rlx.models import vision_gemma3, vision_gemma4, vision_qwen35
from rlx.models.vision import TowerModel

Build = Callable[[TowerModel], Graph]


class TowerGraphs(NamedTuple):
    """The builders of a family's graphs, see `rlx.models.vision`."""

    embedding: Build
    keys: Build
    layer: Build
    head: Build
    deepstack: Build | None = None


TOWERS = {
    "qwen35": TowerGraphs(
        vision_qwen35.embedding, vision_qwen35.keys, vision_qwen35.layer, vision_qwen35.head, vision_qwen35.deepstack
    ),
    "gemma3": TowerGraphs(vision_gemma3.embedding, vision_gemma3.keys, vision_gemma3.layer, vision_gemma3.head),
    "gemma4": TowerGraphs(vision_gemma4.embedding, vision_gemma4.keys, vision_gemma4.layer, vision_gemma4.head),
    "gemma4_unified": TowerGraphs(
        vision_gemma4.unified_embedding, vision_gemma4.keys, vision_gemma4.layer, vision_gemma4.unified_head
    ),
}
