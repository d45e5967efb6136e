"""The chat page: answers that want to be more than text."""

from __future__ import annotations

from typing import Any

from page_browser import Watched, answered, send
from page_double import Double

HOSTILE = [
    "<script>window.bad = 1</script>",
    "<img src=x onerror='window.bad = 1'>",
    "<svg onload=window.bad=1><script>window.bad=1</script></svg>",
    "<iframe srcdoc='<script>parent.bad=1</script>'></iframe>",
    "[x](javascript:window.bad=1) [x]( javascript:window.bad=1 ) [x](JaVaScRiPt:window.bad=1)",
    "[x](java\nscript:window.bad=1) [x](java&#10;script:bad) [x](\x01javascript:window.bad=1)",
    "[x](<javascript:window.bad=1>) <javascript:window.bad=1> [x](data:text/html,<script>bad</script>)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](//evil.example/a) [x](blob:x)",
    '[x](https://a.example/"onmouseover="window.bad=1) [x](https://a.example/ "t\\" onclick=window.bad=1 x=\\"")',
    '![x](https://evil.example/steal.png?q=1) ![x](x"onerror="window.bad=1)',
    "[![x](https://evil.example/a.png)](javascript:window.bad=1)",
    '```"><script>window.bad=1</script>\n</code></pre><script>window.bad=1</script>\n```',
    "```html onload=window.bad=1\n<script>window.bad = 1</script>\n```",
    "| <b onclick=window.bad=1>x</b> | y |\n|---|---|\n| <script>window.bad=1</script> | [x](javascript:bad) |",
    "&lt;script&gt;window.bad=1&lt;/script&gt; &#x3C;script&#x3E;",
    "<a href='javascript:window.bad=1'>x</a><form action=//evil.example><button>x</button></form>",
    "<style>*{background:url(//evil.example)}</style><link rel=stylesheet href=//evil.example/x.css>",
    "<base href=//evil.example><meta http-equiv=refresh content='0;url=//evil.example'>",
    "# <details open ontoggle=window.bad=1>\n> <video src=x onerror=window.bad=1>\n- <object data=x>",
    "$$<script>window.bad=1</script>$$ \\(<img src=x onerror=window.bad=1>\\)",
]


def test_an_answer_cannot_run_anything(page: Any, double: Double) -> None:
    """All that looks like markup is text; links lead to http, https and mail only; nothing is loaded."""
    text = "\n\n".join(HOSTILE)
    call = {"index": 0, "id": "<b>", "function": {"name": "<img src=x onerror=bad=1>", "arguments": "<script>"}}
    double.answers = [[{"reasoning_content": text}, text, {"tool_calls": [call]}]]
    send(page, HOSTILE[0] + HOSTILE[1])
    answered(page)
    page.click("summary")
    page.locator(".answer a").first.hover()
    list_ = page.locator("#messages")
    assert list_.evaluate("() => window.bad") is None
    tags = set(list_.evaluate("list => [...list.querySelectorAll('*')].map(e => e.tagName.toLowerCase())"))
    assert not tags & {"script", "iframe", "img", "object", "style", "link", "base", "meta", "video", "embed"}
    assert list_.locator(".prose svg:not(.icon), .prose form, .prose button:not(.link)").count() == 0
    addresses = list_.evaluate("list => [...list.querySelectorAll('a')].map(a => [a.protocol, a.rel, a.target])")
    assert addresses
    assert all(
        protocol in ("https:", "http:", "mailto:") and "noopener" in rel and target == "_blank"
        for protocol, rel, target in addresses
    )
    names = list_.evaluate("list => [...list.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
    assert not [name for name in names if name.startswith("on") or name in ("srcdoc", "style", "action")]
    assert "<script>window.bad = 1</script>" in page.locator(".answer").last.inner_text()
    assert '![x](x"onerror="window.bad=1)' in page.locator(".answer").last.inner_text()


def test_the_policy_stops_a_script_that_came_in_anyway(watched: Watched, double: Double) -> None:
    page = watched.open()
    tried = page.locator("body").evaluate(
        """body => {
          const script = document.createElement("script");
          try { body.innerHTML = "<img src=x onerror='window.bad=1'>"; } catch { window.refused = 1; }
          try { script.text = "window.bad = 1"; body.append(script); } catch { window.refused += 1; }
          return [window.refused, window.bad];
        }"""
    )
    assert tried == [2, None]
    watched.errors = [error for error in watched.errors if "Trusted" not in error]
    assert not watched.errors
