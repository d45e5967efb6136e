"""Opens a model file with a configuration from the caller.

Runners stage, in front of the engine. A safetensors checkpoint may lack its `config.json`. A GGUF file has its own
configuration; one given in addition must describe the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

from rlx import models
from rlx.errors import ConfigError
from rlx.models import ModelConfig
from rlx.weights import WeightLoader, open_weights
from rlx.weights.loader import model_format
from rlx.weights.locate import resolve_model_path
from rlx.weights.safetensors import read_config

Config = str | PathLike[str] | Mapping[str, Any] | ModelConfig
"""A `config.json` (path or contents), or the `config` of a runner."""

_SIZES = ("arch", "hidden", "heads", "each")  # compared to tell models apart, in every file format


def open_with(source: str | PathLike[str] | WeightLoader, config: Config | None) -> WeightLoader:
    """The open model file. Takes ownership of a loader that is passed, also on failure.

    Args:
        config: for safetensors weights without a configuration; compared with the file's own if it has one.

    Raises:
        ConfigError: `config` describes another model than the file.
        ModelFileError: the file cannot be used.
    """
    if config is None:
        return source if isinstance(source, WeightLoader) else open_weights(source)
    if not isinstance(source, WeightLoader) and not isinstance(config, ModelConfig):
        path = resolve_model_path(source)
        if model_format(path) == "safetensors":
            return open_weights(path, config=config)
    loader = source if isinstance(source, WeightLoader) else open_weights(source)
    try:
        _check(loader, config)
    except BaseException:
        loader.close()
        raise
    return loader


def _check(loader: WeightLoader, config: Config) -> None:
    own = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    if isinstance(config, ModelConfig):
        given, names = config, tuple(f.name for f in fields(ModelConfig))
    else:
        given, names = models.from_hf(read_config(config), where="config"), _SIZES
    for name in names:
        mine, theirs = getattr(own, name), getattr(given, name)
        if mine != theirs:
            what = f"the given config describes another model: its {name} is {_shown(theirs)}, the file's"
            hint = "leave the config out: the file has its own"
            raise ConfigError(f"{what} is {_shown(mine)}", where=loader.path, hint=hint)


def _shown(value: Any) -> str:
    """A value for a message; for layers, their number and the first one."""
    return f"{len(value)} layers like {value[0]}" if isinstance(value, tuple) and value else repr(value)
