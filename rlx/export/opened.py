"""The way into the export stage: a path becomes a model in GGUF's terms, whichever format it is in."""

from __future__ import annotations

import os

from rlx.export.hf import model_from_hf
from rlx.export.model import ExportModel, model_from_gguf
from rlx.weights import open_weights
from rlx.weights.gguf import GgufFile
from rlx.weights.safetensors import SafetensorsFile


def open_model(path: str | os.PathLike[str]) -> ExportModel:
    """Open a GGUF file or a safetensors checkpoint with its configuration and tokenizer.

    Raises:
        ModelFileError: nothing there that can be read; its subclasses say which file breaks which rule, which key or
            tensor is missing, and what is not supported.
        TokenizerError: a checkpoint's tokenizer is missing or cannot be written as GGUF.
    """
    source = open_weights(path)
    try:
        if isinstance(source, GgufFile):
            return model_from_gguf(source)
        assert isinstance(source, SafetensorsFile)
        return model_from_hf(source)
    except BaseException:
        source.close()
        raise
