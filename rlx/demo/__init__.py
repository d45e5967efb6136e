"""The embedded demo models, with tokenizers and chat templates: one for text, one that sees (README.md tells more)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rlx.errors import ModelFileError

TEXT, VISION = "demo", "demo-vision"  # their names wherever a model is named
FILES = {TEXT: "qwen3-5m-q8_0.gguf", VISION: "vision/gemma3-8m-q4_k_m.gguf"}
FAMILY = "qwen3"  # of the one for text, which is the default


def path(name: str = TEXT) -> Path:
    """The GGUF file of a demo model; the vision tower of the one that sees lies beside it.

    Args:
        name: a key of `FILES`.

    Raises:
        ModelFileError: the package was installed without its data.
    """
    found = Path(str(files(__name__) / FILES[name]))
    if not found.is_file():
        hint = "Install rlx again: `pip install --force-reinstall rlx`."
        raise ModelFileError("the embedded demo model is missing", where=found, hint=hint)
    return found
