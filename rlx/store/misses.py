"""Why a program was compiled: the nearest entry of the store, and what differs, in the words that a user chose it by.

Compile cache. A key has fields that a user chooses (precision, type of the KV cache, a key of a profile), fields that
come with the machine and the versions, and fields that follow from the others (the graph holds the type of the KV
cache). `fields` puts them in this order, so a difference is explained by its cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.errors import CacheError
from rlx.store.key import ABSENT, CompileKey, range_text
from rlx.store.kinds import kind
from rlx.store.store import Store

_SHOWN = 4  # fields in a sentence
_KV_STATE = re.compile(r"[kv]\.\d+")

# How far apart two keys are that differ in a field: the same program under another choice is nearer than another one.
_FAR = {"model": 1000, "phase": 200, "SEQ": 100, "PAST": 100, "format": 1000, "target level": 30, "precision": 10}
_NEAR = 5
_NOTHING = 0.01  # of what follows from other fields


@dataclass(frozen=True)
class Miss:
    """Why the store has no entry for a key.

    Attributes:
        key: what is missing.
        nearest: the entry that differs least; None if there is none of the kind.
        differs: the names of the fields in which that one differs: the user's choices first, then machine and
            versions. What only follows from these is left out.
        reason: a sentence, without a capital and a full stop.
    """

    key: CompileKey
    nearest: CompileKey | None
    differs: tuple[str, ...]
    reason: str


def explain_miss(key: CompileKey, store: Store) -> Miss:
    """Why `store` has no entry for `key`: "no entry for this program has precision 'exact' (nearest: ...)".

    Raises:
        CacheError: the store cannot be read.
    """
    return _explain(key, [stored for stored in store.stored_keys() if stored.digest != key.digest])


def _explain(key: CompileKey, stored: list[CompileKey]) -> Miss:
    what = kind(key.kind).words
    if not stored:
        return Miss(key, None, (), "the cache is empty")
    mine = fields(key)
    others = [(other, fields(other)) for other in stored if other.kind == key.kind]
    if key.kind != "program":
        others = [(other, found) for other, found in others if other.name == key.name]
        what = f"{what} ({key.name})" if key.kind != "runtime" else what  # there is one worker loop
    if not others:
        return Miss(key, None, (), f"the cache has no {what}")
    near, found = min(others, key=lambda row: _distance(mine, row[1]))
    differs = differing(mine, found)
    same = [theirs for _, theirs in others if not set(differing(mine, theirs)) - set(differs)]
    lacking = differs[0] if differs else ""
    for name in differs:  # the first choice that no entry has, of those that agree in everything else
        same = [theirs for theirs in same if theirs.get(name) == mine.get(name)]
        if not same:
            lacking = name
            break
    shown = ", ".join([*differs[:_SHOWN], *["..."] * (len(differs) > _SHOWN)])
    has = _has(lacking, mine.get(lacking), found.get(lacking))
    scope = "" if lacking == "model" else " for this model" if _FAR.get(lacking, 0) >= 100 else f" for this {what}"
    reason = f"no entry{scope} has {has} (nearest: {near.digest[:12]}, differs in {shown})"
    return Miss(key, near, tuple(differs), reason)


def fields(key: CompileKey) -> dict[str, Any]:
    """A key in the user's words: name -> value, the user's choices first, what follows from others last."""
    rows: dict[str, Any] = {"model" if key.kind == "program" else "name": key.name}
    if key.kind == "program":
        rows |= _program(key)
    rows |= {"target level": key.target.get("level")}
    rows |= {f"[fusion] {name}": True for name in key.profile.get("fusions") or ()}  # type: ignore[union-attr]
    rows |= {f"[passes] {name}": True for name in key.profile.get("passes") or ()}  # type: ignore[union-attr]
    rows |= {f"option {name}": value for name, value in key.options.items() if name not in _KNOWN_OPTIONS}
    rows |= {f"tuning of {name}": value for name, value in _mapping(key.options.get("tuning")).items()}
    rows |= {f"{_SOURCE}{name}": value for name, value in _mapping(key.options.get("custom_ops")).items()}
    rows |= {"CPU": key.target.get("cpu"), "CPU features": key.target.get("features")}
    rows |= {"system": key.target.get("triple")}
    rows |= {_VERSIONS.get(name, f"version of {name}"): value for name, value in key.versions.items()}
    rows |= {name: key.profile.get(name) for name in ("bf16_dots", "bf16_tiles", "deterministic")}
    return rows | {"graph": key.graph, "states": key.states}


_KNOWN_OPTIONS = ("symbols", "segments", "paged", "tuning", "custom_ops")
_SOURCE = "source of custom op "
_VERSIONS = {
    "rlx": "rlx version",
    "generator": "source code of rlx's compiler",
    "format": "format of entries",
    "python": "Python version",
    "numba": "Numba version",
    "llvmlite": "llvmlite version",
    "llvm": "LLVM build",
    "numba_settings": "NUMBA_* variables",
}
# Field -> the choices that it follows from.
_CONSEQUENCES = {
    "[passes] last_row": ("phase",),
    "bf16_dots": ("precision", "phase", "target level", "CPU features", "KV cache type"),
    "bf16_tiles": ("precision", "phase", "deterministic", "target level", "CPU features"),
    "graph": ("model", "phase", "KV cache type", "precision", "option all_rows", "option whole", "PAST"),
    "states": ("model", "phase", "KV cache type"),
}


def _program(key: CompileKey) -> dict[str, Any]:
    bucket = range_text(key.bucket)
    is_batch = key.phase == "batch"
    past = dict(key.options.get("symbols") or ()).get("PAST_SEQ")  # type: ignore[arg-type]
    return {
        "precision": key.profile.get("precision"),
        "KV cache type": kv_type(key),
        "phase": key.phase,
        "SEQ": "1" if is_batch else bucket,
        "PAST": range_text(past) or "any",
        "batch": bucket if is_batch else "",
    }


def kv_type(key: CompileKey) -> str:
    """The type of the KV cache, such as "f16"; "" where there is none."""
    types = {str(dtype) for name, dtype in key.states.items() if _KV_STATE.fullmatch(name)}
    return "+".join(sorted(types))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names of the fields that differ and do not follow from another one that differs."""
    names = _changed(a, b)
    causes = [name for name in names if not set(_CONSEQUENCES.get(name, ())) & set(names)]
    if "states" in causes and "graph" in causes:  # the graph says it in full
        causes.remove("states")
    return causes


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = [*a, *(name for name in b if name not in a)]
    return [name for name in names if a.get(name, ABSENT) != b.get(name, ABSENT)]


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    return sum(_NOTHING if name in _CONSEQUENCES else _FAR.get(name, _NEAR) for name in _changed(a, b))


