"""From a path to a tokenizer.

Text stage, the way in: a model as `auto_runner` takes it, a GGUF file without weights, or a Hugging Face folder.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from rlx.errors import TokenizerError
from rlx.text.from_gguf import tokenizer_from_gguf
from rlx.text.from_hf import tokenizer_from_hf
from rlx.text.tokenizer import Tokenizer


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: what `auto_runner` takes, a GGUF file without weights, a Hugging Face folder without weights, or a
            `tokenizer.json`.

    Raises:
        TokenizerError: there is no tokenizer, or it is of an unknown kind.
        ModelFileError: the GGUF file is malformed, or there are several in the folder.
    """
    from rlx.weights.loader import resolve_model_path
    from rlx.weights.safetensors import INDEX_NAME

    path = Path(path).expanduser()
    if not path.exists():
        raise TokenizerError("there is no such file or directory", where=path)
    if path.is_dir():
        return _load_gguf(resolve_model_path(path)) if any(path.glob("*.gguf")) else tokenizer_from_hf(path)
    if path.name.endswith((".safetensors", INDEX_NAME)):
        return tokenizer_from_hf(path.parent)
    return tokenizer_from_hf(path) if path.suffix == ".json" else _load_gguf(path)


def _load_gguf(path: Path) -> Tokenizer:
    from rlx.weights.gguf import GgufFile

    file = GgufFile(path)
    try:
        return tokenizer_from_gguf(file.metadata)
    except TokenizerError as error:
        raise TokenizerError(error.what, where=f"{path}: {error.where}", hint=error.hint) from error
    finally:
        file.close()
