"""The chat page: conversations in the browser's storage, in files and in other tabs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from page_browser import GIVE, NARROW, Watched, answered, expect, picture, send
from page_double import Double


def test_conversations_are_kept_renamed_and_deleted(page: Any, double: Double) -> None:
    double.answers = [["A1"], ["B1"]]
    send(page, "Alpha")
    answered(page)
    page.click("#new")
    send(page, "Beta")
    answered(page)
    page.reload()
    expect(page.locator(".conversation .open")).to_have_text(["Beta", "Alpha"])
    expect(page.locator(".answer")).to_have_text("B1")
    page.locator(".conversation .open", has_text="Alpha").click()
    expect(page.locator(".answer")).to_have_text("A1")
    page.keyboard.press("Shift+Tab")
    page.locator(".conversation .open", has_text="Alpha").press("F2")
    page.fill("[aria-label=Title]", "Renamed")
    page.press("[aria-label=Title]", "Enter")
    expect(page.locator("#title")).to_have_text("Renamed")
    page.locator(".conversation .open", has_text="Beta").hover()
    page.click("[aria-label='Delete Beta']")
    expect(page.locator(".conversation")).to_have_count(1)
    page.click("text=Undo")
    expect(page.locator(".conversation")).to_have_count(2)
    page.locator(".conversation .open", has_text="Beta").press("Delete")
    page.reload()
    expect(page.locator(".conversation .open")).to_have_text(["Renamed"])


def test_export_and_import(page: Any, double: Double, tmp_path: Path, watched: Watched) -> None:
    double.answers = [[{"reasoning_content": "Hm."}, "A **1**"]]
    page.locator("#message").evaluate(GIVE, ["paste", base64.b64encode(picture()).decode(), "image/png"])
    expect(page.locator("#attachments img")).to_have_count(1)
    send(page, "Alpha")
    answered(page)
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    before = page.locator("#messages").inner_html()
    page.locator(".conversation .open").press("Delete")
    expect(page.locator("#welcome")).to_be_visible()
    page.set_input_files("#import-file", file)
    expect(page.locator(".assistant strong")).to_have_text("1")
    assert page.locator("#messages").inner_html() == before


LOOP = {"a": {"role": "user", "parent": None, "children": ["a"]}}


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ([], "no conversations of this page"),
        ({"version": 2}, "version 2"),
        ({"version": 1}, "list of conversations is missing"),
        ({"version": 1, "conversations": [{"messages": {"a": 1}}]}, "a message has neither"),
        ({"version": 1, "conversations": [{"first": ["a"], "messages": LOOP}]}, "a message is missing"),
    ],
)
def test_a_foreign_file_is_refused(page: Any, file: Any, reason: str) -> None:
    content = json.dumps({"format": "rlx-conversations", **file} if isinstance(file, dict) else file).encode()
    page.set_input_files("#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": content})
    expect(page.locator("#toasts")).to_contain_text(reason)


def test_a_foreign_file_brings_nothing_but_known_fields(page: Any) -> None:
    question = {
        "role": "user",
        "parent": None,
        "children": ["b"],
        "text": "Hi",
        "images": ["https://evil.example/x.png"],
    }
    answer = {"role": "assistant", "parent": "a", "children": [], "text": "<img src=x>", "stats": {"speed": "fast"}}
    conversation = {"id": "../x", "title": "T", "first": ["a"], "messages": {"a": question, "b": answer}}
    file = {"format": "rlx-conversations", "version": 1, "conversations": [conversation]}
    buffer = json.dumps(file).encode()
    page.set_input_files("#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": buffer})
    expect(page.locator(".answer")).to_have_text("<img src=x>")
    assert page.locator("#messages img").count() == 0


def test_a_removal_can_be_taken_back_on_a_phone(browser: Any, double: Double, double_url: str) -> None:
    watched = Watched(browser, double_url, viewport=NARROW)
    page = watched.open()
    send(page, "A title of many words that is as long as titles are, " * 2)
    answered(page)
    page.click("#sidebar-toggle")
    page.locator(".conversation .open").focus()
    page.keyboard.press("Delete")
    button = page.get_by_role("button", name="Undo")
    assert button.bounding_box()["width"] > button.bounding_box()["height"], "one line"
    button.click()
    expect(page.locator(".bubble")).to_be_visible()
    watched.close()
