"""Draws the pictures of the report that the documentation shows: `python tools/site/pictures.py REPORT`.

REPORT is a page that `rlx report --measure` wrote. It needs Playwright and Chromium (`make test-page`).
Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
#: Parts of the page -> what is clicked there, or searched for.
PICTURES = {"summary": "", "passes": "click fuse", "speed": "", "graph": "search blk.0.ffn_act"}
SIZE = {"width": 1280, "height": 800}
QUALITY = 78  # of WebP; the letters stay sharp


def draw(page: Page, view: str, action: str) -> bytes:
    """The part of the page as WebP."""
    page.click(f'[data-view="{view}"]')
    kind, _, value = action.partition(" ")
    if kind == "click":
        page.locator("main summary", has_text=value).first.click()
    elif kind == "search":
        page.fill("header input", value)
        page.keyboard.press("Enter")
    page.mouse.move(1, 799)
    page.wait_for_timeout(700)  # drawings settle
    image = Image.open(io.BytesIO(page.screenshot()))
    out = io.BytesIO()
    image.convert("RGB").save(out, "WEBP", quality=QUALITY, method=6)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the page")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder for the pictures (docs)")
    args = parser.parse_args()
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for theme, ending in (("light", ""), ("dark", "-dark")):
            page = browser.new_page(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
            page.goto(args.report.resolve().as_uri())
            for name, action in PICTURES.items():
                if ending and name != "summary":
                    continue
                data = draw(page, name, action)
                (args.out / f"report-{name}{ending}.webp").write_bytes(data)
                print(f"report-{name}{ending}.webp: {len(data) / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
