"""What the files of a model recommend."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx.sampling import SampleOpts
from rlx.weights.recommended import recommended


def hf(**config: Any) -> Any:
    return SimpleNamespace(
        format="safetensors", path=Path("m/model.safetensors"), metadata={}, generation_config=config
    )


def gguf(**keys: Any) -> Any:
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()} | {"general.architecture": "llama"}
    return SimpleNamespace(format="gguf", path=Path("m.gguf"), metadata=metadata)


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"eos_token_id": 2, "transformers_version": "5.0.0"}, None),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, None),
        ({"temperature": 0.7}, None),
        ({"do_sample": False, "repetition_penalty": 1.0}, None),
        ({"repetition_penalty": 1.1}, SampleOpts(0, repetition_penalty=1.1, repetition_window=None)),
        ({"do_sample": True}, SampleOpts(top_k=50, repetition_window=None)),
        ({"do_sample": True, "top_k": 0, "temperature": None}, SampleOpts(repetition_window=None)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            SampleOpts(0.6, 20, 0.95, repetition_window=None),
        ),
        (
            {"do_sample": True, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2, "num_beams": 1},
            SampleOpts(1, 50, 1, 0.1, 1.2, repetition_window=None, typical_p=0.9),
        ),
    ],
)
def test_generation_config(config: dict[str, Any], expected: SampleOpts | None) -> None:
    assert recommended(hf(**config)) == expected


# ---------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"sequence": "kpmt"}, None),
        ({"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}, SampleOpts(0.6, 20, 0.95)),
        ({"temp": np.float32(0.5), "top_k": np.int32(64)}, SampleOpts(0.5, 64)),
        ({"temp": 0.0}, SampleOpts.greedy()),
        ({"penalty_repeat": 1.05, "penalty_last_n": 32}, SampleOpts(repetition_penalty=1.05, repetition_window=32)),
        ({"penalty_repeat": 1.05, "penalty_last_n": -1}, SampleOpts(repetition_penalty=1.05, repetition_window=None)),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, SampleOpts(xtc_probability=0.5, xtc_threshold=0.2)),
        (
            {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
            SampleOpts(mirostat=2, mirostat_tau=4, mirostat_eta=0.2),
        ),
    ],
)
def test_keys_of_a_gguf_file(keys: dict[str, Any], expected: SampleOpts | None) -> None:
    assert recommended(gguf(**keys)) == expected


def test_the_names_are_those_of_the_format() -> None:
    """The `gguf` package names every key; all but the order of the steps are read."""
    from gguf.constants import Keys

    from rlx.weights import recommended as module

    names = {value for name, value in vars(Keys.General).items() if name.startswith("SAMPLING_")}
    assert names - {"general.sampling.sequence"} == {f"general.sampling.{key}" for key in module._GGUF_KEYS}


# ---------------------------------------------------------------------------------------------------- nonsense


@pytest.mark.parametrize(
    ("loader", "said", "expected"),
    [
        (
            hf(do_sample=True, temperature=-1, top_k=7),
            "generation_config.json: the recommended temperature is -1, expected",
            SampleOpts(top_k=7, repetition_window=None),
        ),
        (gguf(top_p=1.5, temp=0.7), "m.gguf: the recommended top_p is 1.5, expected 0 to 1; it is", SampleOpts(0.7)),
        (gguf(temp="hot"), "temperature is 'hot', expected a number", None),
        (gguf(mirostat=1), "mirostat is 1, expected 0 or 2", None),
        (gguf(penalty_last_n=-2, top_k=3), "repetition_window is -2", SampleOpts(top_k=3)),
    ],
)
def test_a_value_out_of_range_is_left_out_with_a_warning(loader: Any, said: str, expected: SampleOpts | None) -> None:
    with pytest.warns(UserWarning) as caught:
        assert recommended(loader) == expected
    assert len(caught) == 1 and said in str(caught[0].message)
