"""The page of a report: one HTML file with its data, which asks no server for anything.

Last step of the report stage. The sources lie beside this module, see `rlx.web_page`. The data are compressed; large
texts, such as assembly, are read only when they are looked at.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rlx import web_page
from rlx.errors import OutputError, RlxError, file_error
from rlx.partial_file import into_place
from rlx.report.data import report_data
from rlx.report.source import Source, Subject

#: Where the data, the policy and the title stand in `index.html`.
_DATA_MARK, _POLICY_MARK, _TITLE_MARK = "<!-- data -->", "<!-- policy -->", "<!-- title -->"


@dataclass(frozen=True)
class ReportPage:
    """A report as one HTML document. In a notebook it is shown in the cell.

    Attributes:
        html: the document.
        data: what it shows, as plain JSON data.

    Example: `exe.report().write("report.html")`.
    """

    html: str
    data: Mapping[str, Any]

    def write(self, path: str | Path) -> Path:
        """Writes the document into a file, whole or not at all, and returns its path.

        Raises:
            OutputError: the file cannot be written.
        """
        out = Path(path).expanduser()
        try:
            with into_place(out) as partial:
                partial.write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise unwritable(out, error) from error
        return out

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 48rem; border: 0"
        return f'<iframe title="report" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        names = ", ".join(program["name"] for program in self.data["programs"])
        return f"<ReportPage of {names or 'no program'}, {len(self.html) / 1e6:.1f} MB>"


def unwritable(path: Path, error: OSError) -> RlxError:
    """The error for a report that cannot be written."""
    return file_error(OutputError, "the report cannot be written", error, path, "name another file with --out")


def make_page(subject: Subject, sources: Sequence[Source]) -> ReportPage:
    """The page about some programs."""
    data, texts = report_data(subject, sources)
    stored = {"data": _packed(json.dumps(data, separators=(",", ":"))), "texts": {}}
    stored["texts"] = {key: _packed(make()) for key, make in texts.items()}
    html = _document()
    # JSON in base64 has no character that ends a script element.
    for mark, value in ((_TITLE_MARK, escape(subject.title)), (_DATA_MARK, json.dumps(stored, separators=(",", ":")))):
        before, after = html.split(mark)
        html = before + value + after
    return ReportPage(html, data)


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@cache
def _document() -> str:
    """The document without its data. Its policy permits its own script and styles, and nothing from anywhere else."""
    sources = web_page.join(resources.files(__name__))
    rules = {
        "default-src": "'none'",
        "script-src": web_page.hashed(sources.scripts),
        "style-src": web_page.hashed(sources.styles),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    before, after = sources.html.split(_POLICY_MARK)
    return f'{before}<meta http-equiv="Content-Security-Policy" content="{web_page.policy(rules)}">{after}'
