"""Records a terminal session as an animated SVG: `python tools/site/terminal.py --out docs/terminal.svg`.

The commands run for real, in a pseudo-terminal, and a terminal emulator (pyte) keeps the screen. The picture holds each
run of characters once, with the moment it appears and the moment it goes, as CSS animations; there is no script in it.
Colours follow the reader's light or dark theme, and where motion is not wanted the last screen stands still.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyte

COLUMNS, ROWS = 92, 13
CELL, LINE, LEFT, TOP = 8.43, 19, 18, 46  # sizes in pixels: of a character, of a line, of the borders
TYPING = 0.035  # seconds between two typed characters
PAUSE = 0.7  # seconds after a command is typed, and after its output
LONGEST = 0.6  # a longer silence of a command is cut to this: what is shown is the order, not the speed
END = 4.0  # seconds that the last screen stays

PYTHON = [">>> ", "import rlx", ">>> ", "runner = rlx.auto_runner()"]
PYTHON += [">>> ", 'runner.chat("What is 27 + 45?").text', ">>> ", "exit()"]
#: What is typed, line by line: a command, and the lines that are typed once it shows a text.
SESSION = (
    ('rlx run "Tell me a story about a brave fox." --max-tokens 100', ()),
    (
        "python -q",
        tuple(PYTHON),
    ),
    ('rlx compile --phase decode --explain 2>/dev/null | grep -A 9 "^fuse"', ()),
)


@dataclass(frozen=True)
class Span:
    """Characters of one style that stand at a place of the screen."""

    row: int
    column: int
    text: str
    style: str


def spans(screen: pyte.Screen) -> frozenset[Span]:
    """What is on the screen: the words of each line with their style."""
    found = set()
    for row in range(screen.lines):
        line = screen.buffer[row]
        column = 0
        while column < screen.columns:
            style = _style(line[column])
            end = column
            while end < screen.columns and _style(line[end]) == style:
                end += 1
            text = "".join(line[at].data for at in range(column, end))
            if body := text.rstrip():
                skipped = len(body) - len(body.lstrip())
                found.add(Span(row, column + skipped, body.lstrip(), style))
            column = end
    return frozenset(found)


def _style(cell: pyte.screens.Char) -> str:
    return " ".join([*([cell.fg] if cell.fg != "default" else []), *(["bold"] if cell.bold else [])])


class Recorder:
    """A screen, the time of the recording, and when each span was on the screen."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.Stream(self.screen)
        self.now = 0.0
        self.since: dict[Span, float] = {}
        self.shown: list[tuple[Span, float, float]] = []

    def feed(self, text: str, seconds: float) -> None:
        """The text arrives `seconds` after the last one."""
        self.now += seconds
        self.stream.feed(text)
        there = spans(self.screen)
        for span in self.since.keys() - there:
            began = self.since.pop(span)
            self._note(span, began, self.now)
        for span in there - self.since.keys():
            self.since[span] = self.now

    def _note(self, span: Span, began: float, ended: float) -> None:
        if ended > began:
            self.shown.append((span, began, ended))

    def finish(self) -> list[tuple[Span, float, float]]:
        self.now += END
        return [*self.shown, *((span, began, self.now) for span, began in self.since.items())]

    def type(self, text: str) -> None:
        """As a person would; two characters at a time keep the picture small."""
        for at in range(0, len(text), 2):
            self.feed(text[at : at + 2], TYPING * 2)


def output(command: str, answers: tuple[str, ...], folder: str, recorder: Recorder) -> None:
    """Runs a command in a pseudo-terminal and records what it shows. `answers`: a prompt, what is typed there, ..."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(
        command, shell=True, cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "PYTHON_BASIC_REPL": "1", **size},
    )  # fmt: skip
    os.close(slave)
    decoder = codecs.getincrementaldecoder("utf-8")()
    todo, seen, last = list(answers), "", time.monotonic()
    for data in _reads(master, process):
        text, now = decoder.decode(data), time.monotonic()
        recorder.feed(text, min(now - last, LONGEST))
        last, seen = now, seen + text
        if todo and seen.endswith(todo[0]):
            os.write(master, f"{todo[1]}\n".encode())
            todo, seen = todo[2:], ""
    os.close(master)
    if process.wait():
        sys.exit(f"error: {command} ended with {process.returncode}")


def _reads(master: int, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    while select.select([master], [], [], 120)[0]:
        try:
            data = os.read(master, 4096)
        except OSError:  # the other end is closed
            return
        if not data:
            return
        yield data
    process.kill()


def record() -> Recorder:
    """Runs the session in an empty folder."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        for number, (command, answers) in enumerate(SESSION):
            if number:
                recorder.feed("", PAUSE * 3)
                recorder.feed("\x1b[2J\x1b[H", 0.1)
            recorder.feed("\x1b[32m$\x1b[0m ", 0.3)
            recorder.type(command)
            recorder.feed("\r\n", PAUSE)
            output(command, answers, folder, recorder)
    return recorder


