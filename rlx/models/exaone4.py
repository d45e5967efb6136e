"""EXAONE 4: norms only behind attention and MLP, and on each head of q and k.

A family file: the equations are those of OLMo 2. The larger models have a window in three layers of four, and no rope
in the others. Source: EXAONE 4 (arXiv 2507.11407).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.models import olmo2
from rlx.models.architectures import Architecture, by_period
from rlx.models.keys import Keys
from rlx.models.names import HEAD_NORMS, LAYER, POST_NORMS, Table


def _slides(keys: Keys, layers: int) -> list[bool]:
    """The pattern is a period, or a letter for each layer of one, such as LLLG."""
    key = "sliding_window_pattern"
    if "sliding_window" not in keys:
        return [False] * layers
    pattern = keys.get(key, 4)
    return by_period(len(pattern) if isinstance(pattern, str) else keys.integer(key, (1, 1024), 4), layers)


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """Layers without a window have rope if no layer has a window."""
    return [window is not None or not any(windows) for window in windows]


ARCHITECTURES = {
    "exaone4": Architecture(
        partial(olmo2.build, head_norms=True),
        Table((*LAYER, *HEAD_NORMS, *POST_NORMS)),
        ("exaone4",),
        gguf_period=4,
        hf_sliding=_slides,
        rope_layers=_rope_layers,
        hf_base=1_000_000.0,
    )
}
