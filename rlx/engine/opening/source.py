"""Which model a call means, and its open file: named, else the profile's, else beside the profile, else the demo model.

Runners stage, in front of the engine; the command line uses it, too. A safetensors checkpoint may lack its
`config.json`: the caller then gives one. A GGUF file has its own; one given in addition must describe the same model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from rlx import demo, models, weights
from rlx.errors import ConfigError, ProfileError
from rlx.models import ModelConfig
from rlx.profile import CompileProfile, ProfileLike
from rlx.weights import WeightLoader, open_weights
from rlx.weights.loader import model_format
from rlx.weights.locate import choose, models_in, resolve_model_path, split_quantization

Origin = Literal["named", "profile", "beside", "demo"]


@dataclass(frozen=True)
class ModelChoice:
    """A model and where the choice comes from.

    Attributes:
        path: an argument for `open_weights`.
        origin: "named" by the caller; "profile": its key `model`; "beside": the only model in the folder of the
            profile's file; or "demo".
    """

    path: str | os.PathLike[str]
    origin: Origin


def choose_model(path: str | os.PathLike[str] | None, profile: ProfileLike = None) -> ModelChoice:
    """The model of a call.

    Args:
        path: the caller's argument, or None.
        profile: the compile profile: a file, a table, or a `CompileProfile`.

    Raises:
        AmbiguousModelError: there are several models beside the profile.
        ProfileError: the profile cannot be read, or no model is named and the profile is not for the demo model's
            family.
    """
    choice = _chosen(path, profile)
    if isinstance(choice, ModelChoice):
        return choice
    where = CompileProfile.load(profile).source
    what = f"it is for the family '{choice}', and no model is named: the demo model is of '{demo.FAMILY}'"
    hint = f'name one: `rlx compile MODEL --profile {where or "FILE"}`, or model = "MODEL" at the top of the profile'
    raise ProfileError(what, where=where or "profile", hint=hint)


def family_without_model(path: str | os.PathLike[str] | None, profile: ProfileLike = None) -> str | None:
    """The profile's family if `choose_model` finds no model for it; otherwise None.

    Raises:
        AmbiguousModelError, ProfileError: the profile is invalid for another reason.
    """
    choice = _chosen(path, profile)
    return None if isinstance(choice, ModelChoice) else choice


def _chosen(path: str | os.PathLike[str] | None, profile: ProfileLike) -> ModelChoice | str:
    """The model of a call; if there is none, the profile's family."""
    if path is not None:
        return ModelChoice(path, "named")
    if profile is None:
        return ModelChoice(demo.path(), "demo")
    loaded = CompileProfile.load(profile)
    file = loaded.source
    folder = Path() if file is None else file.expanduser().parent
    if loaded.model is not None:
        return ModelChoice(_named_in(folder, loaded.model), "profile")
    models = [] if file is None else models_in(folder)
    if models:
        return ModelChoice(choose(models, None, folder).path, "beside")
    return loaded.family if loaded.family not in (None, demo.FAMILY) else ModelChoice(demo.path(), "demo")


def _named_in(folder: Path, model: str) -> str | Path:
    """Resolves a profile's `model` key: a path relative to the profile's folder, or the name of a downloaded model."""
    base, _ = split_quantization(model)
    here = [folder / Path(name).expanduser() for name in (model, base)]
    return model if weights.hub.is_name(base) and not any(path.exists() for path in here) else here[0]


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
        given, names = models.from_hf(weights.safetensors.read_config(config), where="config"), _SIZES
    for name in names:
        mine, theirs = getattr(own, name), getattr(given, name)
        if mine != theirs:
            what = f"the given config describes another model: its {name} is {_shown(theirs)}, the file's"
            hint = "leave the config out: the file has its own"
            raise ConfigError(f"{what} is {_shown(mine)}", where=loader.path, hint=hint)


def _shown(value: Any) -> str:
    """A value for a message; for layers, their number and the first one."""
    return f"{len(value)} layers like {value[0]}" if isinstance(value, tuple) and value else repr(value)
