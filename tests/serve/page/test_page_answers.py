"""The chat page: one answer, from the message to what can be done with it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from page_browser import CHAIN, STREAM, answered, expect, send
from page_double import Double, Gate


def test_an_answer_is_drawn_while_it_comes(page: Any, double: Double) -> None:
    gate = Gate()
    double.answers = [[*CHAIN[:2], gate, *CHAIN[2:]]]
    send(page, "Hello\nthere")
    expect(page.locator(".assistant strong")).to_have_text("bold")
    expect(page.locator("#send")).to_have_attribute("aria-label", "Stop the answer")
    assert page.locator(".assistant pre").count() == 0
    gate.set()
    answer = answered(page)
    expect(answer.locator("pre")).to_have_text("print(1)")
    expect(answer.locator("li")).to_have_count(2)
    expect(answer.locator(".level-1")).to_have_text("Title")
    expect(answer.locator(".level-1")).to_have_css("margin-bottom", "0px")  # the text below belongs to it
    expect(answer.locator(".stats")).to_have_text("41.5 tokens/s · 4 tokens · prompt 312, 256 cached")
    expect(page.locator("#context")).to_have_text("316 / 4,096 tokens of the context")
    expect(page.locator("#title")).to_have_text("Hello")
    body = double.requests[0]
    assert body.pop("messages") == [{"role": "user", "content": "Hello\nthere"}]
    assert body == {"model": "double", **STREAM}


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_is_stopped(page: Any, double: Double, how: str) -> None:
    double.answers = [["The beginning", Gate()], ["Second."]]
    send(page, "Go")
    expect(page.locator(".answer")).to_have_text("The beginning")
    if how == "button":
        page.click("#send")
    else:
        page.keyboard.press("Escape")
    expect(answered(page).locator(".status")).to_have_text("Stopped. Continue")
    page.wait_for_timeout(100)
    assert double.gone == 1, "the server goes on"
    send(page, "More")
    answered(page, 2)
    assert double.requests[1]["messages"][1] == {"role": "assistant", "content": "The beginning"}


def test_an_answer_again_is_a_version_beside_the_first(page: Any, double: Double) -> None:
    double.answers = [["First."], ["Second."]]
    send(page, "Go")
    answered(page)
    page.click("[aria-label='Answer again']")
    expect(page.locator(".answer")).to_have_text("Second.")
    assert double.requests[1] == double.requests[0]
    expect(page.locator(".assistant .versions")).to_have_text("2 / 2")
    page.click("[aria-label='Version before']")
    expect(page.locator(".answer")).to_have_text("First.")
    page.reload()
    expect(page.locator(".answer")).to_have_text("First.")


def test_an_answer_that_was_cut_off_goes_on(page: Any, double: Double) -> None:
    double.answers = [["Once upon", {"finish": "length"}], [" a time."]]
    send(page, "Go")
    expect(answered(page).locator(".status")).to_contain_text("greatest length")
    page.click("text=Continue")
    expect(page.locator(".answer")).to_have_text("Once upon a time.")
    expect(page.locator(".assistant .versions")).to_have_text("2 / 2")
    assert double.requests[1]["continue_final_message"] is True
    assert double.requests[1]["messages"][-1] == {"role": "assistant", "content": "Once upon"}


def test_a_long_prompt_shows_how_far_it_is_read(page: Any, double: Double) -> None:
    gate = Gate()
    progress = {"choices": [{"index": 0, "delta": {}, "prompt_progress": {"total": 200, "cache": 0, "processed": 50}}]}
    double.answers = [[{"chunk": progress}, gate, "Done."]]
    send(page, "Go")
    expect(page.locator(".status")).to_have_text("Reading the prompt: 25%")
    gate.set()
    expect(answered(page).locator(".answer")).to_have_text("Done.")


def test_an_edited_message_begins_a_branch(page: Any, double: Double) -> None:
    double.answers = [["A1"], ["A2"], ["B1"]]
    for number, text in enumerate(("one", "two"), 1):
        send(page, text)
        answered(page, number)
    page.locator(".message.user").first.hover()
    page.locator("[aria-label='Edit and ask again']").first.click()
    page.fill("[aria-label='Edit the message']", "uno")
    page.click("text=Send")
    expect(answered(page).locator(".answer")).to_have_text("B1")
    assert [message["content"] for message in double.requests[2]["messages"]] == ["uno"]
    page.locator(".message.user [aria-label='Version before']").click()
    expect(page.locator(".answer")).to_have_text(["A1", "A2"])


def test_thinking_is_folded(page: Any, double: Double) -> None:
    gate = Gate()
    double.answers = [[{"reasoning_content": "Let me *see*."}, gate, "Done."]]
    send(page, "Go")
    expect(page.locator("summary")).to_have_text("Thinking…")
    gate.set()
    expect(answered(page).locator("summary")).to_have_text(re.compile("^Thought"))
    assert not page.locator(".thinking .prose").is_visible()
    page.click("summary")
    expect(page.locator(".thinking em")).to_have_text("see")
    send(page, "More")
    answered(page, 2)
    assert double.requests[1]["messages"][1] == {"role": "assistant", "content": "Done."}


def test_tool_calls_are_shown_and_answered(page: Any, double: Double) -> None:
    begin = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": part}} for part in ('{"city": ', '"Rome"}')]
    calls = [{"tool_calls": [call]} for call in (begin, *rest)]
    double.answers = [[*calls, {"finish": "tool_calls"}], ["It is warm."]]
    page.keyboard.press("Alt+KeyS")
    page.click("text=Tools")
    page.fill("#set-tools", '[{"name": ')
    expect(page.locator("#tools-error")).to_contain_text("not JSON")
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    page.fill("#set-tools", json.dumps([tool]))
    send(page, "Weather?")
    expect(page.locator(".call code").last).to_have_text('{\n  "city": "Rome"\n}')
    page.fill("[aria-label='Result of weather']", "21 degrees")
    page.click("text=Send the results")
    expect(answered(page, 2).locator(".answer").last).to_have_text("It is warm.")
    assert double.requests[0]["tools"] == [{"type": "function", "function": tool}]
    _, called, result = double.requests[1]["messages"]
    assert called["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"}
