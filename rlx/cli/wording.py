"""Errors in the words of the command line: the names of Python arguments become the options that set them."""

from __future__ import annotations

import re
from functools import partial

import click

from rlx.errors import AmbiguousModelError, ProfileError, RlxError, file_error

#: Arguments of the Python API that no option is called like, and how the command line says the same.
ARGUMENTS = {"n_new": "--max-tokens"}
#: Places in the Python API that say nothing to who types commands; `prompt` is what was typed, however.
_PYTHON = frozenset(
    "SampleOpts CompileProfile CompileCache WorkerPool Store generate generate_batch stream score embed build step "
    "bind restore decode_logits predict_logits prefill_logits sample".split()
)
_CALL = re.compile(
    r"\b(?:generate|bind|from_path|auto_runner|SampleOpts|CompileProfile)\(|rlx\.auto_runner|\bon_token\b"
)


def message(error: Exception, command: click.Command | None, name: str) -> str:
    """What a user of the command line reads about an error.

    Args:
        command: the subcommand that was run, whose options are named.
        name: what was typed to run it, such as "rlx run".
    """
    if isinstance(error, OSError) and error.strerror:
        return str(file_error(RlxError, "", error, error.filename))
    if not isinstance(error, RlxError) or isinstance(error, ProfileError):  # that one speaks of keys in a file
        return str(error)
    options = option_names(command)
    where = None if error.where in _PYTHON else options.get(error.where or "", error.where)
    where = error.where if error.is_file else where
    what, hint = (in_options(text, options) if text else text for text in (error.what, error.hint))
    if hint and _CALL.search(hint):
        hint = None  # the way out in Python
    if isinstance(error, AmbiguousModelError):
        hint = f"choose one: {name} {error.example}"
    return str(RlxError(str(what), where=where, hint=hint))


def option_names(command: click.Command | None) -> dict[str, str]:
    """Python argument -> option of this command."""
    params = command.params if command else []
    found = {str(p.name): max(p.opts, key=len) for p in params if isinstance(p, click.Option)}
    found.pop("prompt", None)  # a prompt is text, whichever way it comes
    return {**ARGUMENTS, **found}


def in_options(text: str, options: dict[str, str]) -> str:
    """`text` with arguments replaced by options: `max_seq` or max_seq=8 or max_seq; a plain word only where it stands
    as a name, in backticks, before = or as the subject at the beginning.
    """
    for name, option in options.items():
        if name not in text:
            continue
        text = re.sub(rf"`{name}`", option, text)
        text = re.sub(rf"(?<![\w.])`?{name}=(\"[^\"]*\"|'[^']*'|[\w+-]+(?:\.\w+)*)`?", partial(_given, option), text)
        text = re.sub(rf"^{name} (?=is |must )", f"{option} ", text)
        if "_" in name:
            text = re.sub(rf"(?<![\w.`\"'/-]){name}(?![\w(=/.])|(?<![\w.`\"'/-]){name}(?=\.(?:\s|$))", option, text)
    return text


def _given(option: str, found: re.Match[str]) -> str:
    value = found[1].strip("\"'")
    return option if value == "True" else f"{option} {value}"
