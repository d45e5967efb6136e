"""Every error a user can meet, by name.

An error says what is wrong, where, and the way out, in one message. `RlxError` is the one class to catch; the
subclasses say which part of the pipeline refused. The command line prints the message without a traceback and exits
with status 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class RlxError(Exception):
    """Base of all errors raised by rlx.

    Args:
        what: the mistake, with the value that was found and the one that was expected.
        where: the file, tensor, key, node or option it was found in.
        hint: what the user can do about it.
    """

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, None if where is None else str(where), hint
        message = f"{self.where}: {what}" if self.where else what
        super().__init__(f"{message}. {_sentence(hint)}" if hint else message)


def _sentence(hint: str) -> str:
    """A hint as the second sentence of a message: with a capital, unless its first word is a name in the code."""
    first = hint.split(maxsplit=1)[0].rstrip(",:;")
    capital = hint[0].upper() if first.isalpha() and first != "rlx" else hint[0]
    return f"{capital}{hint[1:]}{'' if hint[-1] in '.?!' else '.'}"


class ArgumentError(RlxError):
    """An argument of a public function is out of its range."""


class UnknownArgumentError(ArgumentError, TypeError):
    """A function has no argument of that name; the message says what it is called here."""


class ShapeError(RlxError):
    """The operands of an op do not fit each other."""


class GraphError(RlxError):
    """A graph is not well formed: an unknown name, a missing input, a broken invariant."""


class IrSyntaxError(RlxError):
    """IR text does not parse."""


class CompileError(RlxError):
    """A graph cannot be turned into code: no kernel for an op, an unbound symbol, an object that does not load."""


class TargetError(RlxError):
    """A target level is unknown or this machine lacks its instructions."""


class ProfileError(RlxError):
    """A compile profile has an unknown key or value, or does not parse."""


class CacheError(RlxError):
    """The compile cache's folder cannot be used, or an entry is damaged or missing."""


class ModelFileError(RlxError):
    """A model file is missing, truncated or malformed."""


class AmbiguousModelError(ModelFileError):
    """A directory or a repository holds several models, and nothing says which.

    Args:
        choices: the files to choose from.
        example: one of them as the caller would name it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        hint: str | None = None,
        choices: Sequence[Path] = (),
        example: str = "",
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.choices, self.example = tuple(choices), example


class GgufError(ModelFileError):
    """A GGUF file breaks a rule of its format."""


class SafetensorsError(ModelFileError):
    """A safetensors file or its index breaks a rule of its format."""


class ConfigError(ModelFileError):
    """A metadata key or a `config.json` field is missing, of the wrong type or out of range."""


class UnsupportedModelError(ModelFileError):
    """The architecture, tensor type or feature is one that rlx does not have."""


class WeightError(ModelFileError):
    """A tensor is missing or has the wrong shape or type."""


class TokenizerError(RlxError):
    """A tokenizer cannot be built from the file, or text cannot be encoded."""


class ChatTemplateError(RlxError):
    """The model has no chat template, or it cannot be rendered."""


class PromptError(RlxError):
    """A prompt is empty, longer than the context, or holds ids outside the vocabulary."""


class SamplingError(RlxError):
    """A sampling option is out of its range."""


class NumericalError(RlxError):
    """Logits are NaN or infinite."""


class SnapshotError(ArgumentError):
    """A snapshot is of another model or another type of cache, or its file cannot be used."""


class BusyError(RlxError):
    """A runner is in use by another call or thread, or was closed; or a stream was ended by a further call."""


class MultimodalError(RlxError):
    """The model has no vision input."""
