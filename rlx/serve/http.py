"""HTTP bodies: their JSON, the types of fields that APIs share, what is wrong with one in words; routes and responses.

Server stage, below the APIs. What a body may become in memory is bounded before it is parsed. Bodies are pydantic
models that convert nothing and refuse unknown names: a wrong one is a 400 that names the field. A field of a published
API that rlx does nothing with is one of two kinds. `only` is for what would change the answer: another value than the
one that is so anyway is an error. `hint` is for what cannot: it is accepted, and the header `X-Rlx-Ignored` of the
response names it. A stream ends when its client goes away.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NoReturn, TypeGuard, TypeVar, get_args

import numpy as np
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rlx.arguments import nearest
from rlx.serve import record
from rlx.serve.errors import ApiError, invalid

MAX_DEPTH = 200  # of nested arrays and objects
MAX_VALUES = 1 << 19  # values and names of a body; parsed, they take 20 to 200 bytes each
VALUE_BYTES = 100  # what a value takes in memory
_MARKS = (b",", b":", b"[", b"{")  # one of them stands before each value and each name
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # one of a surrogate pair, as JSON writes it
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_IDS = 4096
MAX_BREAKERS = 64  # each is searched in the last tokens, at each token
MAX_BIASES = 16_384
MAX_BIAS_TEXTS = 1024  # of those, that are texts and no ids
MAX_BIAS_TEXT = 1 << 16  # characters of them
MAX_TOOLS = 1024
MAX_PAIRS = 64  # of metadata
MAX_TEXTS = 2048  # of one request for vectors
MAX_MESSAGES = 65_536
MAX_ID = 128  # characters of the id of a request; each event of a stream has it
MAX_TEXT = 1 << 20  # characters of a text whose tokens are asked for
MAX_SHOWN = 80
MAX_ERRORS = 1000  # of pydantic that are looked at

# ---------------------------------------------------------------------------------------------- JSON


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is something else, not in UTF-8, nested too deeply, or has too many values.
    """
    if not body.strip():
        raise invalid(None, "the body is empty", "send a JSON object")
    if not (encoding := json.detect_encoding(body)).startswith("utf-8"):  # `check_size` reads bytes of UTF-8
        raise invalid(None, f"the body is in {encoding}", "send JSON in UTF-8")
    check_size(body)
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        what = str(error).partition("; use sys.")[0]  # Python's advice about long numbers is not for clients
        raise invalid(None, f"the body is no JSON: {what}") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body is a JSON {_NAMES[type(found)]}", "send a JSON object")
    if _HALF.search(body) and (path := _half_pair(found)) is not None:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        what = "it has half of a surrogate pair, such as \\ud83d without what follows"
        raise invalid(place or None, what, "cut texts between characters")
    return found


def _half_pair(value: Any) -> list[str | int] | None:
    """Where a text is that no UTF-8 can hold: the names and numbers that lead there; None if there is none."""
    if isinstance(value, str):
        return None if _is_text(value) else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in pairs:
        if isinstance(part, str) and not _is_text(part):
            return []
        if (path := _half_pair(each)) is not None:
            return [part, *path]
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def count_of(body: bytes | bytearray) -> int:
    """How many values and names the JSON of a body has at most: an estimate in which texts may count, too."""
    return sum(map(body.count, _MARKS))


def check_size(body: bytes, what: str = "the body") -> None:
    """Refuses a body that would take far more memory, or deeper calls, than its length says.

    Texts do not count: code has many braces. A body is cut at its quotes only if it may be too large with them. Up to
    the first error of a malformed one everything is counted as the parser would read it, and there the parser stops.

    Args:
        what: what the message calls it.

    Raises:
        ApiError: it has too many values or levels.
    """
    many = count_of(body) > MAX_VALUES
    if not many and body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_VALUES:
        raise _too_many(what)
    outside = b"".join(bare.split(b'"')[::2])
    if many and count_of(outside) > MAX_VALUES:
        raise _too_many(what)
    steps = _STEPS[np.frombuffer(outside.translate(None, _NOT_BRACKETS), np.uint8)]
    if len(steps) and np.cumsum(steps, dtype=np.int64).max() > MAX_DEPTH:
        raise invalid(None, f"{what} is nested more than {MAX_DEPTH} levels deep")


def _too_many(what: str) -> ApiError:
    hint = "send it in several requests"
    return ApiError(413, f"{what} has more than {MAX_VALUES} values", code="body_too_large", hint=hint)


