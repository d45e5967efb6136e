"""A page of one HTML document, without any other file, joined from sources that lie in a folder.

Used by the server's chat page and by reports. The folder holds `index.html`, `styles.css` and `scripts/*.js`. Colours,
fonts and themes of all pages stand in `base.css` beside this module. The scripts are ECMAScript modules; the joined
one has them in the order of their imports, without the import and export statements, so their top-level names differ
from one another.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import resources
from importlib.resources.abc import Traversable

_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./([\w.]+)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|class|function)\b)", re.MULTILINE)

#: Where the two joined sources stand in `index.html`.
_STYLES_MARK, _SCRIPTS_MARK = "/* styles.css */", "/* scripts */"


@dataclass(frozen=True)
class Sources:
    """The joined sources of a page.

    Attributes:
        styles: the style sheet.
        scripts: one script.
        html: the document with both in it.
    """

    styles: str
    scripts: str
    html: str


def join(folder: Traversable) -> Sources:
    """Joins the sources of a folder to one document."""
    sheets = resources.files(__name__).joinpath("base.css"), folder.joinpath("styles.css")
    styles = "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    files = sorted(folder.joinpath("scripts").iterdir(), key=lambda file: file.name)
    scripts = _joined({file.name: file.read_text(encoding="utf-8") for file in files})
    html = folder.joinpath("index.html").read_text(encoding="utf-8")
    for mark, source in ((_STYLES_MARK, styles), (_SCRIPTS_MARK, scripts)):
        before, after = html.split(mark)
        html = before + source + after
    return Sources(styles, scripts, html)


def _joined(modules: Mapping[str, str]) -> str:
    """The modules as one script, each after what it imports."""
    order = TopologicalSorter({name: _IMPORT.findall(source) for name, source in modules.items()}).static_order()
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", modules[name])) for name in order)


def policy(rules: Mapping[str, str]) -> str:
    """The text of a Content-Security-Policy: https://www.w3.org/TR/CSP3/."""
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def hashed(source: str) -> str:
    """The source expression of a policy that permits exactly this script or style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
