"""The chat page at `/`: one HTML document without any other file, which speaks to the server's own API.

The sources lie beside this module: `index.html`, `styles.css` and `scripts/*.js`. `document` joins them. The scripts
are ECMAScript modules; the joined one has them in the order of their imports, without the import and export statements,
so their top-level names differ from one another.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from importlib import resources
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

if TYPE_CHECKING:
    from rlx.serve.app import Server

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./([\w.]+)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|class|function)\b)", re.MULTILINE)

#: Where the two joined sources stand in `index.html`.
_STYLES_MARK, _SCRIPTS_MARK = "/* styles.css */", "/* scripts */"


@dataclass(frozen=True)
class Document:
    """The page as it is sent: `body` (UTF-8) and the headers that belong to it."""

    body: bytes
    headers: dict[str, str]


@cache
def document() -> Document:
    """Joins the sources to one document, and computes its headers."""
    folder = resources.files(__name__)
    styles = folder.joinpath("styles.css").read_text(encoding="utf-8")
    files = sorted(folder.joinpath("scripts").iterdir(), key=lambda file: file.name)
    scripts = _joined({file.name: file.read_text(encoding="utf-8") for file in files})
    template = folder.joinpath("index.html").read_text(encoding="utf-8")
    for mark, source in ((_STYLES_MARK, styles), (_SCRIPTS_MARK, scripts)):
        before, after = template.split(mark)
        template = before + source + after
    body = template.encode()
    headers = {
        "Content-Security-Policy": _policy(styles, scripts),
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Cache-Control": "no-cache",  # a browser asks each time, and gets 304 while the page is the same
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    return Document(body, headers)


def _joined(modules: dict[str, str]) -> str:
    """The modules as one script, each after what it imports."""
    order = TopologicalSorter({name: _IMPORT.findall(source) for name, source in modules.items()}).static_order()
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", modules[name])) for name in order)


def _policy(styles: str, scripts: str) -> str:
    """What the page may do: run this script, use these styles, show images that it has, and ask this server.

    Trusted types forbid to make markup of text, so an answer of a model cannot become part of the page's code.
    https://www.w3.org/TR/CSP3/, https://www.w3.org/TR/trusted-types/
    """
    rules = {
        "default-src": "'none'",
        "script-src": _hash(scripts),
        "style-src": _hash(styles),
        "img-src": "data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def router(server: Server) -> APIRouter:
    """`GET /` and `HEAD /`, unless the option `page` is off. They need no API key: the page asks for it."""
    found = APIRouter()
    if not server.options.page:
        return found
    page = document()

    @found.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_page(request: Request) -> Response:
        if page.headers["ETag"] in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, media_type="text/html", headers=page.headers)

    return found
