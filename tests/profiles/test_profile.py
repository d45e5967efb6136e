"""Profiles as their users write them: what is read, what is refused and how, and the way back."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_strategies import profiles

from rlx import CompileProfile
from rlx.errors import ArgumentError, ProfileError
from rlx.passes.options import FUSIONS, PASSES, Options
from rlx.profile import PhaseProfile
from rlx.profile.keys import KEYS


def parsed(text: str) -> CompileProfile:
    return CompileProfile.load(tomllib.loads(text))


# ---------------------------------------------------------------------------------------------------- what is read


def test_every_key_reaches_its_field(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        'family = "gemma"\n[precision]\nmode = "exact"\nbf16_dots = false\nbf16_tiles = false\nkv_dtype = "q8_0"\n'
        "[fusion]\ngated = false\nrope = false\n[passes]\nsimplify = false\n[buckets]\nseq = [1, 8]\n"
        '[backend.cpu]\nlevel = "avx2"\nthreads = 3\n[cache]\npolicy = "redo"\ncapacity = 5\n'
    )
    fusions = tuple(name for name in FUSIONS if name not in ("gated", "rope"))
    both = PhaseProfile("exact", False, False, fusions, tuple(name for name in PASSES if name != "simplify"))
    expected = CompileProfile(both, both, "gemma", (1, 8), "avx2", "redo", 5, kv_dtype="q8_0", threads=3)
    assert CompileProfile.load(file) == CompileProfile.load(str(file)) == expected
    assert CompileProfile.load(expected) is expected
    assert expected.ranges == ((1, 1), (2, 8))


def test_values_at_the_ends_of_their_ranges() -> None:
    profile = parsed("[backend.cpu]\nthreads = 1024\n[cache]\ncapacity = 1")
    assert (profile.threads, profile.capacity) == (1024, 1)


def test_a_phase_overrides_key_by_key() -> None:
    profile = parsed(
        '[precision]\nmode = "auto"\n[fusion]\nnorm = false\n[passes]\nsimplify = false\n'
        '[prefill.precision]\nmode = "exact"\n[decode.fusion]\nrope = false\nnorm = true\n'
        "[decode.passes]\nsimplify = true\n"
    )
    assert profile.prefill.precision == "exact"
    assert profile.decode.precision == "auto"
    assert set(FUSIONS) - set(profile.prefill.fusions) == {"norm"}
    assert set(FUSIONS) - set(profile.decode.fusions) == {"rope"}
    assert "simplify" not in profile.prefill.passes
    assert profile.decode.passes == PASSES


def test_options_are_those_of_the_phase() -> None:
    profile = parsed(
        '[prefill.precision]\nmode = "exact"\n[decode.fusion]\nskip = true\n[decode.passes]\nsimplify=false'
    )
    assert profile.options((2, 8), all_rows=True) == Options("exact", (2, 8), True)
    rest = tuple(name for name in PASSES if name != "simplify")
    assert profile.options((1, 1)) == Options("auto", (1, 1), fusions=(), passes=rest)
    assert profile.options((1, 4)).precision == "exact", "one row may be one of several"
    assert profile.options((1, 4), segments=True).precision == "auto", "each may be one row of a sequence"


def test_precision_of_an_argument_wins_and_a_default_fills_what_is_open() -> None:
    split = parsed('[prefill.precision]\nmode = "exact"')
    assert split.precision == "exact prefill, auto decode"
    assert split.is_exact
    assert split.with_precision("auto", "exact").precision == "auto"
    assert not split.with_precision("auto", "exact").is_exact
    assert split.with_precision(None, "exact").precision == "exact"
    assert split.with_precision(None, "auto").decode.precision == "auto"
    with pytest.raises(ArgumentError, match="precision 'fast' is unknown"):
        split.with_precision("fast", "auto")


# ---------------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "x = 1": "unknown key 'x'. Known: model, family, precision, fusion, passes, buckets, backend, cache, engine, pre",
    "[fusio]": "profile: unknown key 'fusio'. Did you mean 'fusion'?",
    "famly = 'gemma'": "profile: unknown key 'famly'. Did you mean 'family'?",
    "family = 'gema'": "family is 'gema', expected one of llama32, qwen3, qwen35, gemma. Did you mean 'gemma'?",
    "[precision]\nmod = 'auto'": "profile [precision]: unknown key 'mod'. Did you mean 'mode'?",
    "[precision]\nmode = 'exakt'": "[precision]: mode is 'exakt', expected one of auto, exact. Did you mean 'exact'?",
    "[precision]\nmode = 1": "profile [precision]: mode is 1, expected a string",
    "[precision]\nbf16_dots = 1": "profile [precision]: bf16_dots is 1, expected true or false",
    "precision = 'auto'": "profile: precision is 'auto', expected a section. Write [precision] on a line of its own",
    "[fusion]\ngatd = true": "profile [fusion]: unknown key 'gatd'. Did you mean 'gated'?",
    "[fusion]\ngated = 1": "profile [fusion]: gated is 1, expected true or false",
    "[passes]\nlastrow = true": "profile [passes]: unknown key 'lastrow'. Did you mean 'last_row'?",
    "[passes]\nschedule = false": "profile [passes]: unknown key 'schedule'. Known: simplify, last_row, reuse_memory.",
    "[buckets]\nseq = 16": "profile [buckets]: seq is 16, expected a list",
    "[buckets]\nseq = [2, 16]": "[buckets]: seq is [2, 16], expected row counts ascending from 1 to at most 4096",
    "[buckets]\nseq = [1, 9, 4]": "profile [buckets]: seq is [1, 9, 4], expected",
    "[buckets]\nseq = [1, 2.5]": "profile [buckets]: seq is [1, 2.5], expected",
    "[buckets]\nseq = [1, true]": "profile [buckets]: seq is [1, True], expected",
    "[buckets]\nseq = [1]": "profile [buckets]: seq is [1], expected",
    "[buckets]\nseq = [1, 5000]": "Write, for example, [1, 16, 512].",
    "[backend]\ncpus = {}": "profile [backend]: unknown key 'cpus'. Did you mean 'cpu'?",
    "[backend]\ncpu = 2": "profile [backend]: backend.cpu is 2, expected a section",
    "[backend.cpu]\nlevel = 'avx3'": "[backend.cpu]: level is 'avx3', expected one of native, generic, avx2, avx512",
    "[backend.cpu]\nthreads = 0": "profile [backend.cpu]: threads is 0, expected a whole number from 1 to 1024",
    "[backend.cpu]\nthreads = 5000": "profile [backend.cpu]: threads is 5000, expected a whole number from 1 to 1024",
    "[backend.cpu]\nthreads = true": "profile [backend.cpu]: threads is True, expected a whole number",
    "[cache]\npolicy = 'ro'": "profile [cache]: policy is 'ro', expected one of on, off, redo, readonly",
    "[cache]\ncapacity = 0": "profile [cache]: capacity is 0, expected a whole number from 1 to 1048576",
    "[cache]\ncapacity = -3": "profile [cache]: capacity is -3, expected a whole number from 1",
    "[decode]\nmode = 'exact'": "profile [decode]: unknown key 'mode'. Known: precision, fusion, passes.",
    "[decode.precision]\nmod = 'exact'": "profile [decode.precision]: unknown key 'mod'. Did you mean 'mode'?",
    "[decode.precision]\nkv_dtype = 'f32'": "'kv_dtype' holds for both phases. Write it in [precision].",
    "[prefill.buckets]\nseq = [1, 2]": "[prefill]: 'buckets' holds for both phases. Write it outside [prefill].",
    "[prefill]\nfamily = 'gemma'": "profile [prefill]: 'family' holds for both phases. Write it outside [prefill].",
    "[prefill.decode]": "profile [prefill]: unknown key 'decode'",
    "decode = 3": "profile: decode is 3, expected a section",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(REFUSED[text])):
        parsed(text)


# ---------------------------------------------------------------------------------------------------- the way back


@given(profiles(), st.booleans())
def test_what_is_written_is_read_back(profile: CompileProfile, comments: bool) -> None:
    text = profile.to_toml(comments)
    assert parsed(text) == profile
    assert parsed(text).to_toml(comments) == text


def test_a_commented_file_explains_every_key() -> None:
    full = replace(
        CompileProfile.preset("gemma", "prefill"),
        buckets=(1, 16, 512),
        kv_dtype="f16",
        deterministic=False,
        level="avx2",
        threads=2,
        cache="on",
        capacity=64,
        kv_bytes="2GiB",
        cache_kv="states",
        cache_kv_bytes="20GiB",
        device="auto",
        model="m.gguf",
    )
    text = full.to_toml(comments=True)
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for path, key in KEYS.items():
        assert re.search(rf"^{key.name} = ", text, re.MULTILINE), path
        assert key.meaning in flat, path
        assert f"Default: {key.default}." in flat, path


# ---------------------------------------------------------------------------------------------------- presets, phases


def test_two_profiles_become_one_if_they_share_what_phases_share() -> None:
    tables = [{"precision": {"mode": mode}, "buckets": {"seq": [1, 8]}} for mode in ("exact", "auto")]
    exact, auto = map(CompileProfile.load, tables)
    joined = CompileProfile.of_phases(exact, auto)
    assert joined == CompileProfile.of_phases(*tables), "tables are as good"
    assert (joined.prefill, joined.decode, joined.buckets) == (exact.prefill, auto.decode, (1, 8))
    with pytest.raises(ProfileError, match=r"buckets is \(1, 8\) for prefill and \(\) for decode"):
        CompileProfile.of_phases(exact, CompileProfile())
