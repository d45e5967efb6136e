"""Every error a user can meet, by name.

An error says what is wrong, where, and the way out, in one message. `RlxError` is the one class to catch; the
subclasses say which part of the pipeline refused. The command line prints the message without a traceback and exits
with status 2.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

#: Hints that several readers of files give.
CUT_SHORT = "the file is cut short or damaged: download it again"


class RlxError(Exception):
    """Base of all errors raised by rlx.

    Args:
        what: the mistake, with the value that was found and the one that was expected.
        where: the file, tensor, key, node or option it was found in; a file as a path, which is never taken for the
            name of an option.
        hint: what the user can do about it.
    """

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, None if where is None else str(where), hint
        self.is_file = isinstance(where, PathLike)
        message = f"{self.where}: {what}" if self.where else what
        super().__init__(_printable(f"{message}. {_sentence(hint)}" if hint else message))


_SHORT, _ENDS = 4_000, 1_900  # characters of a message; of its begin and its end where it is longer


def _printable(message: str) -> str:
    """A message that a terminal may show: names from files can hold control characters, or be megabytes long."""
    if len(message) > _SHORT:
        message = f"{message[:_ENDS]} ... {message[-_ENDS:]}"
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in message)


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


class CustomOpError(RlxError):
    """A custom op is refused: its shape rule, meaning and kernel disagree, or rlx cannot use one of them."""


class ForeignCodeError(CompileError):
    """Object code is for another kind of machine or system. The compile cache then compiles again."""


class TargetError(RlxError):
    """A target level is unknown or this machine lacks its instructions."""


class DeviceError(RlxError):
    """A device refuses work, or was lost while it ran."""


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


class DownloadError(RlxError):
    """A model cannot be downloaded: no such repository, no access, no network, no room, or damaged bytes."""


class TokenizerError(RlxError):
    """A tokenizer cannot be built from the file, or text cannot be encoded."""


class ChatTemplateError(RlxError):
    """The model has no chat template, or it cannot be rendered."""


class ToolError(RlxError):
    """A tool, a call of one or the choice between them is invalid, or cannot be expressed in the model's format."""


class ChatError(RlxError):
    """A command or a setting of `rlx chat` is wrong, or a saved conversation cannot be read or written."""


class PromptError(RlxError):
    """A prompt is empty, longer than the context, or holds ids outside the vocabulary."""


class SamplingError(RlxError):
    """A sampling option is out of its range."""


class GrammarError(RlxError):
    """A grammar or a JSON schema cannot be used: it is malformed or too large, or a package is missing."""


class NumericalError(RlxError):
    """Logits are NaN or infinite."""


class VerificationError(RlxError):
    """With RLX_VERIFY=1, a kernel computed another value than its op means: a bug of rlx."""


class SnapshotError(ArgumentError):
    """A snapshot is of another model or another type of cache, or its file cannot be used."""


class DeadlineError(RlxError):
    """A request was not finished in the time that it was given."""


class BusyError(RlxError):
    """A runner is in use by another call or thread, or was closed; or a stream was ended by a further call."""


class MultimodalError(RlxError):
    """The model has no vision input."""


class ImageError(MultimodalError):
    """An image cannot be read, or it is one that the model cannot take."""


class ResourceError(RlxError):
    """The system refuses memory, a thread, a file descriptor, or room on a disk."""


class PoolFullError(ResourceError):
    """The pool of KV caches has no room for what a step needs; nothing was computed.

    Attributes:
        needed: bytes that are needed.
        available: bytes that are free, or can be made free.
        total: size of the pool in bytes (`kv_bytes`). If more is needed, waiting for other requests does not help.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        hint: str | None = None,
        needed: int = 0,
        available: int = 0,
        total: int = 0,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.needed, self.available, self.total = needed, available, total


class BatchError(RlxError):
    """A file of requests cannot be used, or the file for its answers holds something else."""


class OutputError(RlxError):
    """A file that was asked for cannot be written."""


_MEMORY = (
    "there is not enough memory",
    "use a smaller model, a shorter context or a smaller type of KV cache, or raise the memory limit of this process",
)
_THREADS = ("the system starts no more threads", "use fewer threads (RLX_THREADS), or raise the limit (`ulimit -u`)")
_DISK = "make room, or write to another disk"
_PATH, _PERMISSION = "check the path", "name another file, or change its permissions"
_FILE_HINTS = {
    errno.ENOENT: _PATH,
    errno.ENOTDIR: _PATH,
    errno.EISDIR: _PATH,
    errno.ENAMETOOLONG: _PATH,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "write to another disk",
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
}
_REFUSALS = {
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _THREADS,
    errno.EMFILE: ("this process may open no more files", "close some, or raise the limit (`ulimit -n`)"),
    errno.ENFILE: ("the system has no more file descriptors", "close files or programs"),
    errno.ENOSPC: ("the disk is full", _DISK),
    errno.EDQUOT: ("the disk quota is used up", _DISK),
    errno.EFBIG: ("the file is larger than the system allows", "raise the limit (`ulimit -f`), or use another disk"),
}


def file_error(kind: type[RlxError], what: str, error: Exception, where: object, hint: str | None = None) -> RlxError:
    """The error for a file that the system refuses, with the system's reason.

        raise file_error(ModelFileError, "the file cannot be read", error, path) from error

    Args:
        kind: class of the error.
        what: what cannot be done; may be empty.
        error: an `OSError`, or the `ValueError` of a name with a zero byte.
        where: the file.
        hint: the way out; by default the usual one for this reason.
    """
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    what = f"{what}: {reason}" if what else reason
    return kind(
        what,
        where=Path(where) if isinstance(where, str) else where,
        hint=hint or _FILE_HINTS.get(getattr(error, "errno", None) or 0),
    )


@contextmanager
def named_refusals(where: object = None) -> Iterator[None]:
    """Turns what the system refuses into `ResourceError`; for a `with` statement or as a decorator.

    `MemoryError`, the `OSError` of a full disk or of too many open files, and the `RuntimeError` of a thread that does
    not start say neither what was going on nor the way out.

    Args:
        where: the file, option or step, for the message.
    """
    try:
        yield
    except MemoryError as error:
        raise ResourceError(_MEMORY[0], where=where, hint=_MEMORY[1]) from error
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        what, hint = _REFUSALS[error.errno]
        raise ResourceError(what, where=where or error.filename, hint=hint) from error
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise ResourceError(_THREADS[0], where=where, hint=_THREADS[1]) from error
