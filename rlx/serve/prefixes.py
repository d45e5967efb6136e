"""The text of a prompt as a model reads it, keys of its prefixes, and which of several engines has computed which.

Serve stage, before any model: from the body of a request alone, so that a router or a file of requests can bring
together what shares a prefix. The texts are not what a chat template makes of them, but they have the same prefixes in
common. Engines are known by name only; a router of Ray Serve and a batch on a cluster use the table.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

PIECE = 256
"""Characters from one key to the next: about the 64 tokens from which on a shared prefix is worth waiting for."""

LONGEST = 256 * PIECE
"""Characters of a prompt that have keys."""

# The fields that become a prompt, in the order in which templates write them: tools and system messages come first.
_FIELDS = (
    "tools", "system", "instructions", "messages", "input_extra", "input_prefix", "prompt", "input", "suffix",
    "input_suffix",
)  # fmt: skip


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


Name = TypeVar("Name", bound=Hashable)

ENTRIES = 50_000


class PrefixTable(Generic[Name]):
    """Remembers to which engines the prefixes of prompts went, and ranks engines for a new prompt.

    The engine that has the longest prefix is first, unless it is so busy that to compute the prefix again elsewhere is
    the shorter way. A prefix that many ask for so spreads over as many engines as its load needs.

    Args:
        imbalance: by how many requests an engine may be busier than the least busy one and still get a prompt whose
            prefix it has.
        entries: how many prefixes are remembered; the ones that were used longest ago are forgotten.
    """

    def __init__(self, imbalance: int, entries: int = ENTRIES) -> None:
        self.imbalance, self._entries = imbalance, entries
        self._owners: OrderedDict[int, set[Name]] = OrderedDict()

    def ranked(self, keys: Sequence[int], loads: Mapping[Name, int]) -> list[Name]:
        """The engines, the best one for a prompt first.

        Args:
            keys: those of the prompt's prefixes, shortest first: `prefix_keys`.
            loads: how many requests each engine has.
        """
        if not loads:
            return []
        most = min(loads.values()) + self.imbalance
        near = {name for name in self._holders(keys, loads) if loads[name] <= most}
        return sorted(loads, key=lambda name: (name not in near, loads[name], _rank(keys, name)))

    def _holders(self, keys: Sequence[int], loads: Mapping[Name, int]) -> set[Name]:
        """The engines that have the longest prefix that any of them has."""
        for key in reversed(keys):
            if found := self._owners.get(key, set()) & loads.keys():
                return found
        return set()

    def remember(self, keys: Sequence[int], name: Name) -> None:
        """A prompt went to an engine."""
        for key in reversed(keys):  # the shortest is forgotten last: longer ones are of no use without it
            self._owners.setdefault(key, set()).add(name)
            self._owners.move_to_end(key)
        while len(self._owners) > self._entries:
            self._owners.popitem(last=False)

    def keep(self, names: set[Name]) -> None:
        """Forgets all engines but these."""
        for key, owners in list(self._owners.items()):
            owners &= names
            if not owners:
                del self._owners[key]

    def __len__(self) -> int:
        return len(self._owners)


def _rank(keys: Sequence[int], name: Hashable) -> bytes:
    """Orders engines by chance, but equally for equal beginnings: several routers then agree without asking.

    This is rendezvous hashing (Thaler and Ravishankar, 1998).
    """
    return blake2b(f"{keys[0] if keys else 0} {name}".encode(), digest_size=8).digest()