_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


# ---------------------------------------------------------------------------------------------- fields

B = TypeVar("B", bound="Body")


def _bounded(schema: Any) -> Any:
    """A schema whose arrays have a limit and end at their first error."""
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _bounded(value) for name, value in schema.items()}
    return {"max_length": MAX_VALUES, **found, "fail_fast": True} if found.get("type") == "list" else found


class Body(BaseModel):
    """A request body: a wrong type and an unknown name are errors.

    A body with a million errors costs no more than one with a few: an array ends at its first one, and of unknown names
    the first counts.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        found: CoreSchema = _bounded(handler(source))
        return found

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, found: Any) -> Any:
        if not isinstance(found, dict) or len(found) <= len(cls.model_fields):
            return found
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((name for name in found if name not in known), None)
        return {name: value for name, value in found.items() if name in known or name == first}


@dataclass(frozen=True)
class AtMost:
    """Bounds the entries of a field that is an array or an object, before one of them is looked at."""

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        for each in found.get("anyOf", [found]):
            if name := {"array": "maxItems", "object": "maxProperties"}.get(each.get("type")):
                each[name] = self.count
        return found

    def _check(self, found: Any) -> Any:
        if isinstance(found, dict | list) and len(found) > self.count:
            raise PydanticCustomError("too_many", "at most {count} entries", {"count": self.count})
        return found


def validated(kind: type[B], found: dict[str, Any]) -> B:
    """The body that a JSON object is.

    Raises:
        ApiError: it is none; the error names the field.
    """
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise body_error(error.errors(include_url=False)[:MAX_ERRORS], found, kind) from None


def only(*values: Any, instead: str = "leave the field out") -> AfterValidator:
    """A field of other servers that rlx has no use for: these values, and null, change nothing; others are refused.

    Args:
        instead: the way out.
    """

    def check(found: Any) -> Any:
        if found is None or is_one_of(found, values):
            return found
        raise PydanticCustomError("unsupported", "is not supported", {"instead": instead})

    return AfterValidator(check)


@dataclass(frozen=True, eq=False)  # `Annotated` takes equal ones for the same, and 0 equals false
class Hint:
    """Marks a field that cannot change the answer: any value is accepted, and a header of the response names the field
    if its value asks for something (`ignored_fields`).

    Attributes:
        same: values that ask for what is so anyway.
    """

    same: tuple[Any, ...] = ()


def hint(*same: Any) -> Hint:
    """A field that rlx has no use for, as a hint; these values, and null, ask for what is so anyway."""
    return Hint(same)


def hints(names: str = "", /, **same: Sequence[Any]) -> Callable[[type[B]], type[B]]:
    """Adds fields to a body, as `hint` makes them.

    Args:
        names: of fields of which every value but null asks for something.
        same: field -> values that ask for what is so anyway.
    """
    return _with_fields(hint, names, same)


def unsupported(names: str = "", /, **same: Sequence[Any]) -> Callable[[type[B]], type[B]]:
    """Adds fields to a body, as `only` makes them.

    Args:
        names: of fields of which every value but null is refused.
        same: field -> values that change nothing.
    """
    return _with_fields(only, names, same)


def _with_fields(
    make: Callable[..., Any], names: str, same: Mapping[str, Sequence[Any]]
) -> Callable[[type[B]], type[B]]:
    every = {**same, **dict.fromkeys(names.split(), ())}
    fields: dict[str, Any] = {name: (Annotated[Any, make(*values)], None) for name, values in every.items()}

    def add(kind: type[B]) -> type[B]:
        named: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        return create_model(kind.__name__, __base__=kind, **named, **fields)

    return add


Anyway = Any
"""A field that rlx does as it says, without being asked, or that the answer repeats."""


def ignored_fields(kind: type[Body], body: Mapping[str, Any]) -> list[str]:
    """The names of hints that a body has and that change nothing, such as `text.verbosity`."""
    found = []
    for name, same, inner in _hints(kind):
        value = body.get(name)
        if value is not None and same is not None and not is_one_of(value, same):
            found.append(name)
        elif inner is not None and isinstance(value, Mapping):
            found += [f"{name}.{each}" for each in ignored_fields(inner, value)]
    return found


@cache
def _hints(kind: type[Body]) -> list[tuple[str, tuple[Any, ...] | None, type[Body] | None]]:
    """The fields that are hints, with the values that ask for what is so anyway, and those that are bodies."""
    found = []
    for own, field in kind.model_fields.items():
        same = next((each.same for each in field.metadata if isinstance(each, Hint)), None)
        inner = next((each for each in (field.annotation, *get_args(field.annotation)) if _is_body(each)), None)
        if same is not None or inner is not None:
            found.append((field.alias or own, same, inner))
    return found


def is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value is one of several, of the same type: 0 is not false."""
    return any(type(value) is type(each) and value == each for each in values)


