"""How `versus.py` drives the programs that it compares, each in a process of its own: one JSON object a line.

A side is a small class over one program (`rlx_side.py`, `llama_side.py`, `torch_side.py`); `main` here reads commands
from stdin, calls it and times it, so that all are timed by the same code. A program that cannot be driven token by
token times itself (`openvino_side.py`, `ik_side.py`). Between commands a side blocks on the read and takes no CPU.
Nothing here imports rlx, because a side may live in another environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

Ids = Sequence[int]


class Missing(Exception):
    """A package that a side needs is not there, or cannot read the file; the text says so."""


class Side(Protocol):
    """What a program under test must do. Ids go in by the list; computing them is all that is timed."""

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        """Loads the model; returns {"version": ..., "vocab": tokens, "context": the model's own, ...}."""

    def clear(self) -> None:
        """An empty cache."""

    def feed(self, ids: Ids) -> None:
        """Computes the ids, all at once, and the logits of the last."""

    def keep(self) -> None:
        """Notes the present length, for `back`."""

    def back(self) -> None:
        """Returns to the length last noted."""

    def logits(self) -> np.ndarray:
        """Those of the last id that was fed."""


class ApiSide(Side, Protocol):
    """A side whose Python API is measured too."""

    def open_api(self, model: str, threads: int, context: int) -> None:
        """Loads the model as users of the Python API do."""

    def generate(self, ids: Ids, tokens: int) -> list[int]:
        """So many likeliest tokens after `ids`, through that API."""


class TimedSide(Protocol):
    """A program that measures itself."""

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        """Loads the model; returns {"version": ..., ...}."""

    def use(self, **settings: Any) -> dict[str, Any]:
        """Chooses settings, one of `variants`."""

    def variants(self, prompt: bool) -> list[dict[str, Any]]:
        """Settings that may be best for prompts, or for decoding."""

    def prefill(self, tokens: int) -> float:
        """Seconds for a prompt of so many tokens from an empty cache."""

    def decode(self, tokens: int, depth: int) -> float:
        """Seconds a token for so many, one by one after `depth` others."""


def token_ids(count: int, vocab: int, start: int = 0) -> list[int]:
    """Ids that are spread over the vocabulary."""
    return [(7919 * i + 13) % vocab for i in range(start, start + count)]


def peak_bytes() -> int:
    """The most memory that was resident in this process so far, file pages included (VmHWM)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Commands:
    """A side's commands: `do` names a method, the rest are its arguments."""

    side: Side
    api_side: ApiSide

    def __init__(self, make: Callable[[], Side]) -> None:
        self.make, self.vocab, self.depth = make, 0, 0

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        start = time.perf_counter()
        self.side = self.make()
        facts = self.side.open(model, threads, context)
        self.vocab = facts["vocab"]
        return {"seconds": time.perf_counter() - start, **facts}

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Seconds for a prompt of so many tokens from an empty cache."""
        ids = token_ids(tokens, self.vocab)
        self.side.clear()
        start = time.perf_counter()
        self.side.feed(ids)
        return {"seconds": time.perf_counter() - start}

    def fill(self, depth: int) -> dict[str, Any]:
        """Brings the cache to a length at which `decode` then starts each time."""
        self.side.clear()
        if depth:
            self.side.feed(token_ids(depth, self.vocab))
        self.side.keep()
        self.depth = depth
        return {}

    def decode(self, tokens: int) -> dict[str, Any]:
        """Seconds a token for so many, one by one; the cache is brought back afterwards."""
        ids = token_ids(tokens, self.vocab, self.depth)
        start = time.perf_counter()
        for i in ids:
            self.side.feed([i])
        seconds = (time.perf_counter() - start) / tokens
        self.side.back()
        return {"seconds": seconds}

    def greedy(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """The likeliest tokens one after another; and whether all logits on the way were finite."""
        self.side.clear()
        self.side.feed(ids)
        found: list[int] = []
        finite = True
        for _ in range(tokens):
            logits = self.side.logits()
            finite = finite and bool(np.isfinite(logits).all())
            found.append(int(logits.argmax()))
            self.side.feed(found[-1:])
        return {"tokens": found, "finite": finite}

    def open_api(self, model: str, threads: int, context: int) -> dict[str, Any]:
        """Opens the model once more, for `api`; a side needs no `open` before."""
        self.api_side = cast(ApiSide, self.make())
        self.api_side.open_api(model, threads, context)
        return {}

    def api(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Seconds a token for so many through the side's Python API, sampling and all; and the tokens."""
        start = time.perf_counter()
        found = self.api_side.generate(ids, tokens)
        return {"seconds": (time.perf_counter() - start) / tokens, "tokens": found}

    def memory(self) -> dict[str, Any]:
        return {"peak_bytes": peak_bytes()}


class TimedCommands:
    """The commands of a side that measures itself: those of `Commands` that `versus.py` needs for speeds."""

    def __init__(self, make: Callable[[], TimedSide]) -> None:
        self.make, self.depth = make, 0

    def open(self, model: str, threads: int, context: int) -> dict[str, Any]:
        self.side = self.make()
        return self.side.open(model, threads, context)

    def variants(self, prompt: bool) -> dict[str, Any]:
        return {"variants": self.side.variants(prompt)}

    def prefill(self, tokens: int) -> dict[str, Any]:
        return {"seconds": self.side.prefill(tokens)}

    def fill(self, depth: int) -> dict[str, Any]:
        """Notes the length at which `decode` starts each time."""
        self.depth = depth
        return {}

    def decode(self, tokens: int) -> dict[str, Any]:
        return {"seconds": self.side.decode(tokens, self.depth)}


def main(make: Callable[[], Any], commands: Callable[[Callable[[], Any]], Any] = Commands) -> None:
    """Serves commands until stdin ends.

    With `once MODEL THREADS CONTEXT PROMPT TOKENS` as arguments it does one run and prints what `once` returns.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    if len(sys.argv) > 1:
        answer(answers, lambda: once(Commands(make), *sys.argv[2:]))
        return
    served = commands(make)
    for line in sys.stdin:
        answer(answers, partial(perform, served, json.loads(line)))


def perform(commands: Commands | TimedCommands, request: dict[str, Any]) -> dict[str, Any]:
    """One command, of all sides or of this one."""
    name = request.pop("do")
    method = getattr(commands, name, None) or getattr(commands.side, name)
    found: dict[str, Any] = method(**request)
    return found


def once(commands: Commands, model: str, threads: str, context: str, prompt: str, tokens: str) -> dict[str, Any]:
    """Open, prefill and decode in a fresh process: when the first token was there, and the memory it took."""
    opened = commands.open(model, int(threads), int(context))
    side = commands.side
    side.clear()
    side.feed(token_ids(int(prompt), commands.vocab))
    first = int(side.logits().argmax())
    end = time.time()
    for _ in range(int(tokens) - 1):
        side.feed([first])
    return {
        "end": end,
        "open_seconds": opened["seconds"],
        "peak_bytes": peak_bytes(),
        "kv_bytes": opened.get("kv_bytes"),
    }


def answer(out: Any, run: Callable[[], dict[str, Any]]) -> None:
    """One line: the result, or {"error": ..., "missing": whether the side cannot do this here at all}."""
    try:
        result = run()
    except Missing as error:
        result = {"error": str(error), "missing": True}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "missing": False}
    out.write(json.dumps(result) + "\n")
    out.flush()
