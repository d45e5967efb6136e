"""What a model is called in requests and answers, where nobody says.

Serve stage, before a model is opened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlx.errors import ArgumentError

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def split_name(text: str) -> tuple[str | None, str]:
    """The name and the rest of `NAME=PATH`; without a name None, and the text. The path of a file that exists has none.

    >>> split_name("small=models/qwen3:Q8_0")
    ('small', 'models/qwen3:Q8_0')
    """
    name, equals, path = text.partition("=")
    is_name = equals and name and path and "/" not in name and not Path(text).expanduser().exists()
    return (name, path) if is_name else (None, text)


def check_names(models: Sequence[Sequence[str]]) -> None:
    """Refuses models that requests cannot tell apart.

    Args:
        models: the names of each.

    Raises:
        ArgumentError: there is no model, or two have the same name.
    """
    if not models:
        raise ArgumentError("there is no model", where="model")
    uses = Counter(name for names in models for name in set(names))
    if double := next((name for name in uses if uses[name] > 1), None):
        hint = "give one of them another name, as in other=model.gguf"
        raise ArgumentError(f"two models are called {double!r}", where="model", hint=hint)


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
