"""The text of a prompt in the order in which a model reads it, and keys of its prefixes.

Serve stage, before any model: from the body of a request alone, so that a router or a file of requests can bring
together what shares a prefix. The texts are not what a chat template makes of them, but they have the same prefixes in
common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

PIECE = 256
"""Characters from one key to the next: about the 64 tokens from which on a shared prefix is worth waiting for."""

LONGEST = 256 * PIECE
"""Characters of a prompt that have keys."""

# The fields that become a prompt, in the order in which templates write them: tools and system messages come first.
_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input", "suffix")


def prompt_text(body: Mapping[str, Any]) -> str:
    """The prompt of a request as one text. A conversation that goes on has the text before as a prefix.

    Args:
        body: that of any API: chat, completions, responses, messages or embeddings, Ollama's included.
    """
    return "".join(_lines(body))


def _lines(body: Mapping[str, Any]) -> Iterator[str]:
    for name in _FIELDS:
        value = body.get(name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str):
                yield f"{part}\n"
            elif part is not None:
                yield f"{json.dumps(part, ensure_ascii=False)}\n"


def prefix_keys(text: str) -> list[int]:
    """A number for the first `PIECE` characters of a text, for the first two times as many, and so on.

    Two texts have their first n keys in common if they have so many characters in common. A text of less than `PIECE`
    characters has none: to compute it again costs less than to look for it.
    """
    running, keys = blake2b(digest_size=8), []
    for start in range(0, min(len(text), LONGEST) - PIECE + 1, PIECE):
        running.update(text[start : start + PIECE].encode("utf-8", "surrogatepass"))
        keys.append(int.from_bytes(running.digest(), "little"))
    return keys
