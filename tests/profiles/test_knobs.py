"""Every key of a profile does something, and the compile key holds what changes code and nothing else."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_strategies import phases

import rlx
from rlx import CompileProfile
from rlx.backends.cpu.target import Target, supported_levels
from rlx.compiler.compile import Compiler
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan, choose_model
from rlx.engine.programs.programs import ProgramSpec
from rlx.errors import ProfileError, TargetError
from rlx.ir import custom, ops
from rlx.ir.custom import custom_op
from rlx.ir.dtypes import BF16, DTYPES, F16, KV_DTYPES, Q8_0
from rlx.ir.graph import Graph
from rlx.models import variants
from rlx.passes import pipeline
from rlx.passes.effective import effective
from rlx.passes.options import PASSES, Options
from rlx.platform import cpu_count
from rlx.profile import PhaseProfile
from rlx.profile.keys import KEYS
from rlx.store.cache import CompileCache
from rlx.store.key import CompileKey
from rlx.weights import open_weights

PASTS = ((0, 1), (3, 4), (33, 64), (7, 7))
BUCKETS = {"prefill": (16, 64), "decode": (1, 1)}
LEVELS = [Target.host(level) for level in supported_levels()]
CACHE = CompileCache()  # keys need none, a compiler does


@cache
def models(kv: str = "f16") -> tuple[Graph, ...]:
    """Something for every rule and pass: quantized and bf16 weights, biases, head norms, scales, chains."""
    return tuple(
        model(toy.Toy(1, head_norms=True, biases=True, embedding_scale=8.0, dtype=dtype, cache=DTYPES[kv]))
        for dtype in (BF16, Q8_0)
    )


def model(sizes: toy.Toy) -> Graph:
    graph = toy.build(sizes)
    y = ops.softcap(ops.scale(graph.outputs["logits"], 2.0), 5.0)
    y = ops.rms_norm(y, graph.weight("last_norm", [128]), eps=1e-6)
    graph.output("more", ops.linear(y, graph.weight("wide", [32, 128], Q8_0)))
    graph.output("choice", ops.pick(ops.linear(y, graph.weight("head of its own", [64, 128], Q8_0))))
    return graph


def able() -> Target:
    """A target with dots and tiles of bf16, whether or not this machine has them: nothing is run."""
    return replace(with_dots(), level="amx", features=f"{with_dots().features},+amx-tile,+amx-bf16")


def with_dots() -> Target:
    host = Target.host("generic")
    return replace(host, level="avx512", features="+avx512f,+avx512vnni,+avx512bf16")


def keys(options: Options, target: Target | None = None, kv: str = "f16") -> list[CompileKey]:
    compiler = Compiler(target or able(), CACHE)
    return [compiler.program_key(graph, options) for graph in models(kv)]


def code(options: Options, target: Target | None = None, kv: str = "f16") -> list[str]:
    """What the code depends on, without making it: the programs with their places in memory, and the target."""
    target = target or able()
    return [
        f"{pipeline.lower(graph, effective(options, graph, target.capabilities))}{target.describe()}"
        for graph in models(kv)
    ]


# ---------------------------------------------------------------------------------------------------- programs

#: Another value than the default, of the keys that change a program. A test for every other one is below.
CHANGED: dict[str, Any] = {
    path: path == "fusion.skip" if row.kind is bool else "exact" for path, row in KEYS.items() if row.by_phase
}
#: What decode has no use for.
FOR_PREFILL = ("precision.bf16_dots", "precision.bf16_tiles", "passes.last_row")


def section(path: str, value: Any) -> dict[str, Any]:
    names = path.split(".")
    table: dict[str, Any] = {names[-1]: value}
    for name in reversed(names[:-1]):
        table = {name: table}
    return table


def capped(x: Any, *, by: float, cap: float) -> Any:
    """The meaning of a custom op that fuses two ops of the models above. Nothing is run, so its kernel is empty."""
    return cap * np.tanh(by * x / cap)


def capped_kernel(x: Any, out: Any, begin: int, end: int) -> None:
    return


def capped_formula(x: Any, *, by: float, cap: float) -> Any:
    return ops.softcap(ops.scale(x, by), cap)


@pytest.fixture
def own_op() -> Iterator[None]:
    custom_op(shape="x[..., n] -> [..., n]", kernel=capped_kernel, fuses=capped_formula)(capped)
    yield
    custom.CUSTOM.pop("capped")
    ops.OPS.pop("capped")


@pytest.mark.parametrize("path", CHANGED)
def test_each_key_of_a_phase_changes_its_program(path: str, request: pytest.FixtureRequest) -> None:
    if path == "fusion.custom":
        request.getfixturevalue("own_op")
    base = CompileProfile.load(None)
    for phase, other in (("prefill", "decode"), ("decode", "prefill")):
        profile = CompileProfile.load({phase: section(path, CHANGED[path])})
        changed = phase == "prefill" or path not in FOR_PREFILL
        assert (code(profile.options(BUCKETS[phase])) != code(base.options(BUCKETS[phase]))) == changed
        assert (keys(profile.options(BUCKETS[phase])) != keys(base.options(BUCKETS[phase]))) == changed
        assert keys(profile.options(BUCKETS[other])) == keys(base.options(BUCKETS[other])), "the other phase stays"
        both = CompileProfile.load(section(path, CHANGED[path]))
        assert keys(both.options(BUCKETS[phase])) == keys(profile.options(BUCKETS[phase])), "one choice, one program"


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_choices_without_effect_on_a_model_share_its_programs(name: str, goldens: Path) -> None:
    """No rule of `simplify` matches in a model's graph, and decode code does not depend on a bound of the past."""
    with open_weights(goldens / name / "model-f16.gguf") as loader:
        graph = ProgramSpec((1, 1)).variant(Plan.of(loader, EngineOptions(profile={})).graph)
    compiler, base = Compiler(able(), CACHE), CompileProfile()
    plain = CompileProfile.load({"passes": {"simplify": False}})
    usual = compiler.program_key(graph, base.options((1, 1)))
    assert compiler.program_key(graph, plain.options((1, 1))) == usual
    assert compiler.program_key(graph, base.options((1, 1), whole=("hidden",), packed=("other",))) == usual
    options = {past: ProgramSpec((1, 1), past=past).options(base) for past in PASTS}
    keys = {past: compiler.program_key(graph, each) for past, each in options.items()}
    usual = compiler.program_key(graph, ProgramSpec((1, 1)).options(base))
    assert [past for past, key in keys.items() if key != usual] == [(7, 7)], "a constant is part of the code"
    biased = variants.with_bias(graph, 1)
    sized = {compiler.program_key(biased, ProgramSpec((1, 1), past=past).options(base)) for past in PASTS}
    assert len(sized) == len(PASTS), "the memory of a bias follows from the bound"


