"""What the tests of the chat page share: a page that may ask nobody else, and what one does with it."""

from __future__ import annotations

import io
import re
from typing import Any

from browser import NARROW as NARROW
from browser import TIMEOUT, WIDE
from browser import chromium as chromium
from browser import expect as expect
from browser import faults as faults
from PIL import Image

CHAIN = ["# Title\n\nSome **bold", "** text and `code", "`.\n\n```python\nprint(1)", "\n```\n\n- a\n- b\n"]
ANSWER = "".join(CHAIN)
#: What every request has.
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}

#: What a browser says of responses that a test asked for.
EXPECTED = re.compile(r"Failed to load resource: .*(status of [45]\d\d|ERR_CONNECTION|ERR_INCOMPLETE)")


class Watched:
    """A page of the browser that notes errors of its console and requests to other servers."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        self.context.set_default_timeout(TIMEOUT)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.context.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type == "error" and not EXPECTED.match(message.text):
            self.errors.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(request.url)

    def open(self) -> Any:
        """The chat page, ready."""
        self.page.goto(self.url)
        self.page.wait_for_selector("#model:not(:empty)")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert not self.errors, self.errors
        assert not self.foreign, self.foreign


def send(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answered(page: Any, count: int = 1) -> Any:
    """The last of `count` complete answers."""
    expect(page.locator(".message.assistant")).to_have_count(count)
    expect(page.locator(".writing")).to_have_count(0)
    return page.locator(".message.assistant").last


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


GIVE = """(target, [kind, data, type]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  transfer.items.add(new File([bytes], "picture.png", {type}));
  const how = {bubbles: true, cancelable: true};
  const event = kind === "paste" ? new ClipboardEvent("paste", {clipboardData: transfer, ...how})
    : new DragEvent("drop", {dataTransfer: transfer, ...how});
  target.dispatchEvent(event);
}"""
