"""The pure parts of the chat page, in a browser: Markdown, the event reader, colours of code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import markdown_it
import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_browser import Watched
from page_double import serving

from rlx.serve import page

SCRIPTS = Path(page.__file__).parent / "scripts"
MARKS = [
    *("**", "*", "_", "~~", "`", "``", "```\n", "[", "](", ")", "![", "<", ">", "|", "\n", "\n\n", "- ", "1. ", "# "),
    *("> ", "|---|---|\n", "$$", "$", "\\(", "\\)", "\\[", "https://a.example/", "word ", " ", "  ", "\\", "é", "<b>"),
    "&lt;",
]
markdown = st.lists(st.sampled_from(MARKS), max_size=40).map("".join)


@pytest.fixture(scope="module")
def harness(browser: Any) -> Iterator[Any]:
    """An empty page beside the modules of the chat page; `run(code, argument)` runs a function on it."""
    app = FastAPI()
    app.mount("/scripts", StaticFiles(directory=SCRIPTS))
    app.get("/", response_class=HTMLResponse)(lambda: "<!doctype html><title>harness</title><main></main>")
    with serving(app) as url:
        watched = Watched(browser, url)
        watched.page.goto(url)

        def run(code: str, argument: Any) -> Any:
            return watched.page.evaluate(code, argument)

        yield run
        watched.close()


def html_of(run: Any, texts: list[str]) -> list[str]:
    """What the view draws for each text."""
    return run(
        """async (texts) => {
          const {MarkdownView} = await import("/scripts/markdown_view.js");
          return texts.map((text) => {
            const view = new MarkdownView();
            view.show(text);
            return view.element.innerHTML;
          });
        }""",
        texts,
    )


SAME = [
    "plain *em* **strong** ***both*** _em_ __strong__ a_b_c 2*3*4 **a*",
    "*a **b** c* **a *b* c** *a*b *a *b",
    "**bold**: text, **“quoted”** and **(brackets)** word**s**",
    "`code` `` a`b `` ``` x ``` `un",
    r"\*no\* \_no\_ \`no\` \\ \a",
    "- a\n- b\n  - c\n  - d\n- e",
    "1. a\n2. b\n\n   para\n3. c",
    "3. three\n4. four",
    "- one\n\n- two",
    "* a\n\n  b\n* c",
    "> quote\n> more\n\nafter",
    "> - a\n> - b",
    "```\ncode *x*\n\n  y\n```",
    "~~~\na ``` b\n~~~",
    "- a\n\n  ```\n  code\n  ```\n- b",
    "***\n\n- - -\n\n___",
    "[a](https://x.example) [b *c*](https://x.example/d(e)) [d](<https://x.example/f>)",
    "[a [b](https://x.example) c] [d]",
    "&amp;lt; &#42;a&#42; &#x41; &#0; &nope; `&lt;`",
    "| a | b |\n|---|---|\n| 1 | `x` |\n| 2 |",
    "not | a table",
    "1984. A year\n\nin 1984. it",
    "<b>x</b> & &lt; \"q\" 'r'",
]


@pytest.mark.parametrize("text", SAME)
def test_it_agrees_with_markdown_it(harness: Any, text: str) -> None:
    """An independent implementation of CommonMark, without the attributes and boxes that only the page has."""
    parser = markdown_it.MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    (found,) = bare(harness, [text], lambda each: html_of(harness, [each])[0])
    (expected,) = bare(harness, [text], parser.render)
    assert found == expected


def bare(run: Any, texts: list[str], render: Callable[[str], str]) -> list[Any]:
    """The tree of what `render` makes: tags and texts, without attributes, bars of code and paragraphs."""
    return run(
        """(sources) => sources.map((source) => {
          const template = document.createElement("template");
          template.innerHTML = source;
          const tree = (node) => {
            if (node.nodeType === Node.TEXT_NODE) return node.data.replace(/\\s+/g, " ");
            const children = [...node.childNodes].flatMap((child) => {
              if (child.nodeType === Node.ELEMENT_NODE && child.matches(".bar")) return [];
              const flat = child.nodeType === Node.ELEMENT_NODE &&
                child.matches("div, p, li > p, pre > code, pre > code span");
              return flat ? [" ", ...tree(child).slice(1), " "] : [tree(child)];
            });
            const joined = [];
            for (const child of children) {
              if (typeof child === "string" && typeof joined.at(-1) === "string") joined.push(joined.pop() + child);
              else joined.push(child);
            }
            const trim = (child) => (typeof child === "string" ? child.trim().replace(/ +/g, " ") : child);
            return [(node.tagName ?? "root").toLowerCase(), ...joined.map(trim).filter((child) => child !== "")];
          };
          return tree(template.content);
        })""",
        [render(text) for text in texts],
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a\nb", ["a<br>b"]),
        ("## A\n### B\n# C", ['<h4 class="level-2">', '<h5 class="level-3">', '<h4 class="level-1">']),
        ("- [x] done\n- [ ] open", ['type="checkbox"', "done", "open"]),
        ("~~gone~~ ~one~", ["<del>gone</del> ~one~"]),
        ("see https://a.example/b_c. And", ['href="https://a.example/b_c"', ". And"]),
        ("(https://a.example/b)", ['href="https://a.example/b"']),
        ("<me@a.example>", ['href="mailto:me@a.example"']),
        ("a<br>b", ["a<br>b"]),
        ("costs $5 and $6", ["costs $5 and $6"]),
        ("$x^2$ and \\(a_b\\)", ["<msup><mi>x</mi><mn>2</mn></msup>", "<msub><mi>a</mi><mi>b</mi></msub></math>"]),
        ("so $$x^2$$ ends", ['so <math display="block"', "</math> ends"]),
        ("kill $$ or $$", ["kill $$ or $$"]),
        ("$$\na*b*c\n$$", ['<math display="block"', "<mi>a</mi><mo>*</mo><mi>b</mi>"]),
        ("$\\frac{a}{b}$", ["<mfrac><mi>a</mi><mi>b</mi></mfrac>"]),
        ("$\\sqrt[3]{x}$", ["<mroot><mi>x</mi><mn>3</mn></mroot>"]),
        ("$$\\sum_{i=1}^n i$$", ["<munderover><mo>∑</mo>"]),
        ("$\\int_0^1 f$", ["<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>"]),
        ("$\\mathbb{R}^{12.5}$", ["<msup><mi>ℝ</mi><mn>12.5</mn></msup>"]),
        ("$$\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}$$", ["<mtd><mn>4</mn></mtd></mtr></mtable>"]),
        ("$f'(x) \\leq \\alpha$", ["<msup><mi>f</mi><mo>′</mo></msup>", "<mo>≤</mo><mi>α</mi>"]),
        ("$\\left( \\text{if } x \\right.$", ['<mo stretchy="true">(</mo><mtext>if&nbsp;</mtext>']),
        ("$\\unknown{x}$ and $a_$", ['<span class="math">$\\unknown{x}$</span>']),
        ("$\\frac{a$", ['<span class="math">$\\frac{a$</span>']),
        ("1. a\n   ```py\n   x = 1\n   ```\n2. b", ["<ol>", "py", "</ol>"]),
        ("1. a\n  - b", ["<ol><li><p>a</p><ul><li>"]),
        ("```python\nx", ["python", "x"]),
        ("![alt](https://a.example/i.png)", ['href="https://a.example/i.png"', "Image: alt"]),
        ("| a |\n|:-:|\n| x \\| y |", ['class="to-center"', "x | y"]),
    ],
)
def test_what_chats_need_beyond_commonmark(harness: Any, text: str, parts: list[str]) -> None:
    (found,) = html_of(harness, [text])
    assert [part for part in parts if part not in found] == [], found


@settings(max_examples=15)
@given(texts=st.lists(markdown, min_size=10, max_size=20))
def test_a_text_that_grows_is_drawn_as_if_it_came_at_once(harness: Any, texts: list[str]) -> None:
    different = harness(
        """async (texts) => {
          const {MarkdownView} = await import("/scripts/markdown_view.js");
          return texts.filter((text) => {
            const [grown, whole] = [new MarkdownView(), new MarkdownView()];
            for (let end = 1; end < text.length; end += 1 + (end % 3)) grown.show(text.slice(0, end));
            grown.show(text);
            whole.show(text);
            return grown.element.innerHTML !== whole.element.innerHTML;
          });
        }""",
        texts,
    )
    assert different == []


@example(texts=["$$**$$", r"$$\frac{\sqrt[3]{x}}{\hat{y}_1^2}$$", r"$\mathrm{a}\;\text{b}\begin{matrix}1\end{matrix}$"])
@settings(max_examples=15)
@given(texts=st.lists(markdown | st.text(), min_size=10, max_size=20))
def test_no_text_becomes_an_element_of_its_own(harness: Any, texts: list[str]) -> None:
    """Only what Markdown has is drawn, and links lead to http, https and mail."""
    found = harness(
        """async (texts) => {
          const {MarkdownView} = await import("/scripts/markdown_view.js");
          const tags = "a, blockquote, br, button, code, del, div, em, h4, h5, h6, hr, input[type=checkbox], li, ol, " +
            "p, path, pre, span, strong, svg, table, tbody, td, th, thead, tr, ul, math, mfrac, mi, mn, mo, mover, " +
            "mphantom, mroot, mrow, mspace, msqrt, msub, msubsup, msup, mtable, mtd, mtext, mtr, munder, munderover";
          return texts.filter((text) => {
            const view = new MarkdownView();
            view.show(text);
            const all = [...view.element.querySelectorAll("*")];
            const names = all.flatMap((each) => each.getAttributeNames());
            return !all.every((each) => each.matches(tags)) || names.some((name) => /^on|style/.test(name))
              || all.some((each) => each.href && !/^(https?|mailto):/.test(each.href));
          });
        }""",
        texts,
    )
    assert found == []


LONG = [
    *(
        "[" * 50_000,
        "[a](" * 20_000,
        "*a **b " * 15_000,
        ">" * 50_000,
        "_" * 50_000 + "a",
        "\\(" * 30_000,
        "<" * 50_000,
    ),
    *("`" * 50_000, "|" * 20_000 + "\n" + "|-" * 20_000, "$a" * 30_000, "![" * 30_000, "a\n" * 20_000, "&#1" * 20_000),
    *("https://" * 10_000, "~~a" * 20_000, "# " * 30_000, "&" * 50_000, "- a\n" * 5_000),
    "".join(" " * 2 * depth + "- x\n" for depth in range(300)),
]


def test_no_text_takes_forever(harness: Any) -> None:
    """Each of these takes minutes where the time grows with the square of the length; all together seconds."""
    count = harness(
        """async (texts) => {
          const {parseMarkdown} = await import("/scripts/markdown.js");
          return texts.filter((text) => parseMarkdown(text).length).length;
        }""",
        LONG,
    )
    assert count == len(LONG)


@settings(max_examples=20)
@given(data=st.data())
def test_events_are_the_same_however_the_stream_is_cut(harness: Any, data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab: é\U0001f98a", max_size=8), max_size=5))
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    stream = "".join(f": ping{end}{end}data: {text}{end}id: 1{end}{end}" for text in texts) + "data: [DONE]\n\n"
    raw = stream.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [list(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    found = harness(
        """async (pieces) => {
          const {readEvents} = await import("/scripts/sse.js");
          const body = new ReadableStream({start(controller) {
            for (const piece of pieces) controller.enqueue(new Uint8Array(piece));
            controller.close();
          }});
          const events = [];
          for await (const event of readEvents(body)) events.push(event);
          return events;
        }""",
        pieces,
    )
    assert found == [*texts, "[DONE]"]


CODE = {
    "python": 'def f(x):  # note\n    return """a\nb""" + \'c\' + str(1.5e3)',
    "js": "const a = `x ${1}`; // note\n/* more */ let b = 'y';",
    "json": '{"a": [1, true, "x"]}',
    "sql": "SELECT * FROM t -- note\nWHERE a = 'x'",
    "html": '<!-- note --><a href="x">y</a>',
    "bash": 'for f in *; do echo "$f" # note\ndone',
    "rust": 'fn main() { let x: &\'static str = "a"; } // note',
    "diff": "@@ -1 +1 @@\n-a\n+b",
    "css": "/* note */ a { color: red; width: 10px; }",
    "yaml": "a: true # note\nb: 'x'",
    "unknown": "def x # y",
}


@pytest.mark.parametrize("language", CODE)
def test_colours_change_no_code(harness: Any, language: str) -> None:
    tokens = harness(
        """async ([code, language]) => (await import("/scripts/highlight.js")).highlight(code, language)""",
        [CODE[language], language],
    )
    assert "".join(token["text"] for token in tokens) == CODE[language]
    coloured = {token["kind"] for token in tokens} - {None}
    assert bool(coloured) == (language != "unknown")
    if "note" in CODE[language]:
        assert "note" in next(token["text"] for token in tokens if token["kind"] == "comment")


def test_markup_in_code_stays_text(harness: Any) -> None:
    code = "</code><script>x</script>"
    (found,) = html_of(harness, [f"```\n{code}\n```"])
    assert escape(code, quote=False) in found
