"""Which model a call means, the model of its open file (configuration, tensors, identity), and settings for it.

Runners stage, under the engine and the commands that inspect a model without running it. The model is the one that is
named, else the profile's, else the one beside the profile, else the demo model. A safetensors checkpoint may lack its
`config.json`: the caller then gives one; a GGUF file has its own. Arguments, profile and defaults are merged, and the
graph is built and checked, before a compiler or a thread is started.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlx import demo, engine, models, text, vision, weights
from rlx.arguments import whole
from rlx.backends import Device, DeviceWarning, backend, is_auto, warn_of_cpu
from rlx.backends.device import Backend, Target
from rlx.closing import on_error
from rlx.compiler.compile import worker_count
from rlx.compiler.state_memory import Sizes
from rlx.compiler.state_memory import kv_dtype as cache_type
from rlx.engine.kv.pool import check_plan, lacking, pool_bytes
from rlx.engine.opening.cpu_experts import CpuExperts
from rlx.engine.opening.options import EngineOptions
from rlx.errors import (
    ArgumentError,
    ConfigError,
    ProfileError,
    ResourceError,
    RlxError,
    TargetError,
    UnsupportedModelError,
)
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.capabilities import Layouts
from rlx.passes.options import MAX_PAST
from rlx.profile import CompileProfile, ProfileLike
from rlx.profile.keys import BUCKETS
from rlx.profile.option import parse_bytes, parse_cache_kv_bytes, parse_folder
from rlx.store.cache import CompileCache, checked_cache
from rlx.weights import ModelWeights, WeightLoader, open_weights
from rlx.weights.loader import model_format
from rlx.weights.locate import choose, models_in, resolve_model_path, split_quantization
from rlx.weights.names import predicting_blocks, with_prediction

if TYPE_CHECKING:
    from rlx.engine.adapters import Adapters

Origin = Literal["named", "profile", "beside", "demo"]

DEFAULT_CONTEXT = 4096  # positions, if the model allows more and the user gave no max_seq


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
    found = [] if file is None else models_in(folder)
    if found:
        return ModelChoice(choose(found, None, folder).path, "beside")
    return loaded.family if loaded.family not in (None, demo.FAMILY) else ModelChoice(demo.path(), "demo")


def _named_in(folder: Path, model: str) -> str | Path:
    """Resolves a profile's `model` key: a path relative to the profile's folder, or the name of a downloaded model."""
    base, _ = split_quantization(model)
    here = [folder / Path(name).expanduser() for name in (model, base)]
    return model if weights.hub.is_name(base) and not any(path.exists() for path in here) else here[0]


Config = str | PathLike[str] | Mapping[str, Any] | models.ModelConfig
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
    if not isinstance(source, WeightLoader) and not isinstance(config, models.ModelConfig):
        path = resolve_model_path(source)
        if model_format(path) == "safetensors":
            return open_weights(path, config=config)
    loader = source if isinstance(source, WeightLoader) else open_weights(source)
    with on_error(loader.close):
        _check(loader, config)
    return loader


def _check(loader: WeightLoader, config: Config) -> None:
    own = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    if isinstance(config, models.ModelConfig):
        other, names = config, tuple(f.name for f in fields(models.ModelConfig))
    else:
        other, names = models.from_hf(weights.safetensors.read_config(config), where="config"), _SIZES
    for name in names:
        mine, theirs = getattr(own, name), getattr(other, name)
        if mine != theirs:
            what = f"the given config describes another model: its {name} is {_shown(theirs)}, the file's"
            hint = "leave the config out: the file has its own"
            raise ConfigError(f"{what} is {_shown(mine)}", where=loader.path, hint=hint)


def _shown(value: Any) -> str:
    """A value for a message; for layers, their number and the first one."""
    return f"{len(value)} layers like {value[0]}" if isinstance(value, tuple) and value else repr(value)


def open_model(loader: WeightLoader) -> tuple[models.ModelConfig, ModelWeights]:
    """The model's configuration, and its tensors under the names that `models.build` uses.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the file cannot be used.
    """
    config = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    if loader.format == "safetensors" and predicting_blocks(loader, config.arch):
        loader = with_prediction(loader, config.layers)
    tensors = ModelWeights(loader, config.arch)
    config = replace(config, tied=config.tied and not tensors.has_own_head)
    for view in models.views(config, tensors.has):
        tensors.define(*view)
    return config, tensors


def tokenizer_of(loader: WeightLoader, chat_template: str | None = None) -> text.Tokenizer:
    """The model's own tokenizer; `TokenizerError` if the file has none, or it cannot be built.

    Args:
        chat_template: the source of a template in place of the model's own.
    """
    if loader.format == "gguf":
        found = text.tokenizer_from_gguf(loader.metadata)
    else:
        found = text.tokenizer_from_hf(loader.path.parent)
    return found if chat_template is None else replace(found, chat_templates={"default": chat_template})


def has_chat_template(loader: WeightLoader) -> bool:
    """Whether the model's files contain a chat template. Does not build the tokenizer."""
    if loader.format == "gguf":
        return isinstance(loader.metadata.get("tokenizer.chat_template"), str)
    return "default" in text.templates_from_hf(loader.path.parent)


