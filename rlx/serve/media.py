"""Images of a request: from the forms of the APIs to pixels, with limits that hold before anything is decoded.

Server stage, used by all APIs. Their translations put an `ImageSource` where a message has an image, or leave OpenAI's
part `image_url` there. `load_images` makes pixels of them, in a worker thread. What a client sends names a file or an
address only where the server's options allow it. A part that is neither a text nor an image reaches no template.

An address in a request is a way to make the server talk to machines that the client cannot reach itself. So the host
must be on the list, and the connection goes to an IP address that was checked: a name that points to a private address
is refused, at the first request and at every redirect. An address that stands in the URL itself is taken as it is
written: one that wraps another, such as ::ffff:127.0.0.1, is not the other.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from rlx import platform
from rlx.closing import on_error
from rlx.errors import ImageError, MultimodalError
from rlx.vision import decode
from rlx.vision.image import Image

if TYPE_CHECKING:
    from rlx.serve.options import ServerOptions


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_REDIRECTS = 3
MAX_ADDRESSES = 4  # of a name, that are tried
LOCALHOST = "localhost"  # the one name that may point to a loopback address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_CHUNK = 1 << 16
_HINT = 'give an address such as "https://example.com/image.png"'
_SAFE = "/%?&=:;,+@!$'()*~[]"  # of a path and a query, which stay as they are


@dataclass(frozen=True)
class Allowed:
    """Hosts that may be asked.

    Attributes:
        names: host names, in lower case; one that begins with a dot stands for its subdomains.
        networks: addresses that may be asked by their number, and that names may point to though they are private.
    """

    names: frozenset[str]
    networks: tuple[Network, ...]

    @staticmethod
    def of(domains: Sequence[str]) -> Allowed:
        """Those of a list of names, addresses and networks.

        Example:
            >>> Allowed.of(["images.example.com", ".example.org", "10.1.0.0/16"]).has_name("a.example.org")
            True
        """
        names, networks = set(), []
        for text in domains:
            try:
                networks.append(ipaddress.ip_network(text.strip("[]"), strict=False))
            except ValueError:
                names.add(text.lower().removeprefix("*").rstrip("."))
        return Allowed(frozenset(names), tuple(networks))

    def has_name(self, host: str) -> bool:
        """Whether a host name is on the list, or below one that is."""
        labels = host.split(".")
        return host in self.names or any(f".{'.'.join(labels[i:])}" in self.names for i in range(1, len(labels)))

    def has_address(self, address: Address) -> bool:
        """Whether an address is on the list."""
        return any(address in network for network in self.networks)

    def check(self, host: str, addresses: Sequence[Address]) -> None:
        """Refuses a host that is not on the list, or that points to a private address.

        Raises:
            ImageError: as said.
        """
        is_number = _as_address(host) is not None
        if not (all(map(self.has_address, addresses)) if is_number else self.has_name(host)):
            hint = "send the image as a data URI, or start the server with --media-domains HOST"
            raise ImageError(f"the server downloads no images from {host!r}", hint=hint)
        for address in addresses:
            is_local = host == LOCALHOST and address.is_loopback
            if not is_local and not self.has_address(address) and not _is_public(address):
                hint = "name the address itself in --media-domains if it is meant"
                raise ImageError(f"{host!r} points to {address}, which is no public address", hint=hint)


def download(url: str, allowed: Allowed, max_bytes: int, seconds: float) -> bytes:
    """The body behind an address. It blocks; call it in a worker thread.

    Args:
        url: an http or https address.
        max_bytes: of the body.
        seconds: for everything, redirects included.

    Raises:
        ImageError: the host may not be asked, does not answer in time, or answers with anything but a file of at most
            `max_bytes`.
    """
    end = time.monotonic() + seconds
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked_parts(url)
        host = (parts.hostname or "").rstrip(".").lower()
        if _as_address(host) is None and not allowed.has_name(host):
            allowed.check(host, ())  # before its name is looked up: a lookup talks to the outside, too
        try:
            found = _request(parts, host, allowed, max_bytes, end)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= end
            why = f"it took more than {seconds:g} s" if late else str(error) or type(error).__name__
            raise ImageError(
                f"the image cannot be downloaded from {host!r}: {why}", hint="check the address"
            ) from error
        if isinstance(found, bytes):
            return found
        url = _joined(url, found)
    what = f"the address of an image redirects more than {MAX_REDIRECTS} times"
    raise ImageError(what, hint="give the address of the image itself")


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise ImageError(f"the address of an image redirects to a malformed one: {error}", hint=_HINT) from error


def _checked_parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ImageError(f"the address of an image is malformed: {error}", hint=_HINT) from error
    if not good or parts.username is not None or not url.isprintable() or "\\" in url:  # some read \ as /
        raise ImageError("the address of an image is malformed, or has a user name or a backslash", hint=_HINT)
    return parts


def _request(parts: SplitResult, host: str, allowed: Allowed, max_bytes: int, end: float) -> bytes | str:
    """The body, or the address that the server redirects to."""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = _addresses(host, port)
    allowed.check(host, addresses)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = _connected(addresses, port, host, parts.scheme == "https", end)
    try:
        with _ended(connection.sock, end):
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "rlx"}
            headers["Host"] = parts.netloc
            connection.request("GET", quote(path, safe=_SAFE), headers=headers)
            found = _answer(connection.getresponse(), max_bytes)
        _left(end)  # a body that was cut off looks complete
        return found
    finally:
        connection.close()


def _answer(response: http.client.HTTPResponse, max_bytes: int) -> bytes | str:
    location = response.getheader("Location")
    if response.status in (301, 302, 303, 307, 308) and location:
        return location
    if response.status != 200:
        raise ImageError(
            f"the server of an image answers {response.status} {response.reason}", hint="check the address"
        )
    large = ImageError(f"the image has more than {max_bytes / 1e6:g} MB", hint="make the image smaller")
    lengths = response.headers.get_all("Content-Length", [])
    if len(lengths) > 1 or not all(length.isascii() and length.isdigit() for length in lengths):
        raise ImageError("the server of an image declares no sound length", hint="give the image in another way")
    if (response.length or 0) > max_bytes:
        raise large
    body = bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise large
    if response.length:  # a connection that ends early raises nothing
        raise ImageError(f"the image breaks off {response.length} bytes before its end", hint="try again")
    return bytes(body)


def _addresses(host: str, port: int) -> list[Address]:
    """The addresses of a host."""
    if (number := _as_address(host)) is not None:
        return [number]
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = dict.fromkeys(ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows)
    return list(found)[:MAX_ADDRESSES]


def _as_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _unwrapped(address: Address) -> Address:
    """The IPv4 address in an IPv6 address that only wraps one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address
    return address


