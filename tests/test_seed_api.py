"""Every item of the original's documented interface, called in its own order of arguments on a tiny golden model.

docs/api.md is the map of these items; `test_api_page.py` checks that each row of its tables has a call here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.runners import LmRunner
from rlx.weights import WeightLoader, open_weights

PROFILE = {"buckets": {"seq": [1, 32]}}
OPTIONS: dict[str, Any] = {"max_seq": 96, "precision": "exact", "profile": PROFILE, "threads": 1}
OPTS = rlx.SampleOpts.greedy()
CPU = rlx.Device.CPU


class Model:
    """A golden model, and what transformers computed with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = np.load(path.parent / "golden.npz")
        self.prompt: list[int] = found["tokens"].tolist()
        self.greedy: list[int] = found["greedy"].tolist()
        self.last: np.ndarray[Any, Any] = found["logits"][-1]

    def is_last(self, logits: np.ndarray[Any, Any]) -> bool:
        """Whether these are the logits after the prompt."""
        return bool(np.abs(logits - self.last).max() <= 3e-5 * np.abs(self.last).max())


class Runner(Model):
    """The calls of `LmRunner` and `Qwen3Runner`."""

    runner: rlx.Qwen3Runner
    seen: list[int]

    def on_token(self, token: int) -> bool:
        self.seen.append(token)
        return len(self.seen) < 3

    def close(self) -> None:
        self.runner.close()

    def generates(self, tokens: list[int], count: int) -> bool:
        return tokens == self.greedy[:count]


def naive(it: Runner) -> bool:
    return it.generates(LmRunner.generate(it.runner, it.prompt, 4, it.on_token, stop_at_eog=False), 3)


def multimodal(it: Runner) -> bool:
    with pytest.raises(rlx.MultimodalError, match="take text only"):
        it.runner.generate_multimodal("a picture", bytes(12), 2, 2, None, 4, it.on_token)
    return True


def sent(it: Runner) -> bool:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(it.runner.generate(it.prompt, 2, stop_at_eog=False)))
    thread.start()
    thread.join()
    return it.generates(found, 2)


def auto(it: Runner) -> bool:
    with rlx.auto_runner(it.path, **OPTIONS) as runner:
        return isinstance(runner, rlx.Qwen3Runner) and runner.family == "qwen3"


def built(it: Runner) -> bool:
    """Streaming is a switch; without it the callback is called when all tokens are there."""
    for streams in (True, False):
        builder = rlx.Qwen3Runner.builder().weights(it.path).max_seq(96).device(CPU).packed(False).sample(OPTS)
        with builder.stream(streams).profile(PROFILE).threads(1).build() as runner:
            it.seen.clear()
            tokens = runner.generate(it.prompt, 4, it.on_token, stop_at_eog=False)
            if not (it.generates(tokens, 3 if streams else 4) and it.seen == tokens):
                return False
    return True


def uncached(it: Runner) -> bool:
    it.runner.disable_decode_compile_cache()
    return it.generates(it.runner.generate(it.prompt, 4, stop_at_eog=False), 4) and it.runner.past_seq == 0


def no_stop(it: Runner) -> Callable[[int], None]:
    return it.seen.append


RUNNER: dict[str, Callable[[Runner], bool]] = {
    "LmRunner.family": lambda it: it.runner.family == "qwen3",
    "LmRunner.vocab_size": lambda it: it.runner.vocab_size == len(it.last),
    "LmRunner.predict_logits": lambda it: it.is_last(it.runner.predict_logits(it.prompt)),
    "LmRunner.generate": naive,
    "LmRunner.supports_multimodal": lambda it: it.runner.supports_multimodal is False,
    "LmRunner.generate_multimodal": multimodal,
    "LmRunner.Send": sent,
    "LmRunner.auto_runner": auto,
    "Qwen3Runner.builder": built,
    "Qwen3Runner.config": lambda it: it.runner.config.vocab_size == it.runner.vocab_size,
    "Qwen3Runner.device": lambda it: it.runner.device is CPU,
    "Qwen3Runner.disable_decode_compile_cache": uncached,
    "Qwen3Runner.predict_logits": lambda it: it.is_last(it.runner.predict_logits(it.prompt)),
    "Qwen3Runner.generate_packed": lambda it: it.generates(
        it.runner.generate_packed(it.prompt, 4, no_stop(it), stop_at_eog=False), 4
    ),
    "Qwen3Runner.generate": lambda it: it.generates(
        it.runner.generate(it.prompt, 4, no_stop(it), stop_at_eog=False), 4
    ),
    "Qwen3Runner.generate_stoppable": lambda it: it.generates(
        it.runner.generate_stoppable(it.prompt, 9, it.on_token, stop_at_eog=False), 3
    ),
}


