"""The document of the chat page as the server sends it, without a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rlx.serve import page
from rlx.serve.options import ServerOptions


class Server:
    def __init__(self, **options: Any) -> None:
        self.options = ServerOptions(**options)


def client(**options: Any) -> TestClient:
    app = FastAPI(openapi_url=None)  # FastAPI has a page of its own at /docs
    app.include_router(page.router(Server(**options)))  # type: ignore[arg-type]
    return TestClient(app)


@pytest.fixture(scope="module", params=["/", "/docs"])
def sent(request: Any) -> httpx.Response:
    return client().get(request.param)


class Parts(HTMLParser):
    """Texts of scripts and styles, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside, self.texts, self.attributes = "", {"script": "", "style": ""}, list[tuple[str, str]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.texts:
            self.texts[self.inside] += data


def test_it_is_one_document_that_names_no_other(sent: httpx.Response) -> None:
    assert sent.status_code == 200
    assert sent.headers["content-type"] == "text/html; charset=utf-8"
    assert len(sent.content) < 200_000
    addresses = [value for name, value in Parts(sent.text).attributes if name in ("src", "href", "action", "srcset")]
    assert all(value.startswith(("data:", "#", "openapi.json")) for value in addresses)
    assert not re.search(r"@import|url\((?!#)", Parts(sent.text).texts["style"])
    assert not re.search(r"^(import|export)\b", Parts(sent.text).texts["script"], re.MULTILINE)


@pytest.mark.parametrize("tag", ["script", "style"])
def test_the_policy_allows_what_the_document_has_and_nothing_else(sent: httpx.Response, tag: str) -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in sent.headers["content-security-policy"].split(";"))
    digest = hashlib.sha256(Parts(sent.text).texts[tag].encode()).digest()
    assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in sent.headers["content-security-policy"]


def test_a_browser_that_has_it_gets_304(sent: httpx.Response) -> None:
    again = client().get(sent.request.url.path, headers={"If-None-Match": sent.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client().get(sent.request.url.path, headers={"If-None-Match": '"other"'})
    assert (other.status_code, other.content) == (200, sent.content)
