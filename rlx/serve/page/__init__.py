"""The chat page at `/`: one HTML document without any other file, which speaks to the server's own API.

The sources lie beside this module: `index.html`, `styles.css` and `scripts/*.js`. `document` joins them, see
`rlx.web_page`. The folder `docs` has those of the page at `/docs`: what `/openapi.json` says, for people.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from rlx import web_page

if TYPE_CHECKING:
    from rlx.serve.server import Server


@dataclass(frozen=True)
class Document:
    """The page as it is sent: `body` (UTF-8) and the headers that belong to it."""

    body: bytes
    headers: dict[str, str]


@cache
def document(folder: str = ".") -> Document:
    """Joins the sources of a page to one document, and computes its headers.

    Args:
        folder: where the sources lie, from this module.
    """
    sources = web_page.join(resources.files(__name__) / folder)
    body = sources.html.encode()
    headers = {
        "Content-Security-Policy": _policy(sources),
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Cache-Control": "no-cache",  # a browser asks each time, and gets 304 while the page is the same
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    return Document(body, headers)


def _policy(sources: web_page.Sources) -> str:
    """The page's rights: run this script, use these styles, show images that it has, and ask this server.

    Trusted types forbid to make markup of text, so an answer of a model cannot become part of the page's code.
    https://www.w3.org/TR/CSP3/, https://www.w3.org/TR/trusted-types/
    """
    return web_page.policy(
        {
            "default-src": "'none'",
            "script-src": web_page.hashed(sources.scripts),
            "style-src": web_page.hashed(sources.styles),
            "img-src": "data: blob:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
    )


def router(server: Server) -> APIRouter:
    """`GET` and `HEAD` of `/` and `/docs`, unless the option `page` is off.

    They need no API key: the pages ask for it.
    """
    found = APIRouter()
    for path, folder in (("/", "."), ("/docs", "docs")) if server.options.page else ():
        found.add_api_route(path, _showing(document(folder)), methods=["GET", "HEAD"], include_in_schema=False)
    return found


def _showing(page: Document) -> Callable[[Request], Awaitable[Response]]:
    async def show_page(request: Request) -> Response:
        if page.headers["ETag"] in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, media_type="text/html", headers=page.headers)

    return show_page
