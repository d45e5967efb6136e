"""The Jinja environment of chat templates: the dialect that models are published with.

Text stage: a program of `confined.py`, which runs in a process with hard limits; `chat.py` calls it. The dialect is
that of `transformers`: blocks swallow the newline after them and the blanks before them, loops can `break` and
`continue`, `tojson` does not escape HTML, and there are `raise_exception`, `strftime_now` and the `generation` tag.

jinja2's sandbox keeps a template away from Python's internals; the process bounds its time, memory and reach.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 64 << 20  # of a result


class Refused(Exception):
    """The template called `raise_exception`."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model says, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def handle(request: dict[str, Any]) -> str:
    """The text that `request["template"]` makes of `request["values"]`."""
    parts: list[str] = []
    size = 0
    for part in _compiled(request["template"]).generate(request["values"]):
        parts.append(part)
        size += len(part)
        if size > MAX_CHARS:
            raise ValueError(f"the result has more than {MAX_CHARS} characters")
    return "".join(parts)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _ENVIRONMENT.from_string(template)


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # which imports a module when called

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of bounds")


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    """The local time; templates put the date into the system message."""
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_ENVIRONMENT = _Environment()


def prepare() -> None:
    """Loads what jinja2 imports late: afterwards the process can open no file."""
    with suppress(ZeroDivisionError):
        _ENVIRONMENT.from_string("{{ strftime_now('%Y') ~ 1 / 0 }}").render()