def _matrices(graph: Graph) -> list[Node]:
    return [n for n in graph.leaves("weight").values() if len(n.shape) > 1]


def check_used(config: models.ModelConfig, graph: Graph, weights: ModelWeights) -> None:
    """Checks that a model uses all tensors that its layers have in the file: without one it would be another model.

    Raises:
        UnsupportedModelError: the family has no such tensor, or the configuration describes a layer without it.
    """
    left = weights.names.keys() - graph.leaves("weight").keys() - weights.sources
    lost = (weights.names[name] for name in left if name.startswith("blk.") and not _may_be_left(config, name))
    if unused := (*weights.unknown(config.layers), *lost):
        what = f"{unused[0]!r} has no place in the model that the configuration describes"
        raise UnsupportedModelError(what, where=weights.loader.path, hint="Leaving it out would change the model.")


def _may_be_left(config: models.ModelConfig, name: str) -> bool:
    """Whether a tensor of a layer has no use: of layers that predict further tokens or share keys and values."""
    _, layer, part, *_ = name.split(".")
    if int(layer) >= config.layers:
        return True
    shares = config.each[int(layer)].source != int(layer) and part.startswith(("attn_k", "attn_v"))
    return shares or (part == "altup_correct_scale" and not config.stream_scale)


def check_types(graph: Graph, weights: ModelWeights, layouts: Layouts) -> None:
    """Checks that a device has kernels for every matrix of a graph; `UnsupportedModelError` otherwise."""
    types = layouts.matrix_types
    for node in _matrices(graph):
        if node.dtype not in types:
            raise UnsupportedModelError(
                f"tensor {weights.info(node.name).name!r} has type {node.dtype}, which rlx has no kernel for",
                where=weights.loader.path,
                hint=f"Use a file in {', '.join(t.name.upper() for t in types)}.",
            )


class Source:
    """A model file as `rlx.compiler.tensors.Source`; small tensors have the values that the graph computes with.

    Args:
        config: the configuration of a decoder, which stores some tensors in another form; None for an encoder.
    """

    def __init__(self, weights: ModelWeights, config: models.ModelConfig | None) -> None:
        self.raw, self.pieces, self.release = weights.raw, weights.pieces, weights.release
        self._weights, self.config = weights, config

    def array(self, name: str) -> np.ndarray:
        """A small tensor as float32."""
        found = self._weights.array(name)
        return found if self.config is None else self.config.value(name, found)


SAMPLES, SAMPLE_BYTES = 256, 64  # number of tensors that are sampled, evenly spread, and bytes of each