def _has(name: str, mine: Any, theirs: Any) -> str:
    """'precision "exact"', 'these CPU features (without avx512bf16)'."""
    if name == "CPU features":
        here, there = set(str(mine).split(",")), set(str(theirs).split(","))
        words = [("more", here - there), ("fewer", there - here)]
        said = "; ".join(f"{len(some)} {word}: {_first(some)}" for word, some in words if some)
        return f"these CPU features ({said})"
    if name.startswith(("[fusion]", "[passes]")):
        return f"{name} = {'true' if mine else 'false'}"
    if name.startswith(_SOURCE) or name in (_VERSIONS["generator"], _VERSIONS["llvm"], "graph", "states"):  # digests
        return f"this {name}"
    if isinstance(mine, str):
        return f"{name} {mine!r}" if mine[:1].isalpha() else f"{name} {mine}"  # a word, or numbers such as 17-512
    return f"{name} {json.dumps(mine, default=list)}"


def _first(words: Iterable[str]) -> str:
    ordered = sorted(word.lstrip("+") for word in words)
    return ", ".join([*ordered[:_SHOWN], *["..."] * (len(ordered) > _SHOWN)])


def why(key: CompileKey, store: Store | None, policy: str) -> str:
    """Why a cache compiles: what `explain_miss` says, or the policy that made it so."""
    if policy == "redo":
        return "the cache policy is redo"
    if store is None or policy == "off":
        return "the compile cache is off"
    if store.problem:
        return f"the compile cache is not used: {store.problem}"
    try:
        return explain_miss(key, store).reason
    except CacheError as error:
        return str(error)
