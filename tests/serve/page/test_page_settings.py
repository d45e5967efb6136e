"""The chat page: settings, the schema box and images, as they are sent."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import pytest
from page_browser import GIVE, STREAM, answered, expect, picture, send
from page_double import Double
from PIL import Image


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


def test_one_of_several_models(page: Any, double: Double) -> None:
    """It answers from then on, also after a reload, and answers name their model."""
    assert page.locator("#model select").count() == 0
    send(page, "Go")
    expect(answered(page).locator(".stats")).to_contain_text(re.compile("^41.5 tokens/s"))
    double.models = ["double", "other"]
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("double")
    expect(page.locator(".stats")).to_contain_text("double · 41.5 tokens/s")
    page.get_by_label("Model").focus()
    page.get_by_label("Model").select_option("other")
    expect(page.locator("#model option[value=other]")).to_have_attribute("selected", "")
    expect(page.get_by_label("Model")).to_be_focused()
    send(page, "Go on")
    expect(answered(page, 2).locator(".stats")).to_contain_text("other · ")
    assert [body["model"] for body in double.requests] == ["double", "other"]
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("other")
    expect(page.locator(".stats").first).to_contain_text("double · ")
    double.models = ["double"]  # what a browser remembers may be gone
    page.reload()
    expect(page.locator("#model")).to_have_text("double")


def test_a_text_file(page: Any, double: Double) -> None:
    """It stands before what is typed, which is the title. A long message leaves room for its answer."""
    lines = "one `` line\n" * 500
    page.set_input_files("#attach-file", {"name": "a.txt", "mimeType": "text/plain", "buffer": lines.encode()})
    send(page, "Read this.")
    expect(answered(page)).to_be_visible()
    assert double.requests[0]["messages"][0]["content"] == f"a.txt:\n```txt\n{lines}```\n\nRead this."
    expect(page.locator("#title")).to_have_text("Read this.")
    assert page.locator(".bubble").bounding_box()["height"] < 450
    expect(page.locator(".bubble")).to_be_in_viewport()
