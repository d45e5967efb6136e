"""From a path to a tokenizer.

Text stage, the way in: a GGUF file with or without weights, a Hugging Face folder, a `tokenizer.json`.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from rlx.errors import TokenizerError
from rlx.text.from_gguf import tokenizer_from_gguf
from rlx.text.from_hf import tokenizer_from_hf
from rlx.text.tokenizer import Tokenizer


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file (with or without weights), a Hugging Face folder or a `tokenizer.json`.

    Raises:
        TokenizerError: there is no tokenizer, or it is of an unknown kind.
        GgufError: the GGUF file is malformed.
    """
    path = Path(path)
    if not path.exists():
        raise TokenizerError("there is no such file or folder", where=path)
    if path.is_dir() or path.suffix == ".json":
        return tokenizer_from_hf(path)
    return _load_gguf(path)


def _load_gguf(path: Path) -> Tokenizer:
    from rlx.weights.gguf import GgufFile

    file = GgufFile(path)
    try:
        return tokenizer_from_gguf(file.metadata)
    except TokenizerError as error:
        raise TokenizerError(error.what, where=f"{path}: {error.where}", hint=error.hint) from error
    finally:
        file.close()