def _is_public(address: Address) -> bool:
    inner = _unwrapped(address)
    return inner.is_global and not inner.is_multicast


def _connected(addresses: Sequence[Address], port: int, host: str, tls: bool, end: float) -> http.client.HTTPConnection:
    """A connection to the first address that accepts one. The name is not looked up again: it could point elsewhere."""
    context = ssl.create_default_context() if tls else None
    failure: OSError = OSError("the name has no address")
    for address in addresses:
        try:
            sock = socket.create_connection((str(address), port), timeout=_left(end))
            with on_error(sock.close):
                sock = context.wrap_socket(sock, server_hostname=host) if context else sock
        except OSError as error:
            failure = error
            continue
        connection = http.client.HTTPConnection(str(address), port)
        connection.sock, connection.auto_open = sock, 0  # it never connects by itself
        return connection
    raise failure


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left


@contextmanager
def _ended(sock: socket.socket, end: float) -> Iterator[None]:
    """Shuts a connection down when the time is over: a timeout of a socket begins anew with every byte."""

    def shut() -> None:
        with suppress(OSError):  # it is closed already
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(end), shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


SECONDS = 10.0  # for one download, redirects included
_FLAGS = os.O_RDONLY | platform.flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")


Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ImageSource:
    """An image as a request names it.

    Attributes:
        url: a data URI, or an address of the schemes http, https or file.
        where: the field of the request, such as "messages[0].content[1].image_url", for messages.
    """

    url: str = field(repr=False)
    where: str

    @property
    def part(self) -> dict[str, Any]:
        """The part of a message."""
        return {"type": "image", "image": self}


def base64_source(data: Any, where: str) -> ImageSource:
    """The source of an image whose file is given in base64."""
    if not isinstance(data, str):
        raise ImageError(f"an image is a {type(data).__name__}", where=where, hint="give its file in base64")
    return ImageSource(data if data[:5].lower() == "data:" else f"data:;base64,{data}", where)


