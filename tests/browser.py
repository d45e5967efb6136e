"""What tests of pages share: Chromium, sizes of windows, and checks of accessibility."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TIMEOUT = 30_000  # milliseconds: only against a hang
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}

_loop: asyncio.AbstractEventLoop | None = None  # Playwright's


def lend_thread(to_browser: bool) -> None:
    """Playwright's event loop counts as running while it waits, and a test without a page may want to run another."""
    asyncio._set_running_loop(_loop if to_browser else None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window. Skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    global _loop
    with sync_api.sync_playwright() as playwright:
        _loop = asyncio.get_running_loop()
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        lend_thread(to_browser=True)
        browser.close()
    _loop = None


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait."""
    from playwright.sync_api import expect as expected

    expected.set_options(timeout=TIMEOUT)
    return expected(locator)


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
