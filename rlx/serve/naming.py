"""What a model is called in requests and answers, where nobody says.

Serve stage, before a model is opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def names_of(path: str | Path, given: str | None, aliases: Sequence[str] = ()) -> list[str]:
    """What a model is called: by `aliases`, by its file, and as the user wrote it. No name shows a folder.

    Args:
        given: how the user named the model, or None.
    """
    written = [] if given is None else [Path(given).name if Path(given).exists() else given]
    return list(dict.fromkeys([*aliases, model_name(path), *written]))


def model_name(path: str | Path) -> str:
    """The name of a model: that of its file or folder, without suffix; `demo` for the demo model.

    >>> model_name("/models/Qwen3-0.6B-Q4_K_M.gguf")
    'Qwen3-0.6B-Q4_K_M'
    >>> model_name("/models/big-00001-of-00003.gguf")
    'big'
    """
    from rlx import demo

    for name in (demo.TEXT, demo.VISION):
        if Path(path) == demo.path(name):
            return name
    found = Path(path)
    if found.suffix not in (".gguf", ".safetensors"):
        return found.resolve().name
    plain = _SHARD.sub("", found.stem)
    return plain if plain != "model" else found.resolve().parent.name
