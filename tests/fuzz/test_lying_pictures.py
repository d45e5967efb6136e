"""Addresses of pictures and answers of their servers that mean harm: none reaches a host that is not allowed, and only
a whole body counts as a picture.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from rlx.errors import ImageError
from rlx.serve.media import Allowed, download

PICTURE = b"\x89PNG and so on"
SECRET = b"secret"


class Server(ThreadingHTTPServer):
    """Answers `/raw/...` with the rest of the path, unquoted, as the whole answer; other paths with SECRET.

    Attributes:
        seen: the paths that were asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[str] = []

    def handle_error(self, *args: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        self.close_connection = True
        found = self.path.partition("/raw/")[2]
        with suppress(OSError):
            self.wfile.write(unquote_to_bytes(found) if found else answer(SECRET))

    def log_message(self, *args: Any) -> None:
        pass


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers]
    lines += [f"Content-Length: {len(body) if length is None else length}"] if length != -1 else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


def raw(server: Server, reply: bytes) -> str:
    return f"http://localhost:{server.server_port}/raw/" + "".join(f"%{byte:02x}" for byte in reply)


def fetch(url: str, *domains: str) -> bytes:
    return download(url, Allowed.of(domains or ("localhost",)), 1000, 10)


def test_what_is_allowed_is_fetched(server: Server) -> None:
    assert fetch(raw(server, answer(PICTURE))) == PICTURE
    assert fetch(raw(server, answer(PICTURE, length=-1))) == PICTURE
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n2\r\nfg\r\n0\r\n\r\n"
    assert fetch(raw(server, chunked)) == b"abcdefg"
    assert fetch(raw(server, answer(b"", "Location: /x", status="302 Found"))) == SECRET
    assert fetch(f"http://[::ffff:127.0.0.1]:{server.server_port}/x", "::ffff:127.0.0.1") == SECRET


# Ways to write 127.0.0.1 and its neighbours: none is the name `localhost`.
LOOPBACKS = [
    "127.0.0.1", "127.1", "127.0.1", "127.255.255.254", "127.0.0.1.", "2130706433", "0x7f000001", "0x7f.1",
    "0177.0.0.1", "017700000001", "0", "0.0.0.0", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::ffff:0:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::127.0.0.1]", "[2002:7f00:1::]", "[2001:0:7f00:1::80ff:fffe]", "[::1%25lo]",
    "[::ffff:127.0.0.1%25lo]", "[fe80::1]", "localhost.evil", "localhost.localdomain", "a.localhost",
    "localhost@127.0.0.1", "localhost:80@127.0.0.1", "127.0.0.1#localhost", "%6cocalhost", "localhos\u0074\u200b",
    "\u24dbocalhost", "localhost\\@127.0.0.1", "127.0.0.1\\.localhost", "localhost%00.evil", "xn--localhost",
    "127.0.0.1%2elocalhost", "[::ffff:127.0.0.1].localhost", "localhost;127.0.0.1", "localhost,127.0.0.1",
    "169.254.169.254", "127\u3002" + "0.0.1", "\uff11\uff12\uff17.0.0.1", "ip6-localhost", "LOCALHOST.EVIL",
    "evil.com?localhost",
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACKS)
def test_no_redirect_does_either(server: Server, host: str) -> None:
    for location in (f"http://{host}:{server.server_port}/x", f"//{host}:{server.server_port}/x"):
        server.seen.clear()
        reply = answer(b"", b"Location: ".decode() + location, status="302 Found") if location.isascii() else None
        if reply is None:
            continue
        with pytest.raises(ImageError):
            fetch(raw(server, reply))
        assert len(server.seen) == 1, "the first question, and no second"


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://localhost/", "gopher://localhost/", "data:image/png;base64,AAAA", "javascript:0",
     "http://", "http:", "//", "http://localhost:0/", "http://localhost:99999/", "http://localhost:x/",
     "http://user@localhost/", "http://:@localhost/", "http://[::1/", "http://localhost:1\t/", "unix:/x"],
)  # fmt: skip
def test_redirects_to_other_things_are_refused(server: Server, location: str) -> None:
    server.seen.clear()
    with pytest.raises(ImageError):
        fetch(raw(server, answer(b"", f"Location: {location}", status="302 Found")))
    assert all("/raw/" in path for path in server.seen), "nothing else was asked for"


@pytest.mark.parametrize(
    "reply",
    [answer(PICTURE, length=len(PICTURE) + 1), answer(PICTURE, length=999), answer(b"", length=5),
     answer(PICTURE, length=10**30), answer(PICTURE, "Content-Length: 3"),
     answer(PICTURE, "Content-Length: -5", length=-1),
     answer(PICTURE, "Content-Length: x", length=-1), answer(PICTURE, "Content-Length: 5, 5", length=-1),
     answer(PICTURE, "Content-Length: +5", length=-1), answer(PICTURE, "Content-Length: 1_0", length=-1),
     answer(b"5\r\nabc", "Transfer-Encoding: chunked", length=-1),
     answer(b"5\r\nabcde\r\n", "Transfer-Encoding: chunked", length=-1),
     answer(b"5\r\nabcde\r\n3\r\n", "Transfer-Encoding: chunked", length=-1),
     answer(b"x", "Transfer-Encoding: chunked", length=-1),
     answer(b"-1\r\na\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=-1),
     answer(b"ffffffffffffffff\r\na", "Transfer-Encoding: chunked", length=-1), answer(b"x" * 1001),
     answer(b"x" * 1001, length=-1), answer(PICTURE, status="206 Partial Content"), answer(PICTURE, status="204 No"),
     answer(PICTURE, status="404 No"), answer(PICTURE, status="302 Found"), b"x", b"HTTP/1.1",
     b"HTTP/9.9 abc OK\r\n\r\n", answer(b"", *[f"A{i}: b" for i in range(200)]), answer(b"", "A: " + "b" * 70_000)],
    ids=range(27),
)  # fmt: skip
def test_only_a_whole_body_is_a_picture(server: Server, reply: bytes) -> None:
    with pytest.raises(ImageError):
        fetch(raw(server, reply))


def test_the_connection_goes_to_the_address_that_was_checked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that points elsewhere when it is looked up again."""
    lookup, asked = socket.getaddrinfo, list[str]()

    def changing(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != "pictures.example.com":
            return lookup(host, port, *args, **more)
        asked.append(host)
        there = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (there, port))]

    connected = []

    def connect(address: Any, **more: Any) -> Any:
        connected.append(address[0])
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ImageError):
        fetch(f"http://pictures.example.com:{server.server_port}/x", "pictures.example.com")
    assert connected == ["93.184.216.34"] and len(asked) == 1
