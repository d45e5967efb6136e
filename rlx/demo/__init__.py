"""The embedded demo model: five million parameters, a tokenizer and a chat template (its README.md tells more)."""

from __future__ import annotations

from pathlib import Path

from rlx.errors import ModelFileError

FILE = "qwen3-5m-q8_0.gguf"
FAMILY = "qwen3"


def path() -> Path:
    """The demo model's GGUF file; `ModelFileError` if the package was installed without its data."""
    from importlib.resources import files

    found = Path(str(files(__name__) / FILE))
    if not found.is_file():
        hint = "Install rlx again: `pip install --force-reinstall rlx`."
        raise ModelFileError("the embedded demo model is missing", where=found, hint=hint)
    return found
