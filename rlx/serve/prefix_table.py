"""Which of several engines has computed which prefix: where a request is served soonest.

Serve stage, after the keys of prompts. It knows engines by name only; a router of Ray Serve and a batch on a cluster
use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

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