LIGHT = {"back": "#fbfbfc", "bar": "#eceef1", "fore": "#24292f", "dim": "#6e7781", "green": "#1a7f37", "red": "#cf222e",
         "blue": "#0550ae", "brown": "#7d4e00", "magenta": "#8250df", "cyan": "#1b7c83"}  # fmt: skip
DARK = {"back": "#0d1117", "bar": "#1b2129", "fore": "#e6edf3", "dim": "#8b949e", "green": "#3fb950", "red": "#ff7b72",
        "blue": "#79c0ff", "brown": "#d29922", "magenta": "#d2a8ff", "cyan": "#56d4dd"}  # fmt: skip


def style() -> str:
    """Colours of both themes and classes of the terminal's colours."""

    def variables(colours: dict[str, str]) -> str:
        return ";".join(f"--{name}:{value}" for name, value in colours.items())

    fonts = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
    rules = [f"svg{{font:14px {fonts};{variables(LIGHT)}}}"]
    rules.append(f"@media (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}")
    rules.append("text{fill:var(--fore);white-space:pre}.bold{font-weight:600}.brightblack{fill:var(--dim)}")
    rules += [f".{name},.bright{name}{{fill:var(--{name})}}" for name in list(LIGHT)[4:]]
    return "\n".join(rules) + "\n"


def svg(shown: list[tuple[Span, float, float]], seconds: float) -> str:
    """The picture. Spans that appear and go at the same moments share a group and an animation."""
    width, height = round(2 * LEFT + COLUMNS * CELL), TOP + ROWS * LINE + 10
    groups: dict[tuple[float, float], list[Span]] = {}
    for span, began, ended in shown:
        groups.setdefault((round(began, 2), round(min(ended, seconds), 2)), []).append(span)
    rules, bodies = [], []
    for number, ((began, ended), members) in enumerate(sorted(groups.items())):
        start, end = 100 * began / seconds, 100 * ended / seconds
        rest = f"{end:.3f}%,to{{visibility:hidden}}" if ended < seconds else ""
        rules.append(f"@keyframes k{number}{{from{{visibility:hidden}}{start:.3f}%{{visibility:visible}}{rest}}}")
        rules.append(f".k{number}{{animation-name:k{number}}}")
        still = "" if ended < seconds else " last"
        texts = "".join(map(_text, sorted(members, key=lambda each: (each.row, each.column))))
        bodies.append(f'<g class="k{number}{still}">{texts}</g>')
    animation = f"g{{animation:{seconds:.2f}s step-end infinite}}"
    still_css = "@media (prefers-reduced-motion: reduce){g{animation:none;visibility:hidden}g.last{visibility:visible}}"
    label = "A terminal: rlx tells a story, runs from Python, and shows what its compiler fused."
    dots = "".join(f'<circle cx="{20 + 18 * i}" cy="16" r="5" fill="var(--dim)" opacity=".5"/>' for i in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n'
        f"<title>{label}</title>\n<style>{style()}{animation}\n{''.join(rules)}\n{still_css}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--back)"/>'
        f'<path d="M0 32V8a8 8 0 0 1 8-8h{width - 16}a8 8 0 0 1 8 8v24z" fill="var(--bar)"/>{dots}\n'
        + "\n".join(bodies)
        + "\n</svg>\n"
    )


def _text(span: Span) -> str:
    style = f' class="{span.style}"' if span.style else ""
    x, y = LEFT + span.column * CELL, TOP + span.row * LINE + 12
    return f'<text x="{x:.1f}" y="{y}" textLength="{len(span.text) * CELL:.1f}"{style}>{escape(span.text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the SVG file")
    args = parser.parse_args()
    recorder = record()
    shown = recorder.finish()
    text = svg(shown, recorder.now)
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {len(text) / 1000:.0f} kB, {recorder.now:.0f} s")


if __name__ == "__main__":
    main()
