"""Entry point of the export stage: opens a path of any supported format as a model in GGUF's terms."""

from __future__ import annotations

import os

from rlx.export.hf import model_from_hf
from rlx.export.model import ExportModel, model_from_gguf
from rlx.weights import open_weights
from rlx.weights.gguf import GgufFile
from rlx.weights.safetensors import SafetensorsFile


def open_model(path: str | os.PathLike[str]) -> ExportModel:
    """Opens a GGUF file or a safetensors checkpoint with its configuration and tokenizer.

    Raises:
        ModelFileError: there is no readable model; subclasses name the invalid file, the missing key or tensor, or the
            unsupported feature.
        TokenizerError: a checkpoint's tokenizer is missing, or GGUF cannot represent it.
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
