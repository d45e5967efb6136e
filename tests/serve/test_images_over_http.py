"""Images through all APIs: the same picture gets the same answer, and options say what may be read."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import ollama
import openai
import pytest
from PIL import Image as PillowImage

from rlx.serve import ServedModel, ServerOptions, create_app

TEXT = "What is this?"
COUNT = 8


def picture(seed: int = 5) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 60, 3), np.uint8)
    PillowImage.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat(server: Any, url: str, form: str = "image_url") -> str:
    parts: Any = [{"type": form, "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    messages = [{"role": "user", "content": parts}]
    found = server.openai.chat.completions.create(
        model="demo-vision", messages=messages, max_tokens=COUNT, temperature=0
    )
    return str(found.choices[0].message.content)


def responses(server: Any, url: str) -> str:
    parts: Any = [{"type": "input_image", "detail": "auto", "image_url": url}, {"type": "input_text", "text": TEXT}]
    items = [{"role": "user", "content": parts}]
    options: Any = {"max_output_tokens": COUNT, "temperature": 0}
    return str(server.openai.responses.create(model="demo-vision", input=items, **options).output_text)


def messages(server: Any, url: str) -> str:
    source: Any = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        found = client.messages.create(
            model="demo-vision", messages=[{"role": "user", "content": parts}], max_tokens=COUNT,
            extra_body={"temperature": 0},
        )  # fmt: skip
    return str(found.content[0].text)  # type: ignore[union-attr]


def ollama_chat(server: Any, url: str) -> str:
    image = url.partition(",")[2]
    client, options = ollama.Client(host=server.url, timeout=120), {"temperature": 0, "num_predict": COUNT}
    said = [{"role": "user", "content": TEXT, "images": [image]}]
    found = client.chat("demo-vision", messages=said, options=options).message.content
    assert client.generate("demo-vision", prompt=TEXT, images=[image], options=options).response == found
    return str(found)


APIS = (chat, responses, messages, ollama_chat)


def test_the_same_picture_gets_the_same_answer_through_all_apis(server_that_sees: Any) -> None:
    model = server_that_sees.model.runner
    parts = [{"type": "image", "image": picture()}, {"type": "text", "text": TEXT}]
    expected = model.chat([{"role": "user", "content": parts}], max_tokens=COUNT, temperature=0.0).text
    assert expected
    assert [ask(server_that_sees, uri(picture())) for ask in APIS] == [expected] * len(APIS)
    assert chat(server_that_sees, uri(picture()), "input_image") == expected


def test_tokens_of_a_picture_are_counted(server_that_sees: Any) -> None:
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": uri(picture())}]}]
    client = server_that_sees.openai.responses
    count = client.input_tokens.count(model="demo-vision", input=items).input_tokens
    assert count == client.create(model="demo-vision", input=items, max_output_tokens=1).usage.input_tokens
    assert count > 10


@pytest.mark.parametrize("ask", APIS)
def test_a_damaged_picture_is_the_clients_mistake(server_that_sees: Any, ask: Callable[[Any, str], str]) -> None:
    kinds = (openai.BadRequestError, anthropic.BadRequestError, ollama.ResponseError)
    with pytest.raises(kinds, match="cannot be read"):
        ask(server_that_sees, uri(picture()[:100]))


@pytest.mark.parametrize("ask", APIS[:3])
def test_addresses_and_files_are_not_opened_unless_that_was_allowed(server_that_sees: Any, ask: Any) -> None:
    kinds = (openai.BadRequestError, anthropic.BadRequestError)
    with pytest.raises(kinds, match=r"downloads no images from 'example\.com'"):
        ask(server_that_sees, "https://example.com/a.png")
    with pytest.raises(kinds, match="reads no files of its own"):
        ask(server_that_sees, "file:///etc/passwd")


def test_options_say_what_may_be_read(server_that_sees: Any, serve: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    model = ServedModel(server_that_sees.model.runner, "demo-vision")
    options = ServerOptions(media_path=tmp_path, max_images=1, max_image_mb=0.02, max_image_megapixels=0.01)
    with serve(create_app(model, options)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        server = type("Server", (), {"url": url, "openai": client})
        expected = chat(server_that_sees, uri(picture()))
        assert chat(server, "file:a.png") == responses(server, "file://a.png") == expected
        assert messages(server, f"file://{tmp_path}/a.png") == expected
        with pytest.raises(openai.BadRequestError, match="not below the folder"):
            chat(server, "file:../a.png")
        parts: Any = [{"type": "input_image", "image_url": uri(picture(i))} for i in range(2)]
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[1\]\.image_url: .*more than 1 images"):
            client.responses.create(model="demo-vision", input=[{"role": "user", "content": parts}])
        large = np.random.default_rng(0).integers(0, 256, (99, 99, 3), np.uint8)
        for pixels, sentence in ((large, "MB"), (np.zeros((200, 100, 3), np.uint8), "megapixels")):
            file = io.BytesIO()
            PillowImage.fromarray(pixels).save(file, "PNG")
            with pytest.raises(openai.BadRequestError, match=sentence):
                chat(server, uri(file.getvalue()))
