"""Images of requests: forms, limits, addresses and files, without a server and a model."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PillowImage

from rlx.errors import ImageError, MultimodalError
from rlx.serve.media import Allowed, ImageSource, base64_source, download, load_images
from rlx.serve.options import ServerOptions

RNG = np.random.default_rng(3)
PIXELS = RNG.integers(0, 256, (6, 8, 3), np.uint8)


def png(pixels: Any = PIXELS) -> bytes:
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def loaded(*urls: str, options: ServerOptions | None = None, takes_images: bool = True) -> list[Any]:
    parts = [ImageSource(url, f"input[{i}]").part for i, url in enumerate(urls)]
    (message,) = load_images([{"role": "user", "content": parts}], options or ServerOptions(), takes_images)
    return [part["image"].pixels for part in message["content"]]


def refusal(*urls: str, options: ServerOptions | None = None) -> str:
    with pytest.raises(ImageError) as found:
        loaded(*urls, options=options)
    return str(found.value)


def test_an_image_comes_as_a_data_uri_or_in_base64() -> None:
    text = base64.b64encode(png()).decode()
    for source in (ImageSource(uri(png()), ""), base64_source(text, ""), base64_source(uri(png()), "")):
        message = load_images([{"role": "user", "content": [source.part]}], ServerOptions(), True)[0]
        np.testing.assert_array_equal(message["content"][0]["image"].pixels, PIXELS)
    part = {"type": "image_url", "image_url": {"url": uri(png())}}
    message = load_images([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}], ServerOptions(), True)[
        0
    ]
    assert message["content"][0] == {"type": "text", "text": "a"}
    np.testing.assert_array_equal(message["content"][1]["image"].pixels, PIXELS)


@pytest.mark.parametrize(
    "part, sentence",
    [
        ({"type": "image", "path": "/etc/passwd"}, "images of this form are not read here"),
        ({"type": "image", "image": "/etc/passwd"}, "images of this form are not read here"),
        ({"type": "image", "image": uri(png())}, "images of this form are not read here"),
        ({"type": "input_audio", "input_audio": {}}, "a part has type 'input_audio'"),
        ({"type": "video"}, "a part has type 'video'"),
        ({}, "a part has type None"),
        ({"type": "image_url"}, "the part has no address"),
        ({"type": "image_url", "image_url": {"url": 3}}, "the part has no address"),
    ],
)
def test_no_other_form_reaches_the_template(part: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MultimodalError, match=sentence) as found:
        load_images([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}], ServerOptions(), True)
    assert "messages[1].content[0]" in str(found.value)


@pytest.mark.parametrize(
    "url, sentence",
    [
        ("data:image/png;base64,AAAA", "of an unknown format"),
        ("data:image/png;base64,A", "damaged"),
        ("data:image/png;base64,ä", "damaged"),
        ("data:image/png,abc", "not in base64"),
        ("data:", "not in base64"),
        (uri(png()[:60]), "cannot be read"),
        ("cat.png", "is no address"),
        ("/etc/passwd", "is no address"),
        ("ftp://example.com/a.png", "is no address"),
        ("", "is no address"),
        ("https://example.com/a.png", "downloads no images from 'example.com'"),
        ("file:///etc/passwd", "reads no files of its own"),
    ],
)
def test_what_is_no_image_is_refused_by_its_field(url: str, sentence: str) -> None:
    message = refusal(uri(png()), url)
    assert sentence in message and message.startswith("input[1]")


def test_bytes_pixels_and_number_are_bounded() -> None:
    small = ServerOptions(max_images=2, max_image_mb=0.001, max_image_megapixels=0.001)
    assert len(loaded(uri(png()), uri(png()), options=small)) == 2
    assert "more than 2 images" in refusal(*[uri(png())] * 3, options=small)
    assert "MB" in refusal(uri(png(RNG.integers(0, 256, (20, 20, 3), np.uint8))), options=small)
    flat = [uri(png(np.zeros((*size, 3), np.uint8))) for size in ((30, 30), (12, 13))]
    assert "13 x 12 pixels" in refusal(*flat, options=small)  # 900 and 156 are more than 1048 together


class TestFiles:
    @pytest.fixture
    def options(self, tmp_path: Path) -> ServerOptions:
        folder = tmp_path / "images"
        (folder / "sub").mkdir(parents=True)
        for path in (folder / "a b.png", folder / "sub" / "c.png", tmp_path / "secret.png"):
            path.write_bytes(png())
        (tmp_path / "images2").mkdir()
        (tmp_path / "images2" / "d.png").write_bytes(png())
        (folder / "inside.png").symlink_to(folder / "sub" / "c.png")
        (folder / "outside.png").symlink_to(tmp_path / "secret.png")
        (folder / "folder").symlink_to(tmp_path)
        (folder / "loop.png").symlink_to(folder / "loop.png")
        os.mkfifo(folder / "pipe.png")
        return ServerOptions(media_path=folder)

    @pytest.mark.parametrize("name", ["a%20b.png", "sub/c.png", "inside.png", "sub/../sub/c.png"])
    def test_a_file_below_the_folder_is_read(self, options: ServerOptions, name: str) -> None:
        for url in (f"file:{name}", f"file://{name}", f"file://{options.media_path}/{name}"):
            np.testing.assert_array_equal(loaded(url, options=options)[0], PIXELS)

    @pytest.mark.parametrize(
        "name",
        ["../secret.png", "..%2Fsecret.png", "outside.png", "folder/secret.png", "sub/../../secret.png",
         "../images2/d.png", "../missing.png", "/etc/passwd", "", ".", "..", "%2e%2e/secret.png"],
    )  # fmt: skip
    def test_nothing_outside_is_read_or_found_out(self, options: ServerOptions, name: str) -> None:
        for url in (f"file:{name}", f"file://{name}"):
            message = refusal(url, options=options)
            assert "not below the folder" in message and "secret" not in message.partition("not below")[2]


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self) -> None:
        where = {
            "/to-private": "http://10.0.0.1/a.png",
            "/to-file": "file:///etc/passwd",
            "/to-image": "/a.png",
            "/loop": "/loop",
        }
        if self.path in where:
            self.send_response(302)
            self.send_header("Location", where[self.path])
            self.end_headers()
        elif self.path in ("/a.png", "/a.png?x=%20y"):
            self.answer(png())
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            while True:  # without an end
                self.wfile.write(b"\0" * 65536)
        elif self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"\0")
                time.sleep(0.02)
        else:
            self.send_error(404)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone
            super().handle()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """That of a server of images."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


