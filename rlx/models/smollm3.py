"""SmolLM3: llama without rope in every fourth layer.

A family file: the equations of one decoder, top to bottom, and what its files say. Sources: the published
implementation in transformers; layers without rope (arXiv 2501.18795).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.models import llama
from rlx.models.architectures import Architecture, by_period
from rlx.models.keys import Keys
from rlx.models.names import LAYER, PRE_NORMS, Table


def _rope_layers(keys: Keys, windows: Sequence[int | None]) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer with rope. Files without it have none in every fourth."""
    return _have_rope(keys, len(windows))


def _sliding(keys: Keys, layers: int) -> list[bool]:
    """If `use_sliding_window` is true, the layers without rope have a window."""
    slides = keys.flag("use_sliding_window", False) and "sliding_window" in keys
    return [slides and not has_rope for has_rope in _have_rope(keys, layers)]


def _have_rope(keys: Keys, layers: int) -> list[bool]:
    key = "no_rope_layers"
    if key in keys:
        return [bool(has) for has in keys.integers(key, (0, 1), layers)]
    return by_period(keys.integer("no_rope_layer_interval", (1, 1024), 4), layers)


ARCHITECTURES = {
    "smollm3": Architecture(
        llama.build,
        Table((*LAYER, *PRE_NORMS)),
        ("smollm3",),
        gguf_rope="interleaved",
        rope_layers=_rope_layers,
        hf_sliding=_sliding,
        hf_base=2_000_000.0,
    )
}
