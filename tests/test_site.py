"""The documentation site: nothing is left out of it, and a build has no dead link and asks no other host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCS, ROOT

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
    assert sorted([*entries, "__version__"]) == sorted([*rlx.__all__, "runners.model.Model"])


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
