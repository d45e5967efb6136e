"""LoRA adapters: low-rank changes of matrices, from a PEFT folder or a GGUF file.

Weights stage. An adapter changes a matrix W [n, k] to W + scale B A (arXiv 2106.09685). The names of its tensors are
those of the matrices that it changes; `names.py` translates them. What changes a model otherwise (DoRA's magnitudes,
biases, whole matrices in place of others) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.arguments import as_float
from rlx.errors import ConfigError, ModelFileError, UnsupportedModelError, WeightError
from rlx.ir.stored import dequantize
from rlx.json_file import read_object
from rlx.models.registry import TWO_WAY
from rlx.weights.loader import WeightLoader, model_format, open_weights
from rlx.weights.names import canonical_name

Floats = npt.NDArray[np.float32]
Parts = dict[str, dict[str, tuple[str, Floats]]]  # matrix -> "A" and "B" -> its name in the file, and the values

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PEFT = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_GGUF = re.compile(r"(.+)\.lora_([ab])")
_PLAIN = re.compile(r"\^?[\w.]+")
# Settings of PEFT that change what an adapter means -> the values that mean nothing else than W + scale B A.
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")  # ways to begin that change the model's own weights, too


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in memory.

    Attributes:
        path: its file.
        format: `gguf` or `safetensors`, which differ in the order of rows.
        pairs: canonical name of a matrix [n, k] -> A f32 [rank, k], and the scale times B f32 [n, rank].
        digest: of its content.
    """

    path: Path
    format: str
    pairs: Mapping[str, tuple[Floats, Floats]]
    digest: str


def open_adapter(path: str | Path, family: str) -> Adapter:
    """Reads an adapter: a GGUF file, or a folder with `adapter_config.json`.

    Args:
        family: the architecture of the model, a key of `ARCHITECTURES` or `ENCODERS` of `rlx.models.registry`.

    Raises:
        ModelFileError: a file is missing or malformed.
        ConfigError: a setting is missing or out of its range.
        UnsupportedModelError: it is none of LoRA, has more than LoRA, or changes what the model does not have.
        WeightError: half of a pair is missing, or the two do not fit.
    """
    found = Path(path).expanduser()
    folder = found.parent if found.name in (CONFIG, TENSORS) else found
    if (folder / CONFIG).exists():
        return _from_peft(folder, family)
    if found.is_file() and model_format(found) == "gguf":
        return _from_gguf(found, family)
    hint = f"name a GGUF file, or a folder with {CONFIG} and {TENSORS}"
    raise ModelFileError("there is no adapter", where=found, hint=hint)


def _from_peft(folder: Path, family: str) -> Adapter:
    where, config = folder / CONFIG, read_object(folder / CONFIG, ConfigError)
    if not (folder / TENSORS).exists():
        hint = "save it again with safe_serialization=True" if (folder / "adapter_model.bin").exists() else None
        raise ModelFileError(f"{TENSORS} is missing", where=folder, hint=hint)
    for key, usual in _USUAL.items():
        if (value := config.get(key)) not in usual:
            hint = "merge it into the model's weights with PEFT, and convert those"
            raise UnsupportedModelError(f"{key} is {value!r}: this is more than W + scale B A", where=where, hint=hint)
    if str(begun := config.get("init_lora_weights")).startswith(_OTHER_BASE):
        hint = "convert it with PEFT (path_initial_model_for_weight_conversion)"
        raise UnsupportedModelError(f"init_lora_weights is {begun!r}: it is of another base", where=where, hint=hint)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(_PLAIN.fullmatch(name) for name in patterns):
        raise UnsupportedModelError("alpha_pattern has regular expressions, not names of modules", where=where)
    alphas = {name: _number(value, f"alpha_pattern.{name}", where) for name, value in patterns.items()}
    default = _number(config.get("lora_alpha"), "lora_alpha", where)
    if config.get("r") == 0:
        raise ConfigError("r is 0, expected a rank of at least 1", where=where)

    def scale(module: str, rank: int) -> float:
        alpha = next((alpha for name, alpha in alphas.items() if _matches(name, module)), default)
        return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank

    with open_weights(folder / TENSORS, config={}) as loader:
        return _read(loader, lambda name: _PEFT.fullmatch(name), ".weight", family, scale)


