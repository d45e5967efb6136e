"""The chat page over the real server with the embedded demo models."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from page_browser import Watched, expect, faults

FIRST = 120_000  # milliseconds: the first answer waits for its kernels to be compiled


def ask(page: Any, text: str, count: int = 1) -> Any:
    """Sends a text; the complete answer."""
    page.fill("#message", text)
    page.press("#message", "Enter")
    expect(page.locator(".message.assistant")).to_have_count(count)
    expect(page.locator(".writing")).to_have_count(0, timeout=FIRST)
    return page.locator(".message.assistant").last


def test_a_conversation(browser: Any, server: Any) -> None:
    watched = Watched(browser, server.url)
    page = watched.open()
    expect(page.locator("#model")).to_have_text("demo")
    page.keyboard.press("Alt+KeyS")
    page.fill("#set-temperature", "0")
    expect(ask(page, "What is 27 + 45?").locator(".answer")).to_have_text("27 + 45 = 72.")
    answer = ask(page, "And what is 5 more than that?", 2)
    expect(answer.locator(".answer")).to_contain_text("77")
    expect(answer.locator(".stats")).to_contain_text("tokens/s")
    expect(answer.locator(".stats")).to_contain_text("cached")
    page.fill("#set-max_tokens", "4")
    expect(ask(page, "What is 27 + 45?", 3).locator(".status")).to_contain_text("greatest length")
    page.fill("#set-max_tokens", "")
    page.click("text=Continue")
    expect(page.locator(".answer").last).to_have_text("27 + 45 = 72.")
    watched.close()


def test_an_answer_of_a_schema(browser: Any, server: Any) -> None:
    watched = Watched(browser, server.url)
    page = watched.open()
    page.keyboard.press("Alt+KeyS")
    page.check("input[value=schema]")
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    page.fill("#set-schema", json.dumps({**schema, "required": ["name", "age"], "additionalProperties": False}))
    page.fill("#set-temperature", "0")
    answer = ask(page, "Extract the name and age as JSON: Mira is 12 years old and lives in Rome.")
    found = json.loads(answer.locator("code").inner_text())
    assert found.keys() == {"name", "age"} and isinstance(found["age"], int)
    page.fill("#set-schema", '{"type": "nonsense"}')
    expect(ask(page, "Go", 2).locator(".problem")).to_contain_text("response_format")
    watched.close()


def test_the_page_of_the_api(browser: Any, server: Any) -> None:
    watched = Watched(browser, server.url)
    page = watched.page
    page.goto(f"{server.url}/docs")
    answers = page.locator("summary", has=page.get_by_text("/v1/chat/completions", exact=True))
    expect(answers).to_contain_text("The model's answer to a conversation.")
    page.fill("#search", "input_prefix")
    expect(page.locator("details:visible")).to_have_count(1)
    page.locator("details:visible").click()
    expect(page.locator("details[open] td", has_text="input_prefix")).to_be_visible()
    assert faults(page) == []
    watched.close()


@pytest.mark.slow
def test_images(browser: Any, server_that_sees: Any) -> None:
    """Both suggestions send a drawing that the page makes itself; then a pasted one."""
    watched = Watched(browser, server_that_sees.url)
    page = watched.open()
    page.keyboard.press("Alt+KeyS")
    page.fill("#set-temperature", "0")
    page.click("text=What colour is the circle?")
    expect(page.locator(".answer")).to_have_text("The circle is red.", timeout=FIRST)
    url = page.locator(".user img").get_attribute("src")
    page.click("#new")
    image = {"name": "a.png", "mimeType": "image/png", "buffer": base64.b64decode(url.split(",")[1])}
    page.set_input_files("#attach-file", image)
    expect(page.locator("#attachments img")).to_have_count(1)
    expect(ask(page, "Which shape is blue?").locator(".answer")).to_contain_text("square")
    watched.close()