def identity(graph: Graph, loader: WeightLoader) -> str:
    """SHA-256 of a model's graph with its state types, its constants, and samples of its weights.

    It detects mistakes, not manipulation: files that differ only outside the samples have the same identity.
    """
    digest = hashlib.sha256(graph.canonical().encode())
    for name in sorted(graph.constants):
        digest.update(graph.constants[name].tobytes())
    names = sorted(loader.tensors)
    for name in names[:: max(1, -(-len(names) // SAMPLES))]:
        digest.update(name.encode())
        digest.update(loader.raw(name)[:SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def profile_beside(weights: Path, family: str) -> Path | None:
    """`<family>.rlx.toml` in the folder of a model file; None if it does not exist."""
    path = weights.parent / f"{family}.rlx.toml"
    return path if path.exists() else None


@dataclass(frozen=True)
class Setup:
    """The complete settings of one engine.

    Attributes:
        profile: with the caller's options merged in: the precision of both phases is set.
        source: the profile's file; None if it has none.
        kv_type: type of the KV cache.
    """

    profile: CompileProfile
    source: Path | None
    target: Target
    kv_type: DType
    threads: int
    max_seq: int
    cache: CompileCache
    dump_ir: Path | None

    @property
    def layouts(self) -> Layouts:
        """How values lie in the memory of the device."""
        return self.target.capabilities.layouts

    @property
    def kv_bytes(self) -> int | None:
        """Size of the pool of caches in bytes; None for the default."""
        return None if self.profile.kv_bytes is None else parse_bytes(self.profile.kv_bytes)

    @property
    def cache_kv(self) -> Path | None:
        """The folder for states of prompts; None for none."""
        return None if self.profile.cache_kv is None else Path(parse_folder(self.profile.cache_kv))

    @property
    def cache_kv_bytes(self) -> int | None:
        """The limit of that folder in bytes; None for the default."""
        chosen = self.profile.cache_kv_bytes
        return None if chosen is None else parse_cache_kv_bytes(chosen)

    @property
    def is_deterministic(self) -> bool:
        """Whether a token has the same bits in every program, whatever the number of rows."""
        if self.profile.arithmetic_differs:
            return False
        options = self.profile.options((1, 1))
        return options.effective(self.target.capabilities).deterministic

    @staticmethod
    def of(config: models.ModelConfig, weights: ModelWeights, chosen: EngineOptions) -> Setup:
        """Merges a caller's options with the profile; options win.

        Raises:
            ArgumentError: an option is out of its range.
            ProfileError: the profile cannot be read, has an unknown key or value, or is for another family.
            TargetError: there is no such device, or it does not support the level.
        """
        given = chosen.profile
        if given is None:
            given = profile_beside(weights.loader.path, config.family)
        profile = chosen_profile(given, chosen)
        _check_family(profile, config.family)
        if profile.deterministic and (name := profile.arithmetic_differs):
            hint = "Choose the same for both phases, or leave `deterministic` out."
            what = f"`deterministic` needs the same arithmetic in prefill and decode, and {name} differs"
            raise ProfileError(what, where="profile", hint=hint)
        device, target = _device_of(profile, chosen)
        length = chosen.max_seq
        context = min(config.context, DEFAULT_CONTEXT) if length is None else whole("max_seq", length, 1, MAX_PAST)
        if not profile.buckets:
            more = [rows for rows in device.call_rows if rows < BUCKETS[-1] or context > BUCKETS[-1]]
            profile = replace(profile, buckets=tuple(sorted((*BUCKETS, *more))))
        return Setup(
            profile,
            profile.source,
            target,
            cache_type(profile.kv_dtype, profile.is_exact, models.cache_dtype(config, weights)),
            worker_count(profile.threads),
            context,
            compile_cache(chosen.cache, profile),
            None if chosen.dump_ir is None else Path(chosen.dump_ir).expanduser(),
        )


def chosen_profile(source: ProfileLike, chosen: EngineOptions) -> CompileProfile:
    """A profile with the options of a caller, which win; the precision of both phases is set.

    Raises:
        ProfileError: the profile cannot be read, or has an unknown key or value.
    """
    loaded = CompileProfile.load(source)
    return replace(loaded.with_precision(chosen.precision, "auto"), **{**loaded.given(), **chosen.given()})


def _device_of(profile: CompileProfile, chosen: EngineOptions) -> tuple[Backend, Target]:
    """The device of a profile, and its target.

    Raises:
        TargetError: there is none; what the profile alone asks for is an error in it.
    """
    try:
        device = backend(profile.device)
        return device, device.target(profile.level)
    except TargetError as error:
        is_device = (error.where or "").startswith("device")
        if (chosen.device is not None) if is_device else (profile.level is None):
            raise
        what = error.what if error.where == "device" else f"{error.where}: {error.what}"
        raise TargetError(what, where=profile.source or "profile", hint=error.hint) from error


def compile_cache(chosen: CompileCache | str | None, profile: CompileProfile) -> CompileCache:
    """The compile cache: the caller's, or one in the usual place with the policy of the caller or the profile."""
    if chosen is None or isinstance(chosen, str):
        return CompileCache.default(chosen or profile.cache, profile.capacity)
    return checked_cache(chosen)


def _check_family(profile: CompileProfile, family: str) -> None:
    if profile.family not in (None, family):
        what = f"the profile is for the family '{profile.family}', this model is of '{family}'"
        hint = "`rlx profile init MODEL` writes one for a model."
        raise ProfileError(what, where=profile.source or "profile", hint=hint)


class ContextWarning(UserWarning):
    """The context is longer than the one the model was trained with."""


def warn_beyond(trained: int, max_seq: int) -> None:
    """Warns if the context of `max_seq` tokens is longer than the model's own, rope scaling included."""
    if max_seq > trained:
        what = f"a context of {max_seq} tokens is longer than the model's {trained}: beyond them answers get worse"
        warnings.warn(what, ContextWarning, stacklevel=7)


@dataclass(frozen=True)
class Plan:
    """A model that can be run, and its settings.

    Attributes:
        n_cpu_moe: what the caller says of it; None for as many layers as the card has no room for.
        image_bytes: memory that its tower and the largest image take, on devices whose memory is planned.
    """

    config: models.ModelConfig
    weights: ModelWeights
    graph: Graph
    setup: Setup
    adapters: Adapters | None = None
    n_cpu_moe: int | None = None
    image_bytes: int = 0

    @staticmethod
    def of(loader: WeightLoader, options: EngineOptions) -> Plan:
        """Reads the file's header and builds the graph; reads no weights but those of adapters.

        Raises:
            ConfigError, UnsupportedModelError, WeightError: the file cannot be used.
            ArgumentError, ProfileError, TargetError: see `Setup.of`.
        """
        config, weights = open_model(loader)
        plan = _planned(config, weights, options)
        if is_auto(plan.setup.profile.device) and plan.setup.target.backend.name != Device.CPU:
            try:
                plan.check_memory(*pools_of([plan]))
            except ResourceError as error:
                warn_of_cpu(error)
                plan = _planned(config, weights, replace(options, device=Device.CPU, n_cpu_moe=None))
        if plan.n_cpu_moe and plan.cpu_experts.calls_host and not plan.cpu_experts.layers:
            raise ArgumentError("the model has no experts", where="n_cpu_moe", hint="leave n_cpu_moe out")
        if plan.n_cpu_moe is None and plan.cpu_experts.n:
            _warn_of_experts(plan.cpu_experts, plan.setup.target.backend.name)
        warn_beyond(config.context, plan.setup.max_seq)
        return plan

    @cached_property
    def cpu_experts(self) -> CpuExperts:
        """The experts that the CPU computes beside a card."""
        device = self.setup.target.backend

        def lacks(packed: int) -> int:
            fixed = packed + self.image_bytes
            return lacking(device.memory, _pool(self.setup, self.sizes, fixed, 1), self.sizes, fixed)

        return CpuExperts(self.graph, self.setup.layouts, self.n_cpu_moe, lacks, device.calls_host)

    @property
    def weight_bytes(self) -> int:
        """Memory of the device that the weights take."""
        return self.cpu_experts.card_bytes(self.cpu_experts.n)

    @cached_property
    def sizes(self) -> Sizes:
        """Those of the model's states."""
        return Sizes.of(self.graph, self.setup.layouts, self.setup.max_seq, self.setup.profile.buckets[-1])

    def check_memory(self, pool: int) -> None:
        """`ResourceError` if the model does not fit, with a pool of so many bytes; see `check_plan`."""
        memory = self.setup.target.backend.memory
        check_plan(
            memory, pool, self.sizes, self.setup.max_seq, self.weight_bytes, self.image_bytes, self.cpu_experts.hint
        )


def _warn_of_experts(found: CpuExperts, device: str) -> None:
    what = f"the CPU computes the experts of {found.n} of {len(found.layers)} layers"
    warnings.warn(f"{what}: device {device!r} has no room for them (n_cpu_moe={found.n})", DeviceWarning, stacklevel=7)


def _planned(config: models.ModelConfig, weights: ModelWeights, options: EngineOptions) -> Plan:
    setup = Setup.of(config, weights, options)
    device = setup.target.backend
    if options.n_cpu_moe and not device.calls_host and not is_auto(setup.profile.device):
        hint = 'Choose device="cuda", or leave n_cpu_moe out.'
        what = f"it is for a model on one NVIDIA card, and the device is {device.name!r}"
        raise ArgumentError(what, where="n_cpu_moe", hint=hint)
    config = config.at_length(setup.max_seq)
    graph = models.build(config, weights, setup.kv_type, hidden=True, place=weights.place)
    check_types(graph, weights, setup.layouts)
    check_used(config, graph, weights)
    adapters = None
    if options.adapters:
        adapters = engine.adapters.Adapters.of(options.adapters, config, weights, graph)
    image_bytes = 0 if setup.target.backend.memory.lazy else _image_bytes(config, weights, setup, options)
    return Plan(config, weights, graph, setup, adapters, options.n_cpu_moe, image_bytes)


def _image_bytes(config: models.ModelConfig, weights: ModelWeights, setup: Setup, options: EngineOptions) -> int:
    """Memory that a model's tower and the largest image take; 0 if it has no tower that can be used."""
    try:
        found, tensors = vision.opening.open_tower(weights.loader, config, options.mmproj)
        with tensors:
            most = vision.ImageProcessor.of(found, options.image_options()).most_patches
            return vision.tower.memory_of(found, tensors, setup.profile, setup.target.capabilities, most)
    except RlxError:  # who has images is told
        return 0


def pools_of(plans: Sequence[Plan]) -> list[int]:
    """The size in bytes of the pool of each model, none of which is loaded yet: what its options say, or its share."""
    packed = sum(plan.weight_bytes + plan.image_bytes for plan in plans)
    return [_pool(plan.setup, plan.sizes, packed, len(plans)) for plan in plans]


def _pool(setup: Setup, sizes: Sizes, packed: int, pools: int) -> int:
    return pool_bytes(setup.target.backend.memory, setup.kv_bytes, sizes, setup.max_seq, packed, pools)
