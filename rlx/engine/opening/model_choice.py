"""Model selection: the named model, else the profile's, else the one beside the profile, else the demo model.

Runners stage, in front of `auto.py`; the command line uses it too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlx import demo
from rlx.errors import ProfileError
from rlx.profile import CompileProfile
from rlx.weights import hub
from rlx.weights.locate import choose, models_in, split_quantization

if TYPE_CHECKING:
    from rlx.profile import ProfileLike

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
    return model if hub.is_name(base) and not any(path.exists() for path in here) else here[0]