# ---------------------------------------------------------------------------------------------------- the key


@dataclass(frozen=True)
class Case:
    """What a program is compiled from: everything that may differ between two of one model."""

    phase: PhaseProfile
    call: tuple[tuple[int, int], str]  # rows, and what is said of them
    target: Target
    kv: str
    versions: str

    @property
    def options(self) -> Options:
        seq, kind = self.call
        return CompileProfile(self.phase, self.phase).options(seq, **({kind: True} if kind else {}))

    @property
    def keys(self) -> CompileKey:
        with mock.patch("rlx.compiler.compile.versions", lambda device: {"generator": self.versions}):
            return keys(self.options, self.target, self.kv)

    @property
    def code(self) -> list[str]:
        return [*code(self.options, self.target, self.kv), self.versions]


ROWS = [(1, 1), (1, 8), (2, 16), (17, 64), (4, 4)]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "phase": phases(),
    "call": st.sampled_from([*itertools.product(ROWS, ["", "all_rows"]), ((1, 8), "segments")]),
    "target": st.sampled_from(
        [*LEVELS, able(), with_dots(), with_dots().without("avx512vnni"), with_dots().without("avx512bf16")]
    ),
    "kv": st.sampled_from([dtype.name for dtype in KV_DTYPES]),
    "versions": st.sampled_from(["one", "two"]),
}
cases = st.builds(Case, **FIELDS)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """Two that differ in a field or two: far apart ones are told apart by anything."""
    first = draw(cases)
    names = draw(st.sets(st.sampled_from([*FIELDS]), max_size=2))
    second = replace(first, **{name: draw(FIELDS[name]) for name in sorted(names)})
    if "phase" in names and draw(st.booleans()):  # one choice of a phase
        name = draw(st.sampled_from([row.name for row in fields(PhaseProfile)]))
        one = replace(first.phase, **{name: getattr(second.phase, name)})
        second = replace(second, phase=one)
    return first, second


