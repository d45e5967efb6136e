"""The documentation site: nothing is left out of it, and a build has no dead link and asks no other host."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from pages import DOCS, ROOT, text

import rlx


@pytest.fixture(scope="module", autouse=True)
def tools() -> Iterator[None]:
    """The folders of the site's tools and of the browser for pages, on the path."""
    folders = [str(ROOT / "tools" / "site"), str(ROOT / "tests" / "serve" / "page")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from build import stage

    out = tmp_path_factory.mktemp("site")
    stage(out)
    return out


def test_every_page_is_in_the_navigation() -> None:
    """docs/README.md is the navigation of the site."""
    from build import navigation, unlisted

    nav = navigation((DOCS / "README.md").read_text(encoding="utf-8"))
    assert not unlisted(nav), "add a line for the page to docs/README.md"
    assert [next(iter(section)) for section in nav] == ["Home", "Start", "Guides", "Inside", "Reference", "Project"]


def test_every_public_name_is_in_the_reference(staged: Path) -> None:
    from reference import GROUPS, missing

    assert not missing(), "add the modules of these names to a group of tools/site/reference.py"
    pages = "".join((staged / "pages" / group.path).read_text(encoding="utf-8") for group in GROUPS)
    entries = [line.removeprefix("::: rlx.") for line in pages.splitlines() if line.startswith("::: ")]
    assert sorted([*entries, "__version__"]) == sorted([*rlx.__all__, "runners.families.FamilyRunner"])


def test_every_link_of_the_pages_leads_to_a_page(staged: Path) -> None:
    """Also to files of the source, which get pages of their own. A link to what is not there is an error."""
    from build import SiteError, relinked

    linked: set[str] = set()
    text = "See [the ops](../rlx/ir/ops.py#L3), [chat](chat.md#keys), [them](https://example.org) and `[x](y)`."
    made = relinked(text, "docs/new.md", "new.md", linked)
    made_of_source = "[the ops](source/rlx/ir/ops.py.md#L3)"
    assert made == text.replace("[the ops](../rlx/ir/ops.py#L3)", made_of_source)
    assert linked == {"rlx/ir/ops.py", "docs/chat.md"}
    assert "def linear" in (staged / "pages" / "source" / "rlx" / "ir" / "ops.py.md").read_text(encoding="utf-8")
    with pytest.raises(SiteError, match=r"docs/new\.md: the link to gone\.md leads nowhere"):
        relinked("[gone](gone.md)", "docs/new.md", "new.md", set())


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    from check import problems

    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example/a.css"><script src="//cdn.example/a.js"></script>'
        '<h1 id="top"></h1><a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html"></a>'
        '<a href="#top"></a><a href="https://example.org"></a><img src="no.png">',
        encoding="utf-8",
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>', encoding="utf-8")
    assert sorted(problems(tmp_path)) == [
        "a.html: loads //cdn.example/a.js",
        "a.html: loads https://fonts.example/a.css",
        "a.html: no anchor for the link b.html#gone",
        "a.html: no file for the link c.html",
        "a.html: no file for the link no.png",
    ]


# -- the built site ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason='no site builder: pip install "rlx[docs]"')
    from build import build

    return build(tmp_path_factory.mktemp("built"))


def built(page: Path, site: Path) -> str:
    """The article of a page of docs/ in the built site."""
    html = (site / page.name).with_suffix(".html").read_text(encoding="utf-8")
    return html.split("<article", 1)[1].split("</article>", 1)[0]


@pytest.mark.slow
def test_the_site_has_what_the_pages_have(site: Path) -> None:
    """As many headings, list items, tables and blocks of code as GitHub's Markdown makes of them, of every page."""
    markdown = MarkdownIt("commonmark").enable("table")
    for page in sorted(set(DOCS.glob("*.md")) - {DOCS / "README.md"}):
        expected, article = markdown.render(text(page)), built(page, site)
        for tag in ("<h1", "<h2", "<h3", "<li>", "<table>", "<pre>", "<img"):
            found = article.count(tag) - (article.count("<table class") if tag == "<table>" else 0)
            assert found == expected.count(tag), f"{page.name}: {tag}"


SOUGHT = ("tool calling", "gpu", "docker", "temperature")  # what newcomers ask the search for


def test_pages_use_the_words_that_people_search_for() -> None:
    """The search knows what pages say, so a guide must use the common name of a thing."""
    guides = "".join(text(page) for page in DOCS.glob("*.md")).lower()
    assert all(word in guides for word in SOUGHT)
    titled = {word for word in SOUGHT if re.search(rf"^#.*{word}", guides, re.MULTILINE)}
    assert titled >= {"tool calling", "docker", "temperature"}, "the word of a topic stands in a heading"


@pytest.mark.slow
def test_the_search_has_them(site: Path) -> None:
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    found = [f"{item['title']} {item['text']}".lower() for item in index["items"]]
    assert all(any(word in item for item in found) for word in SOUGHT)


@pytest.mark.slow
def test_the_reference_has_an_anchor_and_a_text_for_every_name(site: Path) -> None:
    from reference import GROUPS

    for group in GROUPS:
        html = (site / group.path).with_suffix(".html").read_text(encoding="utf-8")
        for name in group.names:
            assert f'id="rlx.{name}"' in html, name


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_site_in_a_browser(site: Path, width: int, theme: str) -> None:
    """Nothing is asked of another host, nothing is an error, nothing is wider than the window, and the search finds."""
    from page_browser import Watched, chromium, expect

    with chromium() as browser, served(site) as url:
        watched = Watched(browser, url, viewport={"width": width, "height": 900}, color_scheme=theme)
        page = watched.page
        for name in ("index", "start", "comparison", "cli", "measurements", "report", "reference/runners", "changelog"):
            page.goto(f"{url}/{name}.html", wait_until="networkidle")
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name
            broken = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
            assert not broken, name
        assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[theme]
        page.keyboard.press("Control+k")
        page.keyboard.type("SampleOpts")
        expect(page.get_by_role("option").filter(has_text="SampleOpts").first).to_be_visible()
        watched.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder over HTTP on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
