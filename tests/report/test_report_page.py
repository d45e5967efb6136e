"""The page of a report in Chromium: no error, no request, everything is found, with keys, in both sizes and colours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import NARROW, TIMEOUT, WIDE, expect, faults

import rlx

VIEWS = ["summary", "graph", "passes", "schedule", "kernels", "memory", "speed"]
FOLDER = os.environ.get("RLX_PAGE_SCREENSHOTS")


class Opened:
    """A report in the browser, with errors of its console and every request but the one for the file."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.url = path.as_uri()
        self.context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        self.context.set_default_timeout(TIMEOUT)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready]")

    def close(self) -> None:
        self.context.close()
        assert not self.errors, self.errors
        assert [url for url in self.requests if not url.startswith(("data:", self.url))] == []


@pytest.fixture
def opened(browser: Any, demo_report: Path) -> Iterator[Opened]:
    found = Opened(browser, demo_report)
    yield found
    found.close()


@pytest.fixture
def page(opened: Opened) -> Any:
    return opened.page


def test_every_part_shows_something(page: Any) -> None:
    for view in VIEWS:
        page.click(f"[data-view={view}]")
        expect(page.locator(f"[data-view={view}]")).to_have_attribute("aria-current", "page")
        assert len(page.inner_text("#view")) > 100, view
    assert page.locator(".budget > *").count() == 0
    page.click("[data-view=summary]")
    assert page.locator(".budget > *").count() >= 2 and page.locator(".legend li").count() >= 2


def test_the_search_finds_a_value_of_one_layer(page: Any) -> None:
    """And follows it through all stages, to its region and its kernel."""
    page.keyboard.press("/")
    page.keyboard.type("blk.0.attn_q")
    expect(page.locator("#found li").first).to_contain_text("blk.0.attn_q")
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2")).to_have_text("%blk.0.attn_q")
    expect(page.locator(".box.on")).to_have_attribute("data-name", "blk.*.attn_q")
    stages = page.locator(".journey > li")
    expect(stages).to_have_count(9)  # as built, and the eight passes of a decode program
    expect(stages.first).to_contain_text("%blk.0.attn_q = linear(%blk.0.attn_norm, %blk.0.attn_q.weight)")
    expect(stages.last).to_contain_text("region 0")
    page.click("#panel >> text=/^linear_/")
    expect(page.locator("#view .code h2")).to_contain_text("linear_")


@pytest.mark.parametrize("query", ["rope_kv_write", "gated-silu", "linear_q8_0", "token_embd.weight"])
def test_the_search_finds_ops_rules_kernels_and_weights(page: Any, query: str) -> None:
    page.fill("#search", query)
    assert page.locator("#found li[aria-selected]").count() >= 1
    page.fill("#search", f"{query} nowhere")
    expect(page.locator("#found li")).to_have_text("Nothing has this name.")


def test_every_pass_opens(page: Any) -> None:
    page.click("[data-view=passes]")
    steps = page.locator("details.step")
    assert steps.count() == 8
    for at in range(steps.count()):
        steps.nth(at).locator("summary").click()
        expect(steps.nth(at)).to_have_attribute("open", "")
        expect(steps.nth(at).locator(".inside > *").nth(1)).to_be_attached()  # the page fills it in a moment
    fuse = page.locator("#pass-fuse")
    expect(fuse).to_contain_text("gated-silu")
    assert fuse.locator(".minus").count() > 5 and fuse.locator(".plus").count() > 5
    fuse.locator("text=/Whole IR after fuse/").click()
    expect(fuse.locator(".code pre")).to_contain_text('graph "qwen3" decode {')


def test_the_graph_moves_zooms_and_is_walked_with_keys(page: Any) -> None:
    page.click("[data-view=graph]")
    box = page.locator('.box[data-name="blk.*.attn_norm.q8a"]')
    box.focus()
    page.keyboard.press("ArrowDown")
    below = page.evaluate("document.activeElement.dataset.name")
    assert below in ("blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.dataset.name") == "blk.*.attn_norm.q8a"
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2")).to_have_text("%blk.0.attn_norm.q8a")
    before = page.locator(".canvas svg > g").get_attribute("transform")
    page.keyboard.press("+")
    assert page.locator(".canvas svg > g").get_attribute("transform") != before
    page.mouse.move(300, 500)
    moved = page.locator(".canvas svg > g").get_attribute("transform")
    page.mouse.down()
    page.mouse.move(420, 560, steps=3)
    page.mouse.up()
    assert page.locator(".canvas svg > g").get_attribute("transform") != moved
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    page.select_option(".tools select", "graph")
    expect(page.locator('.box[data-name="blk.*.ffn_gate.silu"]')).to_have_count(1)
    expect(page.locator(".frame text")).to_have_text("6 equal layers: 0-5")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_is_readable_and_accessible(browser: Any, demo_report: Path, viewport: dict[str, int], scheme: str) -> None:
    opened = Opened(browser, demo_report, viewport=viewport, color_scheme=scheme)
    page = opened.page
    for view in VIEWS:
        page.click(f"[data-view={view}]")
        if view == "passes":
            page.click("text=Open all")
        page.wait_for_timeout(100)
        if FOLDER is not None:
            Path(FOLDER).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{FOLDER}/report-{viewport['width']}-{scheme}-{view}.png")
        assert faults(page) == [], view
    page.fill("#search", "blk.0.attn_q")
    page.press("#search", "Enter")
    page.wait_for_selector(".journey > li")
    assert faults(page) == []
    opened.close()


def test_a_graph_of_ones_own(browser: Any, tmp_path: Path) -> None:
    """`exe.report()`: a name that is markup stays text."""
    graph = rlx.Graph("<img src=x onerror=alert(1)>")
    x = graph.input("x", [rlx.SEQ, 64])
    graph.output("y", rlx.ops.silu(rlx.ops.linear(x, graph.weight("w", [32, 64]))))
    with rlx.compile(graph, bind={"w": np.ones((32, 64), np.float32)}) as exe:
        exe.report(tmp_path / "own.html")
        assert "<iframe" in exe.report()._repr_html_()
    opened = Opened(browser, tmp_path / "own.html")
    expect(opened.page.locator("#title")).to_have_text("<img src=x onerror=alert(1)>")
    for view in VIEWS:
        opened.page.click(f"[data-view={view}]")
    expect(opened.page.locator(".card")).to_contain_text("not measured")
    opened.close()