@settings(max_examples=40)
@given(pairs())
def test_programs_that_differ_never_share_a_key(pair: tuple[Case, Case]) -> None:
    a, b = pair
    for of_a, of_b, code_a, code_b in zip(a.keys, b.keys, a.code, b.code, strict=False):
        assert of_a != of_b or (code_a == code_b and a.versions == b.versions)


# ---------------------------------------------------------------------------------------------------- engines


def plan(path: Path, profile: Any = None, **arguments: Any) -> Plan:
    with open_weights(path) as loader:
        return Plan.of(loader, EngineOptions(profile=profile, **arguments))


@pytest.fixture(scope="module")
def path(goldens: Path) -> Path:
    return goldens / "gemma3" / "model-f16.gguf"


def test_keys_of_both_phases_reach_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLX_THREADS", "RLX_TARGET", "RLX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    table = {
        "family": "gemma", "model": str(path), "precision": {"kv_dtype": "q8_0", "deterministic": True},
        "buckets": {"seq": [1, 3, 9]},
        "backend": {"cpu": {"level": "generic", "threads": 3}}, "cache": {"policy": "off", "capacity": 2},
        "engine": {"kv_bytes": "1.5GiB", "cache_kv": "states", "cache_kv_bytes": "2G", "device": "cpu"},
    }  # fmt: skip
    read = CompileProfile.load(table)
    assert {*read.common(), *CHANGED} == {*KEYS}, "a key without a test"
    setup = plan(path, table).setup
    assert (setup.kv_type.name, setup.target.level, setup.threads) == ("q8_0", "generic", 3)
    assert (setup.cache.policy, setup.cache.store, setup.cache.capacity) == ("off", None, 2)
    assert setup.kv_bytes == 3 << 29
    assert (setup.cache_kv, setup.cache_kv_bytes) == (Path("states"), 2 << 30)
    assert setup.profile.ranges == ((1, 1), (2, 3), (4, 9))
    assert setup.profile.deterministic and setup.target.backend.name == setup.profile.device
    assert choose_model(None, table).path == path
    usual = plan(path, {}).setup
    assert (usual.kv_type.name, usual.target, usual.threads) == ("f16", Target.host(), cpu_count())
    assert (usual.cache.policy, usual.cache.capacity, usual.kv_bytes) == ("on", 64, None)
    assert (usual.cache_kv, usual.cache_kv_bytes) == (None, None)
    asked = plan(path, table, kv_dtype="f32", threads=1, cache=CACHE, kv_bytes=1 << 20).setup
    assert (asked.kv_type.name, asked.threads, asked.cache, asked.kv_bytes) == ("f32", 1, CACHE, 1 << 20)


def test_deterministic_changes_programs_on_targets_with_tiles_only(path: Path) -> None:
    """And there one row and many rows get activations of one type, so that a token has the same bits in both."""
    base, same = CompileProfile(), CompileProfile(deterministic=True)
    for bucket in base.ranges:
        assert keys(same.options(bucket), with_dots()) == keys(base.options(bucket), with_dots())
    many, one = BUCKETS["prefill"], BUCKETS["decode"]
    assert keys(same.options(many)) != keys(base.options(many)), "no tiles"

    def activations(profile: CompileProfile, seq: tuple[int, int]) -> list[set[tuple[str, ...]]]:
        options = profile.options(seq).effective(able().capabilities)
        graphs = [pipeline.lower(graph, options).graph for graph in models("f16")]
        ops = [[n for n in graph.nodes() if n.op in ("linear", "attention", "expert_linear")] for graph in graphs]
        return [{(n.op, str(n.inputs[0].dtype), str(dict(n.attrs).get("bf16"))) for n in nodes} for nodes in ops]

    assert activations(same, many) == activations(same, one)
    assert activations(base, many) != activations(base, one)