def load_images(messages: Sequence[Mapping[str, Any]], options: ServerOptions, takes_images: bool) -> Messages:
    """Messages whose images are pixels.

    Args:
        messages: contents are texts or lists of parts; images are parts `image_url` or `ImageSource.part`.
        takes_images: whether the model does; if not, nothing is downloaded or decoded.

    Raises:
        MultimodalError: there is an image, and the model takes none; or a part that is neither a text nor an image.
        ImageError: an image cannot be read, is too large, or may not be read; or there are too many.
    """
    reader = _Reader(options, takes_images)
    return [_read_message(message, i, reader) for i, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], number: int, reader: _Reader) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    where = f"messages[{number}].content"
    return {**message, "content": [_read_part(part, f"{where}[{i}]", reader) for i, part in enumerate(content)]}


def _read_part(part: Any, where: str, reader: _Reader) -> Any:
    if not isinstance(part, Mapping):
        return part  # refused with the other malformed messages
    with_url = part.get("type") in ("image_url", "input_image")
    source = _url_source(part, f"{where}.image_url") if with_url else part.get("image")
    if isinstance(source, ImageSource):
        return {"type": "image", "image": reader.read(source)}
    if part.get("type") == "image":
        hint = 'give {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise ImageError("images of this form are not read here", where=where, hint=hint)
    if part.get("type") != "text":
        takes = "text and images" if reader.takes_images else "text only"
        what = f"a part has type {part.get('type')!r}, and the model takes {takes}"
        raise MultimodalError(what, where=where, hint="leave the part out")
    return part


def _url_source(part: Mapping[str, Any], where: str) -> ImageSource:
    """The image of OpenAI's part, `{"type": "image_url", "image_url": {"url": ...}}`."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, Mapping) else found
    if not isinstance(url, str):
        raise ImageError("the part has no address", where=where, hint='give {"url": "data:image/png;base64,..."}')
    return ImageSource(url, where)


class _Reader:
    """Reads the images of one request, and counts them and their pixels."""

    def __init__(self, options: ServerOptions, takes_images: bool) -> None:
        self._options, self.takes_images = options, takes_images
        self._count, self._pixels = 0, int(options.max_image_megapixels * (1 << 20))
        self._bytes, self._allowed = int(options.max_image_mb * 1_000_000), Allowed.of(options.media_domains)

    def read(self, source: ImageSource) -> Image:
        """The pixels of an image."""
        if not self.takes_images:
            hint = "leave the image out, or serve a model with a vision tower (`--mmproj`)"
            raise MultimodalError("the model takes no images", where=source.where, hint=hint)
        self._count += 1
        if self._count > self._options.max_images:
            what = f"the request has more than {self._options.max_images} images"
            raise ImageError(what, where=source.where, hint="leave older images out")
        try:
            image = Image.from_pixels(decode.from_bytes(self._file(source.url), max_pixels=max(1, self._pixels)))
        except ImageError as error:
            raise ImageError(error.what, where=source.where, hint=error.hint) from error
        self._pixels -= image.size[0] * image.size[1]
        return image

    def _file(self, url: str) -> bytes:
        """The bytes of an image's file."""
        scheme = url.partition(":")[0].strip().lower()
        if scheme == "data":
            return decode.file_of_uri(url, None, self._bytes)
        if scheme in ("http", "https"):
            return download(url, self._allowed, self._bytes, SECONDS)
        if scheme == "file":
            return _of_file(url, self._options.media_path, self._bytes)
        hint = 'give "data:image/png;base64,...", or an http(s) or file address that the server allows'
        raise ImageError(f"an image is given as {decode.short(url)!r}, which is no address", hint=hint)


def _of_file(url: str, below: str | os.PathLike[str] | None, most: int) -> bytes:
    """The bytes of a file below the named folder, links followed: "file:NAME", "file://NAME" or "file:///PATH"."""
    if below is None:
        hint = "send the image as a data URI, or start the server with --media-path FOLDER"
        raise ImageError("the server reads no files of its own", hint=hint)
    name, folder = unquote(url.partition(":")[2].removeprefix("//")), Path(below).expanduser().resolve()
    try:
        path = folder.joinpath(name).resolve()
        if not path.is_relative_to(folder) or path == folder:
            hint = "name a file in that folder, which --media-path has named"
            raise ImageError("the file is not below the folder of images that the server may read", hint=hint)
        return _regular_file(path, most)
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a name too long, a loop of links
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise ImageError(f"the file {decode.short(name)!r} cannot be read: {text}", hint="check its name") from error


def _regular_file(path: Path, most: int) -> bytes:
    """The bytes of a file, which is no link, pipe or device."""
    number = os.open(path, _FLAGS)
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise ImageError("this is no regular file", hint="name an image file")
        decode.check_bytes(found.st_size, None, most)
        return file.read(most)