@pytest.fixture
def qwen3(goldens: Path) -> Iterator[Runner]:
    it = Runner(goldens / "qwen3" / "model-f16.gguf")
    it.seen, it.runner = [], rlx.Qwen3Runner.from_path(it.path, **OPTIONS)
    yield it
    it.close()


@pytest.mark.parametrize("item", RUNNER)
def test_runners(item: str, qwen3: Runner) -> None:
    assert RUNNER[item](qwen3)


class Generator(Model):
    """The calls of `GemmaGenerator`."""

    g: rlx.GemmaGenerator

    @property
    def loader(self) -> WeightLoader:
        return open_weights(self.path)

    @property
    def embeds(self) -> list[float]:
        return self.g.embed(self.prompt).reshape(-1).tolist()  # flat, as the original has it

    @property
    def bias(self) -> list[float]:
        """The causal mask, flat, of every head."""
        n = len(self.prompt)
        table = np.where(np.arange(n) > np.arange(n)[:, None], -np.inf, 0.0)
        return np.broadcast_to(table, (self.g.config.heads, n, n)).reshape(-1).tolist()

    def works(self, g: rlx.GemmaGenerator, close: bool = True) -> bool:
        """Whether a generator continues the prompt as it should."""
        g.prefill(self.prompt)
        found = g.generate_cached(3, OPTS)
        if close and g is not self.g:
            g.close()
        return found == self.greedy[:3]


def other_order(name: str) -> Callable[[Generator], bool]:
    """A constructor with (config, source, device), and more where it has more."""

    def call(it: Generator) -> bool:
        source = str(it.path) if name.startswith("from_path") else it.loader
        more = {"from_loader_at": [it.path], "from_path_with_mtp": [True]}.get(name, [])
        g = getattr(rlx.GemmaGenerator, name)(it.g.config, source, CPU, *more, **OPTIONS)
        return isinstance(g, rlx.GemmaGenerator) and it.works(g)

    return call


def profiles(it: Generator) -> bool:
    plain = rlx.CompileProfile.load({**PROFILE, "precision": {"mode": "exact"}})
    other = rlx.CompileProfile.load({**PROFILE, "precision": {"mode": "exact"}, "fusion": {"prologue": False}})
    g = rlx.GemmaGenerator.from_loader(it.loader, **OPTIONS).with_compile_profiles(plain, other)
    expected = tuple(replace(profile, threads=1) for profile in (plain, other))  # with the argument merged in
    return (g.prefill_profile, g.decode_profile) == expected and it.works(g)


def steps(name: str) -> Callable[[Generator], bool]:
    def call(it: Generator) -> bool:
        it.g.prefill(it.prompt)
        found = [getattr(it.g, name)(OPTS) for _ in range(2)]
        return found == it.greedy[:2] and it.g.past_seq == len(it.g.tokens) - 1

    return call


def generates(name: str) -> Callable[[Generator], bool]:
    def call(it: Generator) -> bool:
        it.g.prefill(it.prompt)
        seen: list[int] = []
        more = (seen.append,) if name.endswith("_with") else ()
        found = getattr(it.g, name)(3, OPTS, *more)
        return found == it.greedy[:3] and (not more or seen == found)

    return call


def from_embeds(name: str) -> Callable[[Generator], bool]:
    """The four ways to generate from embeddings: with a bias behind them, with a callback at the end, or both."""

    def call(it: Generator) -> bool:
        seen: list[int] = []
        bias = (it.bias,) if "bias" in name else ()
        more = (seen.append,) if name.endswith(("_with", "_callback")) else ()
        found = getattr(it.g, name)(it.prompt, it.embeds, *bias, 3, OPTS, *more)
        return found == it.greedy[:3] and (not more or seen == found)

    return call


def prefill(it: Generator) -> bool:
    it.g.prefill(it.prompt)
    return (it.g.tokens, it.g.past_seq) == (it.prompt, 0)


def prefill_from_embeds(it: Generator) -> bool:
    it.g.prefill_from_embeds(it.prompt, it.embeds, it.bias)
    return it.g.step_cached(OPTS) == it.greedy[0]


def decode(it: Generator) -> bool:
    it.g.prefill_get_last_logits(it.prompt)
    found = it.g.decode_get_logits(it.greedy[0])
    return found.argmax() == it.greedy[1] and it.g.past_seq == len(it.g.tokens) == len(it.prompt) + 1


