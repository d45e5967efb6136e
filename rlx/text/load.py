"""From a path to a tokenizer.

Text stage, the way in: a model as `auto_runner` takes it, a GGUF file without weights, or a Hugging Face folder.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from rlx import arguments
from rlx.errors import ModelFileError, TokenizerError, file_error
from rlx.text.from_gguf import tokenizer_from_gguf
from rlx.text.from_hf import tokenizer_from_hf
from rlx.text.tokenizer import Tokenizer
from rlx.weights.gguf import GgufFile
from rlx.weights.loader import model_format
from rlx.weights.locate import models_in, resolve_model_path

TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: what `auto_runner` takes, a GGUF file without weights, a Hugging Face folder without weights, or a
            file called `tokenizer.json`.

    Raises:
        TokenizerError: there is no tokenizer, or it is of an unknown kind.
        AmbiguousModelError: the folder holds several models.
        ModelFileError: the path or the GGUF file cannot be used.
    """
    source = arguments.path("path", path)
    try:
        is_bare = source.is_dir() and not models_in(source)
    except OSError as error:
        raise file_error(ModelFileError, "the path cannot be read", error, source) from error
    if is_bare or source.name == TOKENIZER_FILE:
        return tokenizer_from_hf(source)
    found = resolve_model_path(path)
    return _load_gguf(found) if model_format(found) == "gguf" else tokenizer_from_hf(found.parent)


def _load_gguf(path: Path) -> Tokenizer:
    file = GgufFile(path)
    try:
        return tokenizer_from_gguf(file.metadata)
    except TokenizerError as error:
        raise TokenizerError(error.what, where=f"{path}: {error.where}", hint=error.hint) from error
    finally:
        file.close()