class TestAddresses:
    def fetch(self, url: str, *domains: str, most: int = 10_000, seconds: float = 20) -> bytes:
        return download(url, Allowed.of(domains), most, seconds)

    def test_a_named_address_is_asked(self, port: int) -> None:
        for host, domain in (("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("127.0.0.1", "127.0.0.0/8")):
            assert self.fetch(f"http://{host}:{port}/a.png", domain) == png()
        assert self.fetch(f"http://127.0.0.1:{port}/a.png?x=%20y#part", "127.0.0.1") == png()
        assert self.fetch(f"http://127.0.0.1:{port}/to-image", "127.0.0.1") == png()
        options = ServerOptions(media_domains=("127.0.0.1",))
        np.testing.assert_array_equal(loaded(f"http://127.0.0.1:{port}/a.png", options=options)[0], PIXELS)

    @pytest.mark.parametrize(
        "path, sentence",
        [
            ("/to-private", "downloads no images from '10.0.0.1'"),
            ("/to-file", "malformed"),
            ("/loop", "redirects more than 3 times"),
            ("/missing", "answers 404"),
            ("/large", "more than"),
        ],
    )
    def test_what_is_no_image_is_refused(self, port: int, path: str, sentence: str) -> None:
        with pytest.raises(ImageError, match=sentence):
            self.fetch(f"http://127.0.0.1:{port}{path}", "127.0.0.1")

    def test_a_slow_answer_is_given_up(self, port: int) -> None:
        with pytest.raises(ImageError, match=r"more than 0\.2 s"):
            self.fetch(f"http://127.0.0.1:{port}/drip", "127.0.0.1", seconds=0.2)

    @pytest.mark.parametrize(
        "address",
        ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1",
         "fe80::1", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"],
    )  # fmt: skip
    def test_a_name_for_a_private_address_is_refused(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        for rows in ([address], ["93.184.216.34", address]):
            found = [(kind, socket.SOCK_STREAM, 6, "", (row, 80)) for row in rows]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, _found=found, **options: _found)
            with pytest.raises(ImageError, match="no public address"):
                self.fetch("http://images.example.com/a.png", "images.example.com")

    @pytest.mark.parametrize(
        "url",
        ["http://evil.com/", "http://images.example.com.evil.com/", "http://xexample.com/", "http://127.0.0.1/", "http://[::1]/",
         "http://2130706433/", "http://0x7f.1/", "http://127.1/", "https://example.org/", "http://.example.com/"],
    )  # fmt: skip
    def test_other_hosts_are_not_even_looked_up(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", None)
        with pytest.raises(ImageError, match=r"downloads no images|malformed"):
            self.fetch(url, "example.com", "images.example.com", ".example.org")
