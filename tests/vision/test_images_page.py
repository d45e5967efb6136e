"""docs/images.md: its first commands work as they are pasted, in an empty folder."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from pages import DOCS, shell_lines
from PIL import Image


def test_the_first_commands_draw_the_picture_that_they_ask_about(tmp_path: Path) -> None:
    install, draw, ask = map(shlex.split, shell_lines(DOCS / "images.md")[:3])
    assert install[:2] == ["pip", "install"] and draw[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *draw[1:]], cwd=tmp_path, check=True, timeout=60)
    picture = Image.open(tmp_path / ask[ask.index("--image") + 1])
    assert picture.getpixel((48, 48)) == (220, 40, 40) and picture.getpixel((2, 2)) == (0, 0, 0)
