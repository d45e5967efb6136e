"""What a built site must be: every link and anchor leads somewhere, and nothing is loaded from another host."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "srcset")}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := found.get(key))}
        relation = found.get("rel") or ""
        for key in ("href", "src", "srcset"):
            value = found.get(key)
            if value is None or (tag, relation) == ("link", "canonical"):
                continue
            (self.loads if (tag, key) in LOADED else self.links).append(value)


def problems(site: Path) -> list[str]:
    """Dead links, dead anchors and things from elsewhere, one line each."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        base = site if name.name == "404.html" else path.parent  # 404.html is served for any address
        for link in dict.fromkeys(page.links + page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{name}: loads {link}")
                continue
            there = _file(site, base, path, unquote(parts.path))
            if there is None:
                found.append(f"{name}: no file for the link {link}")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].ids:
                found.append(f"{name}: no anchor for the link {link}")
    return found


def _file(site: Path, base: Path, page: Path, path: str) -> Path | None:
    if not path:
        return page
    there = (site / path.lstrip("/") if path.startswith("/") else base / path).resolve()
    there = there / "index.html" if there.is_dir() else there
    return there if there.is_file() and there.is_relative_to(site.resolve()) else None
