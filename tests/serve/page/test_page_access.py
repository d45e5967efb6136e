"""The chat page: keyboard, screen readers, contrast, widths, light and dark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from page_browser import ANSWER, NARROW, WIDE, Watched, answered, expect, faults, send
from page_double import Double, Gate


def test_everything_works_from_the_keyboard(page: Any, double: Double) -> None:
    double.answers = [[ANSWER], ["Second."]]
    keys = page.keyboard
    expect(page.locator("#message")).to_be_focused()
    keys.type("Hello")
    keys.press("Shift+Enter")
    keys.type("there")
    keys.press("Enter")
    answered(page)
    assert double.requests[0]["messages"][0]["content"] == "Hello\nthere"
    keys.press("ArrowUp")
    expect(page.locator("[aria-label='Edit the message']")).to_be_focused()
    keys.press("Escape")
    expect(page.locator("[aria-label='Edit and ask again']")).to_be_focused()
    keys.press("Alt+KeyR")
    expect(answered(page).locator(".answer")).to_have_text("Second.")
    keys.press("Alt+KeyS")
    expect(page.locator("#set-system")).to_be_focused()
    keys.press("Escape")
    expect(page.locator("#settings-toggle")).to_be_focused()
    keys.press("Alt+KeyI")
    expect(page.locator("#message")).to_be_focused()
    keys.press("Alt+KeyK")
    expect(page.locator("#shortcuts")).to_contain_text("Shift + Enter")
    keys.press("Escape")
    keys.press("Alt+KeyL")
    assert not page.locator("#sidebar").is_visible()
    keys.press("Alt+KeyN")
    expect(page.locator("#welcome")).to_be_visible()
    keys.press("Alt+KeyT")
    assert page.locator("html").get_attribute("data-theme") == "light"


def test_screen_readers_hear_the_answer_by_paragraphs(page: Any, double: Double) -> None:
    gate = Gate()
    double.answers = [["First paragraph.\n\nSecond", gate, " paragraph."]]
    send(page, "Go")
    said = page.locator("#announcements")
    expect(said).to_contain_text("First paragraph.")
    assert "Second" not in said.inner_text()
    gate.set()
    expect(said).to_contain_text("Second paragraph.")
    expect(said).to_contain_text("The answer is complete.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_looks(browser: Any, double: Double, double_url: str, viewport: Any, scheme: str) -> None:
    """Names, contrast, sizes and width, of the page in all its states.

    `make test-page` has each drawn into build/page, to be looked at.
    """
    found, drawn = dict[str, Any](), os.environ.get("RLX_PAGE_SCREENSHOTS")

    def look(state: str) -> None:
        found[state] = faults(page)
        if drawn is not None:
            page.screenshot(path=Path(drawn) / f"{viewport['width']}-{scheme}-{state}.png")

    watched = Watched(browser, double_url, viewport=viewport, color_scheme=scheme)
    page = watched.open()
    look("welcome")
    long = "x" * 300 + "\n\n| a | b |\n|---|---|\n| " + "word " * 40 + "| y |\n\n[link](https://a.example)\n\n"
    code = '```python\n# comment\ndef f(x): return "text" + 1\n```\n\n```diff\n-old\n+new\n```\n\n> quote\n\n- [x] a\n'
    double.answers = [[{"reasoning_content": "Hm."}, ANSWER, long, code]]
    send(page, "A long question " * 30)
    answered(page)
    page.click("summary")
    look("answer")
    double.answers = [(400, "refused")]
    send(page, "Go")
    answered(page, 2)
    look("problem")
    page.locator(".message.user").last.hover()
    page.locator("[aria-label='Edit and ask again']").last.click()
    look("edit")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+KeyS")
    page.check("input[value=schema]")
    page.fill("#set-schema", "{")
    page.click("text=Tools")
    look("settings")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+KeyK")
    look("shortcuts")
    page.keyboard.press("Escape")
    if viewport is NARROW:
        page.keyboard.press("Alt+KeyL")
        expect(page.locator("#new")).to_be_focused()
        look("list")
    watched.close()
    assert {state: each for state, each in found.items() if each} == {}
