"""The chat page in a browser, over a server that says what each test tells it to.

Skipped without Playwright and Chromium; `make test-page` installs the first.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import NARROW, WIDE, Watched, chromium, faults, sync_api
from page_double import BREAK, Double, Gate
from PIL import Image

expect = sync_api.expect
CHAIN = ["# Title\n\nSome **bold", "** text and `code", "`.\n\n```python\nprint(1)", "\n```\n\n- a\n- b\n"]
ANSWER = "".join(CHAIN)
#: What every request has.
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def running_double(serve: Callable[[Any], Any]) -> Iterator[tuple[Double, str]]:
    double = Double()
    with serve(double.app) as url:
        yield double, url


@pytest.fixture
def double(running_double: tuple[Double, str]) -> Double:
    running_double[0].reset()
    return running_double[0]


@pytest.fixture
def watched(browser: Any, double: Double, running_double: tuple[Double, str]) -> Iterator[Watched]:
    found = Watched(browser, running_double[1])
    yield found
    found.close()


@pytest.fixture
def page(watched: Watched) -> Any:
    return watched.open()


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


# ---------------------------------------------------------------------------------------------------- one answer


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


def test_an_edited_answer_is_what_the_model_is_told(page: Any, double: Double) -> None:
    send(page, "one")
    answered(page)
    page.click("[aria-label='Edit the answer']")
    page.fill("[aria-label='Edit the message']", "Changed.")
    page.click("text=Save")
    expect(page.locator(".answer")).to_have_text("Changed.")
    send(page, "two")
    answered(page, 2)
    assert double.requests[1]["messages"][1]["content"] == "Changed."


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


def test_copy(page: Any, double: Double) -> None:
    double.answers = [[ANSWER]]
    send(page, "Go")
    answered(page)
    page.click(".code .bar button")
    clipboard = page.locator("body")
    assert clipboard.evaluate("() => navigator.clipboard.readText()") == "print(1)"
    page.click("[aria-label='Copy the answer']")
    assert clipboard.evaluate("() => navigator.clipboard.readText()") == ANSWER


# ---------------------------------------------------------------------------------------------------- settings


def test_settings_are_sent_and_kept(page: Any, double: Double) -> None:
    page.keyboard.press("Alt+KeyS")
    expect(page.locator("#set-temperature")).to_have_attribute("placeholder", "0.7")
    values = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 20}
    page.fill("#set-system", "Be brief.")
    for name, value in values.items():
        page.fill(f"#set-{name}", str(value))
    page.select_option("#set-thinking", "off")
    page.fill("#set-temperature", "-1")
    expect(page.locator("#set-temperature")).to_have_attribute("aria-invalid", "true")
    page.fill("#set-temperature", "0.25")
    send(page, "Go")
    answered(page)
    body = double.requests[0]
    assert {name: body[name] for name in values} == values
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    page.reload()
    page.wait_for_selector(".message.user")
    page.keyboard.press("Alt+KeyS")
    expect(page.locator("#set-top_k")).to_have_value("7")
    page.click("text=Reset all")
    send(page, "Go")
    answered(page, 2)
    assert double.requests[1].keys() == {"model", "messages", *STREAM}


def test_the_schema_box(page: Any, double: Double) -> None:
    double.answers = [['{"name":', '"Mira"}']]
    page.keyboard.press("Alt+KeyS")
    page.check("input[value=schema]")
    page.fill("#set-schema", '{"type": ')
    expect(page.locator("#schema-error")).to_contain_text("The JSON schema is not JSON")
    page.fill("#message", "Go")
    page.press("#message", "Enter")
    expect(page.locator("#set-schema")).to_be_focused()
    assert not double.requests
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    page.fill("#set-schema", json.dumps(schema))
    expect(page.locator("#schema-error")).to_be_empty()
    page.press("#message", "Enter")
    expect(answered(page).locator("code")).to_have_text('{\n  "name": "Mira"\n}')
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert double.requests[0]["response_format"] == form
    page.check("input[value=json]")
    send(page, "Go")
    answered(page, 2)
    assert double.requests[1]["response_format"] == {"type": "json_object"}


# ---------------------------------------------------------------------------------------------------- images

GIVE = """(target, [kind, data, type]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  transfer.items.add(new File([bytes], "picture.png", {type}));
  const how = {bubbles: true, cancelable: true};
  const event = kind === "paste" ? new ClipboardEvent("paste", {clipboardData: transfer, ...how})
    : new DragEvent("drop", {dataTransfer: transfer, ...how});
  target.dispatchEvent(event);
}"""


@pytest.mark.parametrize("how", ["paste", "drop", "file"])
def test_images(page: Any, double: Double, how: str) -> None:
    data = base64.b64encode(picture()).decode()
    if how == "file":
        page.set_input_files("#attach-file", {"name": "picture.png", "mimeType": "image/png", "buffer": picture()})
    else:
        page.locator("#message").evaluate(GIVE, [how, data, "image/png"])
    expect(page.locator("#attachments img")).to_have_count(1)
    send(page, "What is it?")
    expect(answered(page)).to_be_visible()
    expect(page.locator(".user img")).to_have_attribute("src", f"data:image/png;base64,{data}")
    image, text = double.requests[0]["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    assert text == {"type": "text", "text": "What is it?"}


def test_large_images_are_made_smaller_and_others_refused(page: Any, double: Double) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3000, 30), "red").save(file, "BMP")
    page.set_input_files("#attach-file", {"name": "a.bmp", "mimeType": "image/bmp", "buffer": file.getvalue()})
    expect(page.locator("#attachments img")).to_have_count(1)
    page.set_input_files("#attach-file", {"name": "b.png", "mimeType": "image/png", "buffer": b"no image"})
    expect(page.locator("#toasts")).to_contain_text("b.png cannot be read as an image")
    send(page, "Go")
    answered(page)
    url = double.requests[0]["messages"][0]["content"][0]["image_url"]["url"]
    kind, data = url.split(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size[0] == 2048


def test_a_model_without_images_takes_none(watched: Watched, double: Double) -> None:
    double.props["modalities"] = {"vision": False}
    page = watched.open()
    assert not page.locator("#attach").is_visible()
    page.locator("#message").evaluate(GIVE, ["paste", base64.b64encode(picture()).decode(), "image/png"])
    expect(page.locator("#toasts")).to_contain_text("takes no images")


# ---------------------------------------------------------------------------------------------------- conversations


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


def test_another_tab_sees_what_this_one_wrote(page: Any, watched: Watched, double: Double) -> None:
    other = watched.context.new_page()
    other.goto(watched.url)
    other.wait_for_selector("#model:not(:empty)")
    send(page, "Alpha")
    answered(page)
    expect(other.locator(".conversation .open")).to_have_text("Alpha")


def test_the_list_is_searched(page: Any, double: Double) -> None:
    for number in range(8):
        page.click("#new")
        send(page, f"Number {number}")
        answered(page)
    page.fill("#search", "number 3")
    expect(page.locator(".conversation")).to_have_count(1)
    page.fill("#search", "nowhere")
    expect(page.locator("#conversations")).to_have_text("Nothing found.")


# ---------------------------------------------------------------------------------------------------- failures


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


def test_a_key_that_is_not_given_leaves_the_question(page: Any, double: Double) -> None:
    double.key = "secret-key"
    send(page, "Go")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    expect(answered(page).locator(".problem")).to_contain_text("a valid API key is missing")
    double.key = ""
    page.click("text=Try again")
    expect(answered(page).locator(".answer")).to_have_text("Hello.")


@pytest.mark.parametrize(("status", "words"), [(429, "The server is busy. Trying again in"), (503, "loading. Trying")])
def test_a_busy_server_is_asked_again(page: Any, double: Double, status: int, words: str) -> None:
    double.answers = [(status, "the model is loading", {"Retry-After": "1"}), ["Here."]]
    send(page, "Go")
    expect(page.locator(".status")).to_contain_text(words)
    expect(answered(page).locator(".answer")).to_have_text("Here.")


def test_waiting_for_a_busy_server_can_be_stopped(page: Any, double: Double) -> None:
    double.answers = [(429, "full", {"Retry-After": "30"})]
    send(page, "Go")
    expect(page.locator(".status")).to_contain_text("busy")
    page.keyboard.press("Escape")
    expect(answered(page).locator(".status")).to_have_text("Stopped.")


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


def test_refusals_and_errors_are_shown_in_the_servers_words(page: Any, double: Double) -> None:
    double.answers = [(400, "top_k: -3 is too small"), (500, "the server has failed")]
    send(page, "Go")
    expect(answered(page).locator(".problem")).to_contain_text("top_k: -3 is too small")
    page.click("text=Try again")
    expect(answered(page).locator(".problem")).to_contain_text("the server has failed")


def test_a_server_that_is_gone(page: Any, watched: Watched) -> None:
    watched.context.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    send(page, "Go")
    expect(answered(page).locator(".problem")).to_contain_text("The server does not answer.")


# ---------------------------------------------------------------------------------------------------- hostile answers

HOSTILE = [
    "<script>window.bad = 1</script>",
    "<img src=x onerror='window.bad = 1'>",
    "<svg onload=window.bad=1><script>window.bad=1</script></svg>",
    "<iframe srcdoc='<script>parent.bad=1</script>'></iframe>",
    "[x](javascript:window.bad=1) [x]( javascript:window.bad=1 ) [x](JaVaScRiPt:window.bad=1)",
    "[x](java\nscript:window.bad=1) [x](java&#10;script:bad) [x](\x01javascript:window.bad=1)",
    "[x](<javascript:window.bad=1>) <javascript:window.bad=1> [x](data:text/html,<script>bad</script>)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](//evil.example/a) [x](blob:x)",
    '[x](https://a.example/"onmouseover="window.bad=1) [x](https://a.example/ "t\\" onclick=window.bad=1 x=\\"")',
    '![x](https://evil.example/steal.png?q=1) ![x](x"onerror="window.bad=1)',
    "[![x](https://evil.example/a.png)](javascript:window.bad=1)",
    '```"><script>window.bad=1</script>\n</code></pre><script>window.bad=1</script>\n```',
    "```html onload=window.bad=1\n<script>window.bad = 1</script>\n```",
    "| <b onclick=window.bad=1>x</b> | y |\n|---|---|\n| <script>window.bad=1</script> | [x](javascript:bad) |",
    "&lt;script&gt;window.bad=1&lt;/script&gt; &#x3C;script&#x3E;",
    "<a href='javascript:window.bad=1'>x</a><form action=//evil.example><button>x</button></form>",
    "<style>*{background:url(//evil.example)}</style><link rel=stylesheet href=//evil.example/x.css>",
    "<base href=//evil.example><meta http-equiv=refresh content='0;url=//evil.example'>",
    "# <details open ontoggle=window.bad=1>\n> <video src=x onerror=window.bad=1>\n- <object data=x>",
    "$$<script>window.bad=1</script>$$ \\(<img src=x onerror=window.bad=1>\\)",
]


def test_an_answer_cannot_run_anything(page: Any, double: Double) -> None:
    """All that looks like markup is text; links lead to http, https and mail only; nothing is loaded."""
    text = "\n\n".join(HOSTILE)
    call = {"index": 0, "id": "<b>", "function": {"name": "<img src=x onerror=bad=1>", "arguments": "<script>"}}
    double.answers = [[{"reasoning_content": text}, text, {"tool_calls": [call]}]]
    send(page, HOSTILE[0] + HOSTILE[1])
    answered(page)
    page.click("summary")
    page.locator(".answer a").first.hover()
    list_ = page.locator("#messages")
    assert list_.evaluate("() => window.bad") is None
    tags = set(list_.evaluate("list => [...list.querySelectorAll('*')].map(e => e.tagName.toLowerCase())"))
    assert not tags & {"script", "iframe", "img", "object", "style", "link", "base", "meta", "video", "embed"}
    assert list_.locator(".prose svg:not(.icon), .prose form, .prose button:not(.link)").count() == 0
    addresses = list_.evaluate("list => [...list.querySelectorAll('a')].map(a => [a.protocol, a.rel, a.target])")
    assert addresses
    assert all(
        protocol in ("https:", "http:", "mailto:") and "noopener" in rel and target == "_blank"
        for protocol, rel, target in addresses
    )
    names = list_.evaluate("list => [...list.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
    assert not [name for name in names if name.startswith("on") or name in ("srcdoc", "style", "action")]
    assert "<script>window.bad = 1</script>" in page.locator(".answer").last.inner_text()
    assert '![x](x"onerror="window.bad=1)' in page.locator(".answer").last.inner_text()


def test_the_policy_stops_a_script_that_came_in_anyway(watched: Watched, double: Double) -> None:
    page = watched.open()
    tried = page.locator("body").evaluate(
        """body => {
          const script = document.createElement("script");
          try { body.innerHTML = "<img src=x onerror='window.bad=1'>"; } catch { window.refused = 1; }
          try { script.text = "window.bad = 1"; body.append(script); } catch { window.refused += 1; }
          return [window.refused, window.bad];
        }"""
    )
    assert tried == [2, None]
    watched.errors = [error for error in watched.errors if "Trusted" not in error]
    assert not watched.errors


# ---------------------------------------------------------------------------------------------------- access


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


FOCUSED = "() => document.activeElement.id || document.activeElement.ariaLabel || document.activeElement.className"


def test_focus_goes_through_everything_in_order(page: Any, double: Double) -> None:
    send(page, "Go")
    answered(page)
    page.locator("body").evaluate("() => document.activeElement.blur()")
    seen: list[str] = []
    while "message" not in seen and len(seen) < 40:
        page.keyboard.press("Tab")
        seen.append(page.locator("body").evaluate(FOCUSED))
    order = ["new", "sidebar-toggle", "theme", "settings-toggle", "Copy the message", "Copy the answer", "message"]
    places = [seen.index(name) for name in order]
    assert places == sorted(places)


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
def test_looks(browser: Any, double: Double, running_double: Any, viewport: Any, scheme: str) -> None:
    """Names, contrast, sizes and width, of the page in all its states."""
    watched = Watched(browser, running_double[1], viewport=viewport, color_scheme=scheme)
    page = watched.open()
    found = {"welcome": faults(page)}
    long = "x" * 300 + "\n\n| a | b |\n|---|---|\n| " + "word " * 40 + "| y |\n\n[link](https://a.example)\n\n"
    code = '```python\n# comment\ndef f(x): return "text" + 1\n```\n\n```diff\n-old\n+new\n```\n\n> quote\n\n- [x] a\n'
    double.answers = [[{"reasoning_content": "Hm."}, ANSWER, long, code]]
    send(page, "A long question " * 30)
    answered(page)
    page.click("summary")
    found["answer"] = faults(page)
    double.answers = [(400, "refused")]
    send(page, "Go")
    answered(page, 2)
    found["problem"] = faults(page)
    page.locator(".message.user").last.hover()
    page.locator("[aria-label='Edit and ask again']").last.click()
    found["edit"] = faults(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+KeyS")
    page.check("input[value=schema]")
    page.fill("#set-schema", "{")
    page.click("text=Tools")
    found["settings"] = faults(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+KeyK")
    found["shortcuts"] = faults(page)
    page.keyboard.press("Escape")
    if viewport is NARROW:
        page.keyboard.press("Alt+KeyL")
        expect(page.locator("#new")).to_be_focused()
        found["list"] = faults(page)
    watched.close()
    assert {state: each for state, each in found.items() if each} == {}
