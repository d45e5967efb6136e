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
from rlx.store.misses import explain_miss, fields, why
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


def test_what_some_entry_has_is_not_said_to_be_missing(store: Store) -> None:
    """Each choice is in some entry, but no entry has both."""
    q8 = replace(BASE, states=dict.fromkeys(BASE.states, "q8_0"))
    f32 = replace(BASE, states=EXACT.states, profile=EXACT.profile)
    for key in (BASE, q8, f32):
        store.put(key, {"a": ""})
    miss = explain_miss(replace(f32, states=q8.states), store)
    assert miss.nearest in (q8, f32)
    assert len(miss.differs) == 1
    assert miss.reason.startswith("no entry for this program has ")


def test_an_empty_cache_and_one_without_the_kind(store: Store) -> None:
    assert explain_miss(BASE, store).reason == "the cache is empty"
    store.put(CompileKey("runtime", "workers"), {"a": ""})
    assert explain_miss(BASE, store).reason == "the cache has no program"
    assert explain_miss(CompileKey("pack", "q8_0"), store).reason == "the cache has no code that packs weights (q8_0)"
    assert explain_miss(BASE, store).nearest is None


def test_a_policy_is_the_reason_where_it_is_one(store: Store) -> None:
    assert why(BASE, store, "redo") == "the cache policy is redo"
    assert why(BASE, None, "on") == why(BASE, store, "off") == "the compile cache is off"
    store.root.chmod(0o777)
    assert "other users can write it" in why(BASE, store, "on")


def test_each_key_is_read_from_the_disk_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (BASE, EXACT):
        store.put(key, {"a": ""})
    read: list[str] = []
    usual = CompileKey.from_json
    monkeypatch.setattr(CompileKey, "from_json", staticmethod(lambda text: (read.append("x"), usual(text))[1]))
    for _ in range(3):
        assert len(store.stored_keys()) == 2
    assert len(read) == 2
    store.remove(BASE.digest)
    assert store.stored_keys() == [EXACT]


def test_a_batch_and_a_past_are_fields() -> None:
    found = fields(replace(BASE, phase="batch", bucket=[2, 8]))
    assert (found["SEQ"], found["batch"], found["PAST"]) == ("1", "2-8", "any")
    found = fields(replace(BASE, options={"symbols": [["PAST_SEQ", [0, 1]]]}))
    assert (found["SEQ"], found["batch"], found["PAST"]) == ("1", "", "0-1")


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
