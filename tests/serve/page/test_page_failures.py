"""The chat page: keys, full queues, long prompts, broken connections."""

from __future__ import annotations

from typing import Any

import pytest
from page_browser import Watched, answered, expect, send
from page_double import BREAK, Double, Gate


def test_a_key_is_asked_for_and_used(watched: Watched, double: Double) -> None:
    double.key = "secret-key"
    watched.page.goto(watched.url)
    page = watched.page
    expect(page.locator("dialog[open]")).to_contain_text("answers only with a key")
    page.fill("#key-value", "wrong-key")
    page.keyboard.press("Enter")
    expect(page.locator("dialog[open]")).to_contain_text("does not take the key")
    page.fill("#key-value", "secret-key")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("double")
    double.key = "another-key"
    send(page, "Go")
    page.fill("#key-value", "another-key")
    page.keyboard.press("Enter")
    expect(answered(page).locator(".answer")).to_have_text("Hello.")


@pytest.mark.parametrize(("status", "words"), [(429, "The server is busy. Trying again in"), (503, "loading. Trying")])
def test_a_busy_server_is_asked_again(page: Any, double: Double, status: int, words: str) -> None:
    double.answers = [(status, "the model is loading", {"Retry-After": "1"}), ["Here."]]
    send(page, "Go")
    expect(page.locator(".status")).to_contain_text(words)
    expect(answered(page).locator(".answer")).to_have_text("Here.")


def test_a_full_context_says_the_way_out(page: Any, double: Double) -> None:
    error = {
        "message": "too long",
        "type": "exceed_context_size_error",
        "code": "context_length_exceeded",
        "n_prompt_tokens": 5000,
        "n_ctx": 4096,
    }
    double.answers = [(400, error)]
    send(page, "Go")
    expect(answered(page).locator(".problem")).to_contain_text("has 5,000 tokens; the model takes 4,096")
    page.click("text=New conversation >> nth=-1")
    expect(page.locator("#welcome")).to_be_visible()


def test_what_had_arrived_is_kept_when_the_connection_breaks(page: Any, double: Double) -> None:
    double.answers = [["Once upon", BREAK], ["Whole."]]
    send(page, "Go")
    expect(answered(page).locator(".problem")).to_contain_text("What had arrived is kept.")
    expect(page.locator(".answer")).to_have_text("Once upon")
    page.reload()
    expect(page.locator(".answer")).to_have_text("Once upon")
    page.click("text=Try again")
    expect(answered(page).locator(".answer")).to_have_text("Whole.")


def test_a_page_that_closes_keeps_what_had_arrived(page: Any, double: Double) -> None:
    double.answers = [["Once upon", Gate()]]
    send(page, "Go")
    expect(page.locator(".answer")).to_have_text("Once upon")
    page.wait_for_timeout(1500)  # it is saved once a second
    page.reload()
    expect(page.locator(".answer")).to_have_text("Once upon")
    expect(page.locator(".problem")).to_contain_text("cut off")


def test_a_server_that_is_gone(page: Any, watched: Watched) -> None:
    watched.context.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    send(page, "Go")
    expect(answered(page).locator(".problem")).to_contain_text("The server does not answer.")
    expect(page.locator("[aria-label='Answer again']")).to_have_count(0)  # "Try again" is there