def _from_gguf(path: Path, family: str) -> Adapter:
    with open_weights(path) as loader:
        metadata = loader.metadata
        kind, form, arch = (str(metadata.get(key)) for key in ("general.type", "adapter.type", "general.architecture"))
        if kind != "adapter" or form != "lora":
            what = f"it is no LoRA adapter: general.type is {kind!r}, adapter.type {form!r}"
            raise UnsupportedModelError(what, where=path)
        if TWO_WAY.get(arch, arch) != family:
            what = f"the adapter is for the architecture {arch!r}, the model is of {family!r}"
            raise UnsupportedModelError(what, where=path, hint="use one that was made for this model")
        if "adapter.alora.invocation_tokens" in metadata:
            raise UnsupportedModelError("it begins at certain tokens only (aLoRA)", where=path)
        alpha = _number(metadata.get("adapter.lora.alpha"), "adapter.lora.alpha", path)
        return _read(loader, lambda name: _GGUF.fullmatch(name), "", family, lambda _, rank: (alpha or rank) / rank)


def _number(value: Any, key: str, where: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(as_float(value)):
        raise ConfigError(f"{key} is {value!r:.80}, expected a number", where=where)
    return float(value)


def _matches(pattern: str, module: str) -> bool:
    """Whether a name of PEFT's patterns means a module: the whole name after ^, else its end."""
    name = pattern.removeprefix("^")
    return module == name or (name == pattern and module.endswith(f".{name}"))


def _read(
    loader: WeightLoader,
    match: Callable[[str], re.Match[str] | None],
    suffix: str,
    family: str,
    scale: Callable[[str, int], float],
) -> Adapter:
    """The adapter in an open file.

    Args:
        match: finds the matrix in a tensor's name, and which half of its pair the tensor is.
        suffix: what the matrix's own name has behind that.
        scale: the factor of a pair, from the name of its module and its rank.
    """
    halves: dict[str, dict[str, Floats]] = {}
    digest = blake2b(digest_size=16)
    for name, info in loader.tensors.items():
        found = match(name)
        if found is None:
            what = f"the tensor {name!r} is no half of a low-rank change of a linear layer"
            raise UnsupportedModelError(what, where=loader.path, hint="merge it into the model's weights with PEFT")
        raw = loader.raw(name)
        digest.update(repr((name, info.dtype.name, info.shape)).encode() + raw.tobytes())
        halves.setdefault(found[1], {})[found[2].upper()] = dequantize(raw, info.dtype, info.shape)
    if not halves:
        raise WeightError("the adapter has no tensors", where=loader.path)
    pairs: dict[str, tuple[Floats, Floats]] = {}
    for module, pair in halves.items():
        canonical = canonical_name(module + suffix, family)
        if canonical is None:
            hint = "the adapter is for another model, or for a part of it that is no linear layer"
            raise UnsupportedModelError(f"the model has no {module!r} to adapt", where=loader.path, hint=hint)
        a, b = _checked(pair, f"{loader.path}, {module}")
        factor = scale(module, len(a))
        digest.update(repr(factor).encode())
        pairs[canonical] = a, b * np.float32(factor)
    return Adapter(loader.path, loader.format, pairs, digest.hexdigest())


def _checked(pair: Mapping[str, Floats], where: str) -> tuple[Floats, Floats]:
    """Both halves of a pair; `WeightError` if one is missing or they do not fit."""
    if len(pair) < 2:
        raise WeightError(f"the adapter has only half {next(iter(pair))} of the pair", where=where)
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
        raise WeightError(f"A {list(a.shape)} and B {list(b.shape)} are no pair of one rank", where=where)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise WeightError("A or B has numbers that are infinite or NaN", where=where)
    return a, b
