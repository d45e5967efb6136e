"""Draws the chat page at both widths, light and dark, to be looked at: `make test-page` writes build/page/*.png."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from page_browser import NARROW, WIDE, Watched
from page_double import Double

FOLDER = os.environ.get("RLX_PAGE_SCREENSHOTS")
QUESTION = "How does a language model choose its next word?"
ANSWER = """It works in **three steps**:

1. The text becomes *tokens*, small pieces such as `chat` or `ting`.
2. Every layer mixes what the tokens say about one another.
3. The last layer gives each token of the vocabulary a score. One of them is drawn:
   - greedily, the best one
   - or by chance, as in this function

```python
import numpy as np

def sample(scores, temperature=0.7, seed=None):
    \"\"\"The next token.\"\"\"
    if temperature == 0:
        return int(scores.argmax())  # always the same
    p = np.exp((scores - scores.max()) / temperature)
    return int(np.random.default_rng(seed).choice(len(p), p=p / p.sum()))
```

| Setting | Range | Effect |
|:--------|------:|:-------|
| `temperature` | 0 to 2 | higher values vary more |
| `top_k` | 1 to 100 | only the *k* likeliest tokens |
| `min_p` | 0 to 1 | leaves out unlikely tokens |

> The same seed and messages give the same answer.
"""
CALL = {"name": "weather", "arguments": '{"city": "Lisbon"}'}


def draw(page: Any, double: Double, path: Path) -> None:
    """Goes through the states of the page; each is a file that begins with `path`."""

    def shot(state: str) -> None:
        page.wait_for_timeout(300)
        page.screenshot(path=f"{path}-{state}.png")

    def ask(text: str, *answer: Any) -> None:
        double.answers = [list(answer)]
        page.fill("#message", text)
        page.press("#message", "Enter")
        page.wait_for_selector(".assistant:last-child [aria-label='Answer again']")

    shot("1-welcome")
    ask(QUESTION, {"reasoning_content": "Steps, code and a table."}, *[f"{word} " for word in ANSWER.split(" ")])
    shot("2-end")
    page.locator("#scroller").evaluate("element => { element.scrollTop = 0; }")
    shot("3-answer")
    ask("And the weather?", {"tool_calls": [{"index": 0, "id": "1", "function": CALL}]}, {"finish": "tool_calls"})
    page.keyboard.press("Alt+KeyS")
    shot("4-settings")
    page.keyboard.press("Escape")
    double.answers = [(400, {"message": "", "code": "context_length_exceeded", "n_prompt_tokens": 5000, "n_ctx": 4096})]
    page.click("text=Send the results")
    page.wait_for_selector(".problem")
    shot("5-problem")
    if page.viewport_size == NARROW:
        page.keyboard.press("Alt+KeyL")
    else:
        page.keyboard.press("Alt+KeyK")
    shot("6-list" if page.viewport_size == NARROW else "6-keyboard")


@pytest.mark.skipif(FOLDER is None, reason="RLX_PAGE_SCREENSHOTS names no folder for the screenshots")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_screenshots(browser: Any, double: Double, double_url: str, viewport: dict[str, int], scheme: str) -> None:
    folder = Path(str(FOLDER))
    folder.mkdir(parents=True, exist_ok=True)
    double.model = "Qwen3-4B-Q4_K_M"
    scale = 1 if viewport is WIDE else 2
    watched = Watched(browser, double_url, viewport=viewport, color_scheme=scheme, device_scale_factor=scale)
    draw(watched.open(), double, folder / f"{viewport['width']}-{scheme}")
    watched.close()
