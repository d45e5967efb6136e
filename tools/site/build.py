"""Builds the documentation site from the Markdown files of the repository: `make docs`.

The pages are plain Markdown that GitHub shows, too. Three things are made here: the navigation, which is the list in
docs/README.md; the reference, from the docstrings of every public name; and a page for each file of the source that a
page links to, so that no link leads out of the site. Zensical makes HTML of it. The result needs no network.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from check import problems  # noqa: E402  (the path of the folder comes first)
from reference import GROUPS, missing, page_of_group  # noqa: E402

CONTENTS = "docs/README.md"
FIXED = {
    "README.md": "index.md",
    CONTENTS: "contents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".md": "markdown", ".sh": "bash"}
_LINK = re.compile(r'(?<=\]\()(?!\w+:)([^)#\s]*)(#[^)\s]*)?(?=\))|(?<=src=")([^"#:]+)(?=")|(?<=srcset=")([^"#:]+)(?=")')
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)")

Nav = list[dict[str, "str | Nav"]]


class SiteError(Exception):
    """The pages do not make a site."""


def site_path(path: str) -> str:
    """Where a file of the repository stands in the site: `docs/chat.md` -> `chat.md`, `rlx/ir/ops.py` ->
    `source/rlx/ir/ops.py.md`.
    """
    if path in FIXED:
        return FIXED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    shown = "/".join(part.lstrip(".") for part in path.split("/"))  # the builder skips what begins with a dot
    if (ROOT / path).is_dir():
        return f"source/{shown}/index.md"
    if (ROOT / path).suffix in (".webp", ".png", ".svg"):
        return f"source/{shown}"
    return f"source/{shown}" if path.endswith("README.md") else f"source/{shown}.md"


def navigation(contents: str) -> Nav:
    """The sections of docs/README.md and the pages in them. The reference is made, so it is added."""
    nav: Nav = [{"Home": "index.md"}]
    pages: Nav = []
    for line in contents.splitlines():
        if found := _SECTION.match(line):
            pages = []
            nav.append({found[1]: pages})
        elif found := _ENTRY.match(line):
            pages.append({found[1]: site_path(posixpath.normpath(f"docs/{found[2]}"))})
    nav.insert(-1, {"Reference": [{"Names": "reference/index.md"}, *({g.title: g.path} for g in GROUPS)]})
    return nav


def pages_of(nav: Nav) -> list[str]:
    """Every page of the navigation."""
    found = []
    for entry in nav:
        for value in entry.values():
            found += [value] if isinstance(value, str) else pages_of(value)
    return found


def unlisted(nav: Nav) -> list[str]:
    """Pages of docs/ that are not in the navigation."""
    listed = {*pages_of(nav), FIXED[CONTENTS]}
    return [page.name for page in sorted((ROOT / "docs").glob("*.md")) if site_path(f"docs/{page.name}") not in listed]


def relinked(text: str, path: str, to: str, linked: set[str]) -> str:
    """The Markdown of the file `path` as the page `to`: links lead to pages of the site. What they name is added to
    `linked`.
    """

    def link(found: re.Match[str]) -> str:
        target = found[1] or found[3] or found[4]
        anchor = found[2] or ""
        if not target:
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / there).exists():
            raise SiteError(f"{path}: the link to {target} leads nowhere")
        linked.add(there)
        return posixpath.relpath(site_path(there), posixpath.dirname(to)) + anchor

    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(link, part) for part in _CODE.split(text))


def source_page(path: str, linked: set[str]) -> str:
    """The page of a file of the source, or of a folder: its files, with a link where they have a page."""
    title = f'---\ntitle: "{path}"\nsearch:\n  exclude: true\nhide:\n  - navigation\n---\n\n# {path}\n\n'
    found = ROOT / path
    if found.is_dir():
        return title + "\n".join(f"- {line}" for line in _listing(found, path, linked)) + "\n"
    if found.suffix == ".ipynb":
        return title + _notebook(found)
    fence = "`" * 4
    return f"{title}{fence}{LANGUAGES.get(found.suffix, 'text')}\n{found.read_text(encoding='utf-8')}\n{fence}\n"


def _listing(folder: Path, path: str, linked: set[str]) -> list[str]:
    lines = []
    for file in sorted(folder.iterdir(), key=lambda each: (each.is_file(), each.name)):
        here = f"{path}/{file.name}"
        if file.name.startswith((".", "__pycache__")):
            continue
        name = f"`{file.name}{'/' if file.is_dir() else ''}`"
        if here in linked:
            name = f"[{name}]({posixpath.relpath(site_path(here), f'source/{path}')})"
        summary = _summary(file)
        lines.append(f"{name}: {summary}" if summary else name)
    return lines


def _summary(file: Path) -> str:
    """The first line of a module's docstring, or of that of a package."""
    file = file / "__init__.py" if file.is_dir() else file
    if file.suffix != ".py" or not file.is_file():
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").replace("<", "&lt;").replace("[", "\\[")


def _notebook(file: Path) -> str:
    """The cells of a notebook, without their output."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"````python\n{text}\n````")
    return "\n\n".join(parts) + "\n"


def stage(out: Path) -> None:
    """Writes the pages and the configuration into the folder `out`."""
    nav = navigation((ROOT / CONTENTS).read_text(encoding="utf-8"))
    if left := unlisted(nav):
        raise SiteError(f"{', '.join(left)}: not in the navigation. Add a line to docs/README.md")
    if left := missing():
        raise SiteError(f"{', '.join(left)}: public names in no group of tools/site/reference.py")
    texts, copied = _linked_pages()
    texts |= {group.path: page_of_group(group) for group in GROUPS}
    texts["reference/index.md"] = page_of_group(None)
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    for to, text in texts.items():
        (pages / to).parent.mkdir(parents=True, exist_ok=True)
        (pages / to).write_text(text, encoding="utf-8")
    for path in copied:
        (pages / site_path(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, pages / site_path(path))
    shutil.copyfile(HERE / "site.css", pages / "site.css")
    config = (HERE / "zensical.toml").read_text(encoding="utf-8").replace('"REPOSITORY"', json.dumps(str(ROOT)))
    config = config.replace("[project]\n", f"[project]\nnav = {_toml(nav)}\n", 1)
    (out / "zensical.toml").write_text(config, encoding="utf-8")


def _linked_pages() -> tuple[dict[str, str], list[str]]:
    """Pages by their place in the site, and files to copy: those of docs/, and all that a page links to."""
    linked = {*FIXED, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
    read: set[str] = set()
    texts: dict[str, str] = {}
    while todo := {path for path in linked - read if path.endswith(".md")}:
        read |= todo
        for path in sorted(todo):
            to = site_path(path)
            texts[to] = relinked((ROOT / path).read_text(encoding="utf-8"), path, to, linked)
    sources = [path for path in sorted(linked - read) if site_path(path).endswith(".md")]
    texts |= {site_path(path): source_page(path, linked) for path in sources}
    return texts, sorted(linked - read - {*sources})


def _toml(nav: Nav | str) -> str:
    if isinstance(nav, str):
        return json.dumps(nav)
    return "[" + ", ".join(f"{{ {json.dumps(k)} = {_toml(v)} }}" for entry in nav for k, v in entry.items()) + "]"


def build(out: Path) -> Path:
    """Builds the site in the folder `out` and returns the site's folder. Raises `SiteError` for dead links."""
    stage(out)
    site = out / "site"
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(out / "zensical.toml")]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    if done.returncode:
        raise SiteError(re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr))
    if found := problems(site):
        raise SiteError("\n".join(found))
    return site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="the folder to build in (build/docs)")
    args = parser.parse_args()
    try:
        site = build(args.out.resolve())
    except SiteError as error:
        sys.exit(f"error: {error}")
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{pages} pages in {site}. To read them: python -m http.server --directory {site}")


if __name__ == "__main__":
    main()