def weights(it: Generator) -> bool:
    values = it.g.weights_cache["token_embd.weight"]
    return values.dtype == np.float32 and values.shape == (it.g.config.vocab_size, it.g.config.hidden)


GENERATOR: dict[str, Callable[[Generator], bool]] = {
    "from_loader": other_order("from_loader"),
    "from_loader_at": other_order("from_loader_at"),
    "from_path": other_order("from_path"),
    "from_path_with_mtp": other_order("from_path_with_mtp"),
    "with_compile_profiles": profiles,
    "prefill_profile": lambda it: isinstance(it.g.prefill_profile, rlx.CompileProfile),
    "decode_profile": lambda it: isinstance(it.g.decode_profile, rlx.CompileProfile),
    "with_prefill_cache": lambda it: it.works(it.g.with_prefill_cache(2)),
    "with_dynamic_prefill_cache": lambda it: it.works(it.g.with_dynamic_prefill_cache(2)),
    "with_decode_cache": lambda it: it.works(it.g.with_decode_cache(64)),
    "with_dynamic_decode_cache": lambda it: it.works(it.g.with_dynamic_decode_cache(2)),
    "with_inference_caches": lambda it: it.works(it.g.with_inference_caches(64)),
    "sync_device": lambda it: it.g.sync_device() is None,  # type: ignore[func-returns-value]
    "prefill": prefill,
    "prefill_from_embeds": prefill_from_embeds,
    "weights_cache": weights,
    "step": steps("step"),
    "generate": generates("generate"),
    "step_cached": steps("step_cached"),
    "generate_from_embeds": from_embeds("generate_from_embeds"),
    "generate_from_embeds_with_bias": from_embeds("generate_from_embeds_with_bias"),
    "generate_from_embeds_with": from_embeds("generate_from_embeds_with"),
    "generate_from_embeds_with_bias_and_callback": from_embeds("generate_from_embeds_with_bias_and_callback"),
    "generate_cached": generates("generate_cached"),
    "generate_cached_with": generates("generate_cached_with"),
    "config": lambda it: it.g.config.family == "gemma",
    "prefill_get_last_logits": lambda it: it.is_last(it.g.prefill_get_last_logits(it.prompt)),
    "decode_get_logits": decode,
}


@pytest.fixture
def gemma(goldens: Path) -> Iterator[Generator]:
    it = Generator(goldens / "gemma3" / "model-f16.gguf")
    with rlx.GemmaGenerator.from_path(it.path, **OPTIONS) as it.g:
        yield it


@pytest.mark.parametrize("item", GENERATOR)
def test_the_generator(item: str, gemma: Generator) -> None:
    assert GENERATOR[item](gemma)


# -- what the original's order meets -----------------------------------------------------------------------------------


def test_a_config_of_another_model_is_refused(gemma: Generator, qwen3: Runner, goldens: Path) -> None:
    with pytest.raises(rlx.ConfigError, match="given config describes another model: its arch is 'qwen3'"):
        rlx.GemmaGenerator.from_path(qwen3.runner.config, gemma.path, CPU)
    with pytest.raises(rlx.ConfigError, match="its arch is 'gemma3', the file's is 'qwen3'"):
        rlx.auto_runner(qwen3.path, config=goldens / "gemma3" / "hf" / "config.json")
    config = goldens / "qwen3" / "hf" / "config.json"
    with rlx.auto_runner(qwen3.path, config=config, load=False) as runner:
        assert runner.config == qwen3.runner.config


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda path: rlx.GemmaGenerator.from_path(), "path is missing"),
        (lambda path: rlx.GemmaGenerator.from_path(None, path, "cpu", 4), "4 arguments, expected"),
        (lambda path: rlx.GemmaGenerator.from_path(path, path=path), "path is given twice"),
        (lambda path: rlx.GemmaGenerator.from_path(path, n_ctx=4), "there is no argument 'n_ctx'. Use max_seq="),
        (lambda path: rlx.GemmaGenerator.from_loader_at(open_weights(path)), "weights_path is missing"),
    ],
)
def test_arguments_that_do_not_fit(call: Callable[[Path], Any], said: str, goldens: Path) -> None:
    with pytest.raises(rlx.ArgumentError, match=re.escape(said)):
        call(goldens / "gemma3" / "model-f16.gguf")


@pytest.mark.parametrize(("value", "mode"), [("1", "dynamic"), ("0", "buckets"), ("", "buckets")])
def test_the_original_s_variable_for_dynamic_decode(
    value: str, mode: str, gemma: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_GEMMA_DYNAMIC_DECODE", value)
    assert gemma.g.with_inference_caches(64)._engine.bucketing.decode == mode
