"""The kinds of entries in the store, the limits that they share, and the words for them.

A kind belongs to a `Budget`: its entries evict each other when the budget's limit is passed, and no entries of another
one. A kind without a budget is evicted by nobody, and stays when a folder is emptied.
"""

from __future__ import annotations

from dataclasses import dataclass


class CacheWarning(UserWarning):
    """A folder of the store cannot be used, or an entry was damaged; the program runs without it."""


class PrefixStoreWarning(CacheWarning):
    """The folder of `cache_kv` cannot be used, or an entry in it was damaged; prompts are computed instead."""


@dataclass(frozen=True)
class Budget:
    """A size limit that kinds of entries share.

    Attributes:
        folder: what the folder is called in messages.
        option: what raises the limit.
        again: what is done in place of reading an entry.
        total: name of the file with the bytes of all entries.
        warning: class of the warnings.
        is_for_restarts: whether each next start needs what this process stored: such entries go last, with a warning.
        is_synced: whether an entry is on the disk before it appears.
    """

    folder: str
    option: str
    again: str
    total: str
    warning: type[CacheWarning]
    is_for_restarts: bool
    is_synced: bool


PROGRAMS = Budget("the compile cache", "RLX_CACHE_LIMIT", "compiling again", "total", CacheWarning, True, True)
PREFIXES = Budget(
    "the folder for cache_kv", "cache_kv_bytes", "computing again", "total-kv", PrefixStoreWarning, False, False
)


@dataclass(frozen=True)
class Kind:
    """A kind of entries.

    Attributes:
        words: what an entry is, in a sentence.
        budget: None for a kind that is not evicted.
    """

    words: str
    budget: Budget | None = PROGRAMS


#: By the `kind` of a key.
KINDS = {
    "program": Kind("program"),
    "pack": Kind("code that packs weights"),
    "runtime": Kind("worker loop"),
    "choice": Kind("code that chooses tokens"),
    "weights": Kind("packed weights"),
    "peak": Kind("measurement of a peak"),
    "linear": Kind("measurement of a linear layer"),
    "encode": Kind("encoder of weights"),
    "tuning": Kind("measured tuning", None),
    "prefix": Kind("states of a prompt", PREFIXES),
    "content": Kind("digest of a model's files", PREFIXES),
}


def kind(name: str) -> Kind:
    """The kind of this name; one that only another version of rlx knows is taken for a program's."""
    return KINDS.get(name) or Kind(name)
