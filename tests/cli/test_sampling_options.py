"""The options about the choice of tokens and the end of the answer, over the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from math import inf
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine, install

from rlx import demo
from rlx.cli.main import cli
from rlx.cli.options import sample_opts, sampling_options
from rlx.sampling import SampleOpts
from rlx.text import Tokenizer, load_tokenizer

STORY = "Once upon a time,\nthere was a fox. The fox ran."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.path())


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[None]:
    assert tokenizer.eos_id is not None
    script = [*tokenizer.encode(STORY, add_special_tokens=False), tokenizer.eos_id]
    install(monkeypatch, lambda path: FakeEngine(tokenizer.vocab_size, tokenizer=tokenizer, script=script, max_seq=128))
    yield


def rlx(*args: str) -> Result:
    return CliRunner().invoke(cli, ["run", *args])


def parsed(*args: str) -> dict[str, Any]:
    """What a command with the sampling options gets."""
    found: list[dict[str, Any]] = []
    command = click.command()(sampling_options(lambda sample: found.append(sample)))
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


# ---------------------------------------------------------------------------------------------------- sampling


def test_every_option_can_be_given() -> None:
    given = {
        "temperature": "0.7", "top_k": "40", "top_p": "0.9", "min_p": "0.05", "typical_p": "0.8", "top_n_sigma": "1.5",
        "xtc_probability": "0.5", "xtc_threshold": "0.2", "repetition_penalty": "1.1", "frequency_penalty": "0.1",
        "presence_penalty": "-0.1", "repetition_window": "all", "dry_multiplier": "0.8", "dry_base": "2",
        "dry_allowed_length": "3", "dry_penalty_last_n": "99", "mirostat": "0", "mirostat_tau": "4",
        "mirostat_eta": "0.2", "seed": "5",
    }  # fmt: skip
    args = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    breakers = ["--dry-sequence-breaker", "\n", "--dry-sequence-breaker", "Bob:"]
    found = parsed(*args, *breakers, "--logit-bias", "3=-inf", "--logit-bias", "7=1.5")
    assert set(found) == {field.name for field in fields(SampleOpts)}
    assert (found["repetition_window"], found["dry_penalty_last_n"]) == (None, 99)
    assert found["dry_sequence_breakers"] == ("\n", "Bob:")
    assert SampleOpts(**found).logit_bias == ((3, -inf), (7, 1.5))
    assert all(found[name] == float(value) for name, value in given.items() if value not in ("all", "99"))


def test_each_option_takes_the_place_of_one_value() -> None:
    default = SampleOpts(0.6, 20, 0.95, repetition_window=None, repetition_penalty=1.1)
    assert sample_opts(default, parsed("--top-k", "7")) == SampleOpts(
        0.6, 7, 0.95, repetition_window=None, repetition_penalty=1.1
    )
    assert sample_opts(default, parsed("--temperature", "0")).is_greedy
    assert sample_opts(default, parsed("--repetition-window", "9")).repetition_window == 9


def test_what_the_model_recommends_is_the_default(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    def make(path: Any) -> FakeEngine:
        engine = FakeEngine(tokenizer.vocab_size, tokenizer=tokenizer, max_seq=128)
        engine.recommended = SampleOpts(4.0, seed=1)
        return engine

    def ids(*args: str) -> list[int]:
        return list(json.loads(rlx("Hi", "--json", "--max-tokens", "8", *args).stdout)["ids"])

    install(monkeypatch, make)
    assert ids() == ids() == ids("--temperature", "4") != ids("--seed", "2")
    assert ids("--top-k", "1") == ids("--temperature", "0") != ids()
    reports = [json.loads(rlx("Hi", "--json", "--max-tokens", "1", *more).stdout) for more in ((), ("--top-k", "3"))]
    assert [report["sampling"] for report in reports] == [
        {"greedy": False, "recommended": True, "temperature": 4.0, "seed": 1},
        {"greedy": False, "recommended": False, "temperature": 4.0, "seed": 1, "top_k": 3},
    ]
    assert "sampled with temperature 4.0, seed 1, as the model recommends" in rlx("Hi", "--max-tokens", "1").stderr


@pytest.mark.parametrize(
    "option", ["--top-p", "--min-p", "--typical-p", "--top-n-sigma", "--xtc-probability", "--mirostat-tau"]
)
def test_what_would_do_nothing_is_refused(option: str) -> None:
    result = rlx("Hi", option, "0.5")
    assert (result.exit_code, f"{option} does nothing at temperature 0" in result.stderr) == (2, True)
    assert rlx("Hi", option, "0.5", "--temperature", "0.5").exit_code == 0


def test_minus_one_is_no_limit_as_in_llama_cpp() -> None:
    result = rlx("What is 27 + 45?", *"-n -1 -s -1 --repeat-last-n -1 --dry-penalty-last-n -1 --json".split())
    assert result.exit_code == 0 and json.loads(result.stdout)["end"] == "stop", result.output
    assert rlx("Hi", *"-n 1 --top-k -1 --top-nsigma -1 --temp 1".split()).exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--logit-bias", "x=1"], "'x=1' is no ID=BIAS, such as 42=-1.5 or 42=-inf"),
        (["--logit-bias", "42"], "'42' is no ID=BIAS"),
        (["--logit-bias", "42=inf"], "--logit-bias of token 42 is inf"),
        (["--logit-bias", "99999=1"], "--logit-bias names token 99999, and the vocabulary holds 2048"),
        (["--repetition-window", "some"], "'some' is not a valid integer"),
        (["--mirostat", "1"], "mirostat is 1, expected 0 or 2"),
        (["--dry-base", "0.5"], "--dry-base is 0.5, expected a finite number of at least 1"),
        (["--min-tokens", "9", "--max-tokens", "3"], "--min-tokens 9 is more than --max-tokens 3"),
        (["--stop", ""], "--stop is an empty text"),
    ],
)
def test_mistakes_are_one_message(args: list[str], said: str) -> None:
    result = rlx("Hi", *args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "Traceback" not in result.output
