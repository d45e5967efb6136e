"""How the makers of a model want its tokens chosen: what its files say, as `SampleOpts`.

Sampling stage, over the open file. Read are `generation_config.json` beside a safetensors checkpoint, by the meaning
that transformers gives it, and the keys `general.sampling.*` of a GGUF file, whose names are llama.cpp's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from rlx.errors import SamplingError
from rlx.sampling.options import SampleOpts
from rlx.weights import WeightLoader

_GGUF = "general.sampling."
_GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repetition_window",
    "penalty_repeat": "repetition_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_HF_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_HF_PENALTIES = ("repetition_penalty",)  # what holds without `do_sample` too
_HF_TOP_K = 50  # of transformers, where the file names none
_WHOLE_CONTEXT = -1  # as a window, in llama.cpp


def recommended(loader: WeightLoader) -> SampleOpts | None:
    """The options that the model's files recommend; None if they recommend none, or greedy choices and nothing else.

    A value that is out of range is left out with a warning: it is a hint, and no reason to refuse a model.
    """
    if loader.format == "gguf":
        return _from_gguf(loader.metadata, str(loader.path))
    folder = loader.path if loader.path.is_dir() else loader.path.parent
    return _from_transformers(getattr(loader, "generation_config", {}), f"{folder}/generation_config.json")


def gguf_keys(opts: SampleOpts) -> dict[str, int | float]:
    """The keys of a GGUF file that recommend `opts`; those that change nothing are left out.

    The format has no key for what is not in `_GGUF_KEYS`, such as `typical_p`.
    """
    off = SampleOpts()
    values = {key: getattr(opts, name) for key, name in _GGUF_KEYS.items()}
    values["penalty_last_n"] = _WHOLE_CONTEXT if opts.repetition_window is None else opts.repetition_window
    changed = {key for key, name in _GGUF_KEYS.items() if getattr(opts, name) != getattr(off, name)} | {"temp"}
    return {_GGUF + key: value for key, value in values.items() if key in changed}


def _from_gguf(metadata: Mapping[str, Any], where: str) -> SampleOpts | None:
    given = {name: metadata[_GGUF + key] for key, name in _GGUF_KEYS.items() if _GGUF + key in metadata}
    if given.get("repetition_window") == _WHOLE_CONTEXT:
        given["repetition_window"] = None
    found = dict(_valid(given, where))
    return SampleOpts(**found) if found else None


def _from_transformers(config: Mapping[str, Any], where: str) -> SampleOpts | None:
    """Without `do_sample` transformers is greedy whatever the other keys say, but penalizes all the same."""
    draws = config.get("do_sample") is True
    names = _HF_KEYS if draws else _HF_PENALTIES
    found = dict(_valid({name: config[name] for name in names if config.get(name) is not None}, where))
    if draws:
        found.setdefault("top_k", _HF_TOP_K)
    elif found.get("repetition_penalty", 1) == 1:
        return None
    else:
        found["temperature"] = 0
    return SampleOpts(**found, repetition_window=None)


def _valid(given: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The values that are there and in their ranges, with a warning for the others."""
    for name, value in given.items():
        try:
            SampleOpts(**{name: value})
        except SamplingError as error:
            warnings.warn(f"{where}: the recommended {error.what}; it is left out", stacklevel=4)
        else:
            yield name, value
