"""What the tests of the chat page share: Chromium, a page that may ask nobody else, and checks of accessibility."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image

CHAIN = ["# Title\n\nSome **bold", "** text and `code", "`.\n\n```python\nprint(1)", "\n```\n\n- a\n- b\n"]
ANSWER = "".join(CHAIN)
#: What every request has.
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}

TIMEOUT = 30_000  # milliseconds: only against a hang
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}

#: What a browser says of responses that a test asked for.
EXPECTED = re.compile(r"Failed to load resource: .*(status of [45]\d\d|ERR_CONNECTION|ERR_INCOMPLETE)")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window. Skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


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


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait."""
    from playwright.sync_api import expect as expected

    expected.set_options(timeout=TIMEOUT)
    return expected(locator)


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

CONTRAST = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => top.slice(0, 3).map((value, at) => (value * top[3] + below[at] * (255 - top[3])) / 255);
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) layers.push(rgba(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (color) => color.map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("button:disabled, .unseen, noscript")) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const below = ground(element);
    const style = getComputedStyle(element);
    const [a, b] = [light(over(rgba(style.color), below)), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if (ratio < needed) poor.push(`${ratio.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return poor;
}"""

FAULTS = """() => {
  const found = [];
  const shown = (element) => element.checkVisibility({visibilityProperty: true});
  const name = (element) => [element.getAttribute("aria-label"), element.textContent, element.alt,
    ...[...(element.labels ?? [])].map((label) => label.textContent),
    ...(element.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent),
  ].some((text) => text?.trim());
  const needed = "button, a, input, select, textarea, dialog[open], nav, aside, [role=region], [role=group]";
  for (const element of document.querySelectorAll(needed))
    if (shown(element) && !name(element)) found.push(`no name: ${element.outerHTML.slice(0, 100)}`);
  for (const image of document.querySelectorAll("img")) if (!image.hasAttribute("alt")) found.push("image without alt");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push(`id twice: ${id}`);
  for (const attribute of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
    for (const element of document.querySelectorAll(`[${attribute}]`))
      for (const id of element.getAttribute(attribute).split(" "))
        if (!ids.includes(id)) found.push(`${attribute} names ${id}, which is not there`);
  let level = 0;
  for (const heading of document.querySelectorAll("main :is(h1, h2, h3, h4, h5, h6)")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1 && !heading.closest(".prose")) found.push(`heading ${next} after ${level}`);
    level = next;
  }
  if (document.querySelectorAll("main").length !== 1) found.push("not one main");
  if (!document.documentElement.lang) found.push("no language");
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) found.push(`as wide as ${width}`);
  for (const element of document.querySelectorAll("button"))
    if (shown(element) && Math.min(element.offsetWidth, element.offsetHeight) < 24)
      found.push(`small: ${element.outerHTML.slice(0, 100)}`);
  return found;
}"""


def faults(page: Any) -> list[str]:
    """What is wrong with the page as it is shown: names, ids, headings, width, sizes of buttons, contrast."""
    body = page.locator("body")
    return [*body.evaluate(FAULTS), *body.evaluate(CONTRAST)]
