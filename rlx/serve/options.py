"""The options of the server: one field each, from which `rlx serve` and the tables of the documentation are made.

Server stage. How a model is opened and computed is said by `rlx.engine.opening.options`; here is what HTTP adds to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from os import PathLike
from pathlib import Path
from typing import Any, Self

from rlx import env
from rlx.engine.opening.options import BATCH
from rlx.errors import ArgumentError
from rlx.profile.option import check_options, option, options_of
from rlx.sampling import SampleOpts

HOST, PORT = "127.0.0.1", 8080
QUEUE = 256
BODY_MB = 64.0
FILES_MB = 512.0
LEAST_KEY = 8  # characters of a key: shorter ones are guessed
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^/\s*@]+|\*)|\*")
_DOMAIN = re.compile(r"(\*?\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
_NAME = re.compile(r"\[?[\w.:%-]+\]?")


def parse_origin(value: Any) -> str:
    """An origin as browsers write it: `https://example.org:8443`, `vscode-webview://*`, or `*` for all.

    Raises:
        ArgumentError: it is neither.
    """
    text = str(value).rstrip("/").lower()
    if not _ORIGIN.fullmatch(text):
        raise ArgumentError(f"{value!r} is no origin", hint="write scheme and host, as in https://example.org, or *")
    return text


def parse_host_name(value: Any) -> str:
    """The name of a machine without a scheme, in lower case.

    Raises:
        ArgumentError: it is none.
    """
    text = str(value).lower()
    if not _NAME.fullmatch(text):
        raise ArgumentError(f"{value!r} is no name of a machine", hint="write it as in example.org")
    return text


def parse_name(value: Any) -> str:
    """The name of a model: a text that neither begins nor ends with a blank.

    Raises:
        ArgumentError: it is no such text.
    """
    text = str(value)
    if not text or text != text.strip():
        raise ArgumentError(f"{value!r} is no name of a model", hint="write it as in gpt-4o")
    return text


def parse_domain(value: Any) -> str:
    """A host, `.example.org` for its subdomains, an address, or a network as 10.0.0.0/8.

    Raises:
        ArgumentError: it is none of these.
    """
    text = str(value).lower()
    try:
        ip_network(text.strip("[]"), strict=False)
    except ValueError:
        if not _DOMAIN.fullmatch(text):
            hint = "write it without scheme and path, as in example.org or .example.org"
            raise ArgumentError(f"{value!r} is no host", hint=hint) from None
    return text


def parse_folder(value: Any) -> Path:
    """A folder that exists.

    Raises:
        ArgumentError: it does not.
    """
    found = Path(value).expanduser()
    if not found.is_dir():
        raise ArgumentError(f"{str(value)!r} is no folder", hint="name one that exists")
    return found


def parse_key(value: Any) -> str:
    """An API key: letters that a header may have, at least 8.

    Raises:
        ArgumentError: it is shorter, or has spaces or other characters. The message does not repeat it.
    """
    text = str(value)
    if len(text) < LEAST_KEY or not text.isascii() or not text.isprintable() or " " in text:
        what = f"a key has {len(text)} characters or some that a header cannot have"
        raise ArgumentError(what, hint=f"give at least {LEAST_KEY} printable ASCII characters without spaces")
    return text


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of a server.

    Raises:
        ArgumentError: a value is out of its range.
        SamplingError, UnknownArgumentError: `sample` has one, or what is no sampling option.
    """

    host: tuple[str, ...] = option(
        (),
        "Address to listen on; 0.0.0.0 or :: for all interfaces; repeatable",
        default=HOST,
        parse=parse_host_name,
        metavar="ADDRESS",
    )
    port: int = option(PORT, "Port to listen on; 0 takes a free one", low=0, high=65535, metavar="PORT")
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send, beside RLX_API_KEY; repeatable", parse=parse_key, metavar="KEY", secret=True
    )
    api_key_file: str | PathLike[str] | None = option(None, "File with keys, one per line", metavar="FILE")
    share_prefixes: bool = option(
        False,
        "Share cached prefixes between keys; response times and cached_tokens then tell one key how prompts of others "
        "begin",
        default="off",
    )
    alias: tuple[str, ...] = option(
        (),
        "Name of the (first) model in the API; repeatable; answers have the first",
        default="the name of its file",
        parse=parse_name,
        metavar="NAME",
    )
    strict_model: bool = option(False, "Answer 404 to requests for a model of another name")
    queue: int = option(QUEUE, "Requests that may wait; further ones get 429", low=0, high=100_000, metavar="N")
    timeout: float | None = option(
        None,
        "Default and maximum of a request's `timeout`, in seconds",
        default="no limit",
        low=0.001,
        high=1_000_000,
        metavar="SECONDS",
    )
    max_tokens: int | None = option(
        None, "Default and maximum of tokens of an answer", default="the rest of the context", low=1, metavar="N"
    )
    max_body_mb: float = option(
        BODY_MB,
        "Maximum size of a request body in megabytes; larger ones get 413",
        low=0.001,
        high=10_000,
        metavar="MB",
    )
    send_timeout: float = option(
        60.0,
        "Seconds after which a client that does not read its answer is cut off",
        low=0.1,
        high=100_000,
        metavar="SECONDS",
    )
    ping: float = option(
        15.0,
        "Seconds between comments in a stream while its prompt is computed",
        low=0.01,
        high=100_000,
        metavar="SECONDS",
    )
    warm: str = option(
        "first",
        "When /health says that the server is ready: first, when an answer need not wait for a compile, and several "
        "requests at once are slower until their programs are compiled; or all, when everything is compiled",
        choices=("first", "all"),
    )
    drain: float = option(
        30.0, "Seconds that running requests get to finish at shutdown", low=0, high=100_000, metavar="SECONDS"
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server, such as https://example.org; * for all; repeatable",
        default="pages of this machine",
        parse=parse_origin,
        metavar="ORIGIN",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Further host name that requests may have, such as that of a proxy; repeatable",
        parse=parse_host_name,
        metavar="NAME",
    )
    media_domains: tuple[str, ...] = option(
        (),
        "Host from which images may be downloaded; .example.org includes subdomains; repeatable",
        default="none",
        parse=parse_domain,
        metavar="HOST",
    )
    media_path: str | PathLike[str] | None = option(
        None,
        "Folder of images that requests may name as file:NAME",
        default="none",
        parse=parse_folder,
        metavar="FOLDER",
    )
    max_images: int = option(64, "Maximum number of images of a request", low=1, high=10_000, metavar="N")
    max_image_mb: float = option(20.0, "Maximum size of an image file in megabytes", low=0.001, high=128, metavar="MB")
    max_image_megapixels: float = option(
        128.0, "Maximum megapixels of all images of a request", low=0.001, high=10_000, metavar="N"
    )
    files_mb: float = option(
        FILES_MB,
        "Maximum megabytes of all uploaded files and batch results, which are temporary; 0 for none",
        low=0,
        high=1_000_000,
        metavar="MB",
    )
    log: str | PathLike[str] = option(
        "-", "Log file, one line of JSON per request; - is stderr, none turns it off", default="-", metavar="FILE"
    )
    log_prompts: bool = option(False, "Also log prompts and answers")
    slots_endpoint: bool = option(True, "Serve /slots: what is computed, without texts", default="on")
    metrics: bool = option(True, "Serve /metrics for Prometheus", default="on")
    vllm_metrics: bool = option(False, "Repeat the metrics under vLLM's names")
    llama_metrics: bool = option(False, "Repeat the metrics under llama-server's names")
    page: bool = option(True, "Serve a chat page at /", default="on")
    otlp_endpoint: str | None = option(
        None,
        "OpenTelemetry collector for a span per request, such as http://localhost:4318; needs the extra `otel`",
        default="OTEL_EXPORTER_OTLP_ENDPOINT",
        metavar="URL",
    )
    sample: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SampleOpts`: how tokens are chosen for requests that do not say, before what the model recommends."""

    def __post_init__(self) -> None:
        check_options(self)
        SampleOpts(**self.sample)

    def resolved(self) -> Self:
        """These options with parsed values, and the keys of `api_key_file` and RLX_API_KEY among `api_key`.

        Raises:
            ArgumentError: the file cannot be read, has no key, or a key is malformed.
        """
        keys = [*self.api_key, *self._keys_of_file()]
        if (found := env.api_key()) is not None:
            keys.append(checked_key(found, "RLX_API_KEY"))
        values = {name: getattr(self, name) for name in options_of(type(self))}
        own = {
            name: each.parsed(values[name]) for name, each in options_of(type(self)).items() if values[name] is not None
        }
        return replace(self, **{**own, "api_key": tuple(dict.fromkeys(keys)), "api_key_file": None})

    def _keys_of_file(self) -> list[str]:
        if self.api_key_file is None:
            return []
        where = f"api_key_file {self.api_key_file}"
        try:
            text = Path(self.api_key_file).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ArgumentError(f"the keys cannot be read: {reason}", where=where) from error
        lines = [(at, line.strip()) for at, line in enumerate(text.splitlines(), 1)]
        keys = [checked_key(line, f"{where}, line {at}") for at, line in lines if line and not line.startswith("#")]
        if not keys:
            raise ArgumentError("the file has no key", where=where, hint="write one a line")
        return keys

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to listen on, without brackets."""
        return tuple(dict.fromkeys(each.strip("[]") for each in self.host)) or (HOST,)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return all(host in ("localhost", "::1") or host.startswith("127.") for host in self.hosts)

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * 1_000_000)


def served(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `rlx.auto_runner` for a server: it also compiles ahead what several requests at once need.

    An option `compile_ahead` stays as it is, and with `RLX_COMPILE_AHEAD=0` the default is False.
    """
    ahead = options.get("compile_ahead")
    return {**options, "compile_ahead": (BATCH if env.compile_ahead() else False) if ahead is None else ahead}


def checked_key(value: str, where: str) -> str:
    """As `parse_key`; the error says where the key came from."""
    try:
        return parse_key(value)
    except ArgumentError as error:
        raise ArgumentError(error.what, where=where, hint=error.hint) from None
