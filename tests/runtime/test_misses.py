"""Why something was compiled: the nearest entry, and the user's choice in which it differs, causes before effects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.errors import CacheError
from rlx.store.cache import CompileCache
from rlx.store.key import CompileKey
from rlx.store.misses import explain_miss
from rlx.store.store import Store

pytestmark = pytest.mark.any_machine

FEATURES = "+avx,+avx2,+f16c,+fma,+movbe"
BASE = CompileKey(
    "program",
    "qwen3 596M",
    "aa" * 32,
    "decode",
    [1, 1],
    {f"{kind}.{i}": "f16" for i in range(28) for kind in "kv"},
    {"level": "avx2", "cpu": "haswell", "features": FEATURES},
    {"precision": "auto", "bf16_dots": True, "fusions": ["norm", "rope"], "passes": ["simplify"]},
    {"symbols": [], "tuning": {"prefetch": 4096}},
    {"rlx": "0.1.0", "generator": "ab" * 32, "numba": "0.60"},
)
EXACT = replace(
    BASE,
    graph="bb" * 32,
    states=dict.fromkeys(BASE.states, "f32"),
    profile={**BASE.profile, "precision": "exact", "bf16_dots": False},
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


# What is asked for in place of BASE; what is then said; the fields that differ.
CHANGES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "precision": (
        {"graph": EXACT.graph, "states": EXACT.states, "profile": EXACT.profile},
        "no entry for this program has precision 'exact'",
        ("precision", "KV cache type"),
    ),
    "kv type": (
        {"graph": "cc" * 32, "states": dict.fromkeys(BASE.states, "q8_0")},
        "no entry for this program has KV cache type 'q8_0'",
        ("KV cache type",),
    ),
    "fusion": (
        {"profile": {**BASE.profile, "fusions": ["rope"]}},
        "no entry for this program has [fusion] norm = false",
        ("[fusion] norm",),
    ),
    "bucket": (
        {"bucket": [2, 16], "phase": "prefill"},
        "no entry for this model has phase 'prefill'",
        ("phase", "SEQ"),
    ),
    "past": (
        {"options": {**BASE.options, "symbols": [["PAST_SEQ", [3, 4]]]}, "graph": "dd" * 32},
        "no entry for this model has PAST 3-4",
        ("PAST",),
    ),
    "model": (
        {"name": "llama 1.24B", "graph": "ee" * 32},
        "no entry has model 'llama 1.24B'",
        ("model",),
    ),
    "version": (
        {"versions": {**BASE.versions, "rlx": "0.2.0"}},
        "no entry for this program has rlx version 0.2.0",
        ("rlx version",),
    ),
    "source": (
        {"versions": {**BASE.versions, "generator": "cd" * 32}},
        "no entry for this program has this source code of rlx's compiler",
        ("source code of rlx's compiler",),
    ),
    "features": (
        {"target": {**BASE.target, "features": FEATURES.replace(",+fma", ",+avxvnni")}},
        "no entry for this program has these CPU features (1 more: avxvnni; 1 fewer: fma)",
        ("CPU features",),
    ),
    "level": (
        {"target": {**BASE.target, "level": "avx512"}, "profile": {**BASE.profile, "bf16_dots": False}},
        "no entry for this program has target level 'avx512'",
        ("target level",),
    ),
    "tuning": (
        {"options": {**BASE.options, "tuning": {"prefetch": 8192}}},
        "no entry for this program has tuning of prefetch 8192",
        ("tuning of prefetch",),
    ),
    "only the graph": ({"graph": "99" * 32}, "no entry for this program has this graph", ("graph",)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_cause_is_named_and_what_follows_is_not(name: str, store: Store) -> None:
    changes, reason, differs = CHANGES[name]
    store.put(BASE, {"a": ""})
    miss = explain_miss(replace(BASE, **changes), store)
    assert miss.nearest == BASE
    assert miss.differs == differs
    assert miss.reason == f"{reason} (nearest: {BASE.digest[:12]}, differs in {', '.join(differs)})"


def test_the_nearest_is_the_same_program_under_another_choice(store: Store) -> None:
    """Not the one with the fewest leaves that differ: 56 states of another type are one choice."""
    other = replace(BASE, name="llama 1.24B", graph="ee" * 32, states=EXACT.states)
    for key in (other, replace(EXACT, phase="greedy"), BASE):
        store.put(key, {"a": ""})
    assert explain_miss(EXACT, store).nearest == BASE


def test_a_runner_says_why_it_compiled(tmp_path: Path, goldens: Path) -> None:
    """The whole way: an empty cache, a full one, another precision, and a read-only cache."""
    model, store = goldens / "qwen3" / "model-f16.gguf", Store(tmp_path / "cache")

    def reasons(**choices: Any) -> list[str]:
        with rlx.auto_runner(model, max_seq=64, cache=CompileCache(store=store), **choices) as runner:
            runner.predict_logits([5])
            return [row.reason for row in runner.stats()["compiled"] if row.title.startswith("program ")]

    assert reasons() == ["the cache has no program"]
    assert reasons() == []
    (reason,) = reasons(precision="exact")
    nearest = next(row.digest for row in store.entries() if row.key and row.key.profile.get("precision") == "auto")
    assert reason.startswith(f"no entry for this program has precision 'exact' (nearest: {nearest[:12]}, ")
    readonly = CompileCache(store=store, policy="readonly")
    with (
        rlx.auto_runner(model, max_seq=64, cache=readonly, kv_dtype="bf16") as runner,
        pytest.raises(CacheError, match=r"has no entry for program qwen3 .* has KV cache type 'bf16'"),
    ):
        runner.predict_logits([5])