def test_deterministic_refuses_phases_of_other_arithmetic(path: Path) -> None:
    table = {"precision": {"deterministic": True}, "prefill": {"precision": {"mode": "exact"}}}
    with pytest.raises(ProfileError, match="same arithmetic in prefill and decode, and precision differs"):
        plan(path, table)
    assert plan(path, {**table, "precision": {"deterministic": False}}).setup.is_deterministic is False
    decodes = {"precision": {"deterministic": True}, "decode": {"passes": {"last_row": False}}}
    assert plan(path, decodes).setup.is_deterministic, "a pass that changes no arithmetic"


_FOREIGN = "avx2" if "neon" in supported_levels() else "neon"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[engine]\ndevice = "tpu"', "device 'tpu' is not there"),
        (f'[backend.cpu]\nlevel = "{_FOREIGN}"', f"{_FOREIGN} is a level of "),
    ],
)
def test_a_device_that_is_not_there_is_named_in_the_profile(tmp_path: Path, text: str, what: str) -> None:
    """The command line said --device, which nobody had given."""
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(TargetError, match=re.escape(what)) as caught:
        rlx.auto_runner("demo", profile=file)
    assert caught.value.where == str(file)
    with pytest.raises(TargetError) as caught:
        rlx.auto_runner("demo", profile=file, device="gpu")
    assert caught.value.where == "device"


def test_an_exact_phase_keeps_the_cache_exact(path: Path) -> None:
    """It reads what the other one wrote."""
    for phase in ("prefill", "decode"):
        assert plan(path, {phase: {"precision": {"mode": "exact"}}}).setup.kv_type.name == "f32"
    assert plan(path, {"precision": {"mode": "exact"}}, precision="auto").setup.kv_type.name == "f16"
    assert plan(path, {"precision": {"mode": "exact", "kv_dtype": "f16"}}).setup.kv_type is F16


@pytest.fixture(scope="module")
def copied(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model alone in a folder."""
    target = tmp_path_factory.mktemp("alone") / "model.gguf"
    target.write_bytes(path.read_bytes())
    return target


@pytest.fixture
def beside(copied: Path) -> Iterator[Path]:
    """Where a profile is found."""
    file = copied.parent / "gemma.rlx.toml"
    yield file
    file.unlink(missing_ok=True)


def test_a_profile_beside_the_weights_is_found(copied: Path, beside: Path) -> None:
    assert plan(copied).setup.source is None
    beside.write_text("[buckets]\nseq = [1, 5]")
    (copied.parent / "qwen3.rlx.toml").write_text("[buckets]\nseq = [1, 6]")
    found = plan(copied).setup
    assert (found.profile.buckets, found.source) == ((1, 5), beside)
    given = plan(copied, {"buckets": {"seq": [1, 7]}}).setup
    assert (given.profile.buckets, given.source) == ((1, 7), None)
    with rlx.auto_runner(copied, load=False) as runner:
        assert runner.stats()["profile"] == str(beside)


# ---------------------------------------------------------------------------------------------------- results

GOLDEN = 2e-4  # of the largest logit: what exact precision may differ from transformers


def test_what_is_left_out_changes_no_result(goldens: Path, path: Path) -> None:
    """Against transformers, in one chunk and token by token."""
    expected = dict(np.load(goldens / "gemma3" / "golden.npz"))
    tokens, logits = expected["tokens"].tolist(), expected["logits"]
    table = {"passes": dict.fromkeys(PASSES, False), "fusion": {"skip": True}, "buckets": {"seq": [1, 64]}}
    with rlx.auto_runner(path, max_seq=96, precision="exact", profile=table) as runner:
        rows = np.stack([runner.prefill_logits(tokens[:1]), *map(runner.decode_logits, tokens[1:])])
        assert np.abs(rows - logits).max() <= GOLDEN * np.abs(logits).max()
        for length in (2, 20, len(tokens)):
            row = runner.prefill_logits(tokens[:length])
            assert np.abs(row - logits[length - 1]).max() <= GOLDEN * np.abs(logits).max()
