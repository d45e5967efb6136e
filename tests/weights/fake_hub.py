"""A hub on this machine: the two addresses that a download needs, and the faults that a network has."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class FakeHub:
    """Serves the files of one repository.

    Attributes:
        files: name -> bytes. Those of 1,000 bytes or more are large files.
        status: answer the question for the files with this.
        cut: of a request for a file, how many bytes to send before the connection ends; None: all.
        damage: changes the bytes that are sent.
        ranges: whether a request may begin in the middle.
        token: what a request must carry; None: nothing.
        requests: (name, Range) of each request for a file.
    """

    files: dict[str, bytes]
    repo: str = "org/repo"
    status: int = 200
    cut: Callable[[str, int], int | None] = lambda name, at: None
    damage: Callable[[bytes], bytes] = lambda data: data
    ranges: bool = True
    token: str | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            self._refuse(request, 401)
        elif path == f"/api/models/{self.repo}":
            self._list(request)
        elif found := re.fullmatch(rf"/{self.repo}/resolve/{COMMIT}/(.+)", path):
            request.send_response(302)  # as to the store of large files
            request.send_header("Location", f"{self.endpoint}/store/{found[1]}")
            request.send_header("Content-Length", "0")
            request.end_headers()
        elif path.startswith("/store/") and path.removeprefix("/store/") in self.files:
            self._send(request, path.removeprefix("/store/"))
        else:
            self._refuse(request, 404)

    def _refuse(self, request: BaseHTTPRequestHandler, status: int) -> None:
        request.send_response(status)
        if status == 404:
            request.send_header("X-Error-Code", "RepoNotFound")
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _list(self, request: BaseHTTPRequestHandler) -> None:
        if self.status != 200:
            self._refuse(request, self.status)
            return
        siblings: list[dict[str, Any]] = []
        for name, data in self.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_blob(data)}
            if len(data) >= 1000:
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(row)
        body = json.dumps({"id": self.repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _send(self, request: BaseHTTPRequestHandler, name: str) -> None:
        data, asked = self.damage(self.files[name]), request.headers.get("Range")
        self.requests.append((name, asked))
        at = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        request.send_response(206 if at else 200)
        request.send_header("Content-Length", str(len(data) - at))
        if at:
            request.send_header("Content-Range", f"bytes {at}-{len(data) - 1}/{len(data)}")
        request.end_headers()
        cut = self.cut(name, at)
        request.wfile.write(data[at:] if cut is None else data[at : at + cut])
        if cut is not None:
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(2)