def _is_body(kind: Any) -> TypeGuard[type[Body]]:
    return isinstance(kind, type) and issubclass(kind, Body)


def body_error(errors: Sequence[Mapping[str, Any]], body: Any, kind: type[Body] | None = None) -> ApiError:
    """The 400 of a body that does not validate; it names the first field.

    Args:
        errors: of pydantic.
        body: what was sent.
        kind: what it should be.
    """
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    field = [part for part in (unknown or errors)[0]["loc"] if part != "body"][:1]
    of_field = [error for error in unknown or errors if [part for part in error["loc"] if part != "body"][:1] == field]
    first = max(of_field, key=lambda error: len(_place(error, body)[0]))  # the deepest one knows most
    place, found = _place(first, body)
    if first["type"] == "missing":
        return invalid(place, "it is required", code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        close = nearest(place, _known(kind, first["loc"])) if kind is not None else []
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        return invalid(place, "there is no such field", hint, code="unknown_parameter")
    if first["type"] == "unsupported":
        what = f"{shown(found)} is not supported"
        return invalid(place, what, first["ctx"]["instead"], code="unsupported_parameter")
    same = [error for error in errors if _place(error, body)[0] == place]
    return invalid(place, f"expected {' or '.join(dict.fromkeys(map(_expected, same)))}, found {shown(found)}")


def body_of(route: Any) -> type[Body] | None:
    """The class of the bodies of a route; None if it has none."""
    found = getattr(getattr(getattr(route, "body_field", None), "field_info", None), "annotation", None)
    return found if _is_body(found) else None


def _known(kind: type[Body], place: Sequence[Any]) -> list[str]:
    """The fields that there are where an unknown one stands."""
    prefix = ""
    for part in place[:-1]:
        inner = next((each for name, _, each in _hints(kind) if name == part), None)
        if inner is not None:
            prefix, kind = f"{prefix}{part}.", inner
    return [f"{prefix}{name}" for name in kind.model_fields]


_EXPECTED = {
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number",
    "bool_type": "true or false", "list_type": "an array", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object", "finite_number": "a finite number", "int_parsing": "an integer",
}  # fmt: skip


def _expected(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "greater_than":
            return f"more than {context['gt']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case "string_too_short":
            return "a string that is not empty"
        case "string_too_long":
            return f"a string of at most {context['max_length']} characters"
        case "literal_error":
            return str(context["expected"]).replace("False", "false")
        case "too_short":
            return "at least one entry" if context["min_length"] == 1 else f"at least {context['min_length']} entries"
        case "too_long":
            return f"at most {context['max_length']} entries"
        case kind:
            return _EXPECTED.get(kind, str(error["msg"]))


def _place(error: Mapping[str, Any], body: Any) -> tuple[str, Any]:
    """The name of a field such as `messages[2].content`, and its value. Names of pydantic's branches are left out."""
    name, value = "", body
    parts = [part for part in error["loc"] if part != "body"]
    for i, part in enumerate(parts):
        if isinstance(part, int):
            if not (isinstance(value, list) and part < len(value)):
                continue
            name, value = f"{name}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (i == len(parts) - 1 and error["type"] == "missing")):
            name, value = f"{name}.{part}".lstrip("."), value.get(part)
    return name, value


def shown(value: Any) -> str:
    """A value as JSON, shortened; no more of it is written than that."""
    text = ""
    for part in _ENCODER.iterencode(value):
        text += part[: MAX_SHOWN + 1]
        if len(text) > MAX_SHOWN:
            return f"{text[:MAX_SHOWN]}..."
    return text


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


T = TypeVar("T")

LARGE = 64 << 10  # bytes of a body from which on it is parsed outside of the event loop
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


async def in_thread(work: Callable[[], T], limiter: CapacityLimiter | None = None) -> T:
    """The result of `work`, which runs in a worker thread; with `limiter`, when it has a free token."""
    return await to_thread.run_sync(work, limiter=limiter)


# ---------------------------------------------------------------------------------------------- routes


class OpenRoute(APIRoute):
    """A route that reads bodies strictly, whatever content type they have: for clients such as `curl -d`.

    FastAPI knows the route, and its document shows it. A body is read and checked here, once.
    """

    def check(self, request: Request) -> None:
        """Refuses a request before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = body_of(self)
        if kind is None:
            return super().get_route_handler()
        answer, takes_request = self.endpoint, "request" in inspect.signature(self.endpoint).parameters

        async def handle(request: Request) -> Response:
            self.check(request)
            sent = await request.body()
            body = _read(kind, sent) if len(sent) < LARGE else await in_thread(lambda: _read(kind, sent))
            found = await (answer(body, request) if takes_request else answer(body))
            return found if isinstance(found, Response) else json_response(found)

        return handle


def _read(kind: type[Body], sent: bytes) -> Body:
    """The body that bytes are; the record of the request notes the fields of it that are ignored."""
    found = parsed(sent)
    body = validated(kind, found)
    if names := ignored_fields(kind, found):
        record.ignore(*names)
    return body


class JsonRoute(OpenRoute):
    """An `OpenRoute` for bodies that are sent as JSON."""

    def check(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            found = f"is {kind!r}" if kind else "is missing"
            raise ApiError(415, f"the content type {found}", hint="send the header Content-Type: application/json")
        if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
            raise ApiError(415, f"the content encoding is {coding!r}", hint="send the body uncompressed")


def new_router(**options: Any) -> APIRouter:
    """A router for JSON bodies."""
    return APIRouter(route_class=JsonRoute, **options)


# ---------------------------------------------------------------------------------------------- responses


def json_bytes(value: Any) -> bytes:
    """JSON as compactly as it goes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The response that is a JSON value."""
    return Response(json_bytes(value), status, headers, "application/json")


def json_rows(fields: Mapping[str, Any], name: str, rows: Iterable[Any]) -> bytes:
    """An object with these fields, and a long array written row by row: other threads have their turns between them."""
    return b'%b,"%b":[%b]}' % (json_bytes(fields)[:-1], name.encode(), b",".join(map(json_bytes, rows)))


DONE = b"data: [DONE]\n\n"
"""The last server-sent event of OpenAI's streams."""


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event, whose data is a JSON value."""
    head = "" if name is None else f"event: {name}\n"
    return b"%bdata: %b\n\n" % (head.encode(), json_bytes(value))


def comment(text: str) -> bytes:
    """A line that clients ignore, so that nobody on the way takes the connection for dead."""
    return f": {text}\n\n".encode()


class Stream(Response):
    """A response that is sent in pieces as they come. When the client goes away the iterator is closed at once.

    Args:
        pieces: what is sent; its `aclose` is called at the end.
        media_type: `EVENTS` or `LINES`.
        headers: further headers.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], media_type: str = EVENTS, headers: Mapping[str, str] | None = None
    ) -> None:
        self.pieces, self.status_code, self.background = pieces, 200, None
        self._began = False
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def probe() -> None:
            if self._began:
                quiet = b":\n\n" if self.media_type == EVENTS else b" "
                await send({"type": "http.response.body", "body": quiet, "more_body": True})

        await until_gone(self._send(send), receive, probe)

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._began = True
            async for piece in self.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._began = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self.pieces, "aclose", None)
            if close is not None:
                await close()


def again(body: bytes, receive: Receive) -> Receive:
    """The `receive` of a request whose body was read."""
    sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return sent.pop() if sent else await receive()

    return next_message


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def until_gone(
    work: Awaitable[T], receive: Receive, probe: Callable[[], Awaitable[None]] | None = None
) -> T | None:
    """The result of `work`, which is cancelled when the client closes the connection; then None.

    Args:
        probe: called when the client sends no more, which it may have closed as well: sends it something.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive, probe))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _disconnect(receive: Receive, probe: Callable[[], Awaitable[None]] | None) -> None:
    while (await receive())["type"] != "http.disconnect":
        if probe is not None:
            await probe()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, for an answer in one piece.

    Raises:
        ClientGone: the client closed the connection before; `work` was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await until_gone(asyncio.shield(task), request.receive)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:  # also where the request itself was cancelled, as by a server that ends
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
