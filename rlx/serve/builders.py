"""From the events of one choice to what an API sends, in one piece or as a stream.

Server stage, below the Responses, Messages and Ollama APIs. Each has a `Builder`, which makes the objects of its
stream; an answer in one piece is made of the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from rlx.errors import GrammarError, SamplingError, ToolError
from rlx.grammar import Grammar
from rlx.sampling import SampleOpts
from rlx.serve.errors import ApiError, invalid
from rlx.serve.generation import Event, Progress
from rlx.text.tool_calls import checked_tools

if TYPE_CHECKING:
    from rlx.serve.answering import Answering
    from rlx.serve.app import Server

JsonObject = dict[str, Any]


def request_fields(server: Server, request: Request) -> JsonObject:
    """The fields of a `GenerationSpec` that do not depend on the body."""
    return {"timeout": server.options.timeout, "request_id": request.headers.get("x-request-id", "")}


def given(**values: Any) -> JsonObject:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def changed_sample(
    default: SampleOpts, changes: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> SampleOpts:
    """Sampling options with some changed.

    Args:
        names: what the request calls an option, where it has another name.

    Raises:
        ApiError: a value is out of its range.
    """
    try:
        return replace(default, **changes)
    except SamplingError as error:
        name = error.what.split()[0]
        raise invalid((names or {}).get(name, name), error.what, error.hint) from error


def check_tool(function: Mapping[str, Any], where: str, schema: str) -> None:
    """Checks a function in the form of chat.

    Args:
        where: its place in the request.
        schema: what the request calls its parameters.

    Raises:
        ApiError: it has no usable name, or its parameters are no schema of an object.
    """
    try:
        checked_tools([function], where)
    except ToolError as error:
        field = f"{where}{str(error.where).partition('.function')[2]}".replace(".parameters", f".{schema}")
        raise invalid(field, error.what, error.hint) from error


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a conversation of nothing but the message that the answer is to continue.

    Raises:
        ApiError: as said.
    """
    if all(message["role"] == "system" for message in messages[:-1]):
        hint = "begin with a message of the user"
        raise invalid("messages", "there is nothing before the message that the answer continues", hint)


def schema_grammar(schema: Any, field: str, *, lenient: bool = False) -> Grammar:
    """The grammar of a JSON schema.

    Args:
        field: what it is called in the request.
        lenient: as for `Grammar.json_schema`.

    Raises:
        ApiError: it is no schema, or has a keyword that cannot be enforced.
    """
    try:
        return Grammar.json_schema(schema, lenient=lenient)
    except GrammarError as error:
        raise invalid(field, error.what, error.hint, code="invalid_grammar") from error


class Builder(Protocol):
    """Makes the objects of a stream of the events of one choice."""

    def begin(self) -> Iterator[JsonObject]:
        """The first objects."""
        ...

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Those of one event."""
        ...

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        """The last ones of an answer that fails after it has begun."""
        ...


@dataclass(frozen=True)
class Built:
    """The pieces of a stream of a builder's objects.

    Attributes:
        builder: makes the objects.
        written: makes bytes of one.
        quiet: sent where a stream would be silent for long.
    """

    builder: Builder
    written: Callable[[JsonObject], bytes]
    quiet: bytes

    def first(self) -> bytes:
        """What comes before anything is computed."""
        return self._joined(self.builder.begin())

    def of(self, event: Event) -> bytes:
        """What an event becomes."""
        return self._joined(self.builder.push(event))

    def waiting(self, progress: Progress) -> bytes:
        """What says that the prompt is still computed."""
        return self.quiet

    def failed(self, error: ApiError) -> bytes:
        """The error in place of the rest."""
        return self._joined(self.builder.fail(error))

    def last(self) -> bytes:
        """Nothing: the builder's last object is the end."""
        return b""

    def _joined(self, objects: Iterator[JsonObject]) -> bytes:
        return b"".join(map(self.written, objects))


async def completed(answering: Answering, builder: Builder) -> list[JsonObject]:
    """All objects of an answer.

    Raises:
        RlxError: the answer fails.
    """
    try:
        found = list(builder.begin())
        while events := await answering.batch():
            found += [each for event in events for each in builder.push(event)]
        return found
    finally:
        answering.close()
