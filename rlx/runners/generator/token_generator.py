"""A token generator: a token history with selectable compile profiles and cache modes.

Runners stage, the last layer over `token_history.py`. RLX has it for Gemma only; here it supports every family.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rlx import env
from rlx.arguments import bound, check_arguments, whole
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import profile_beside
from rlx.engine.opening.source import open_with
from rlx.engine.programs.specs import past_buckets
from rlx.engine.request.context import check_ids
from rlx.errors import ArgumentError
from rlx.models import FAMILIES
from rlx.passes.options import MAX_PAST
from rlx.profile import CompileProfile, ProfileLike
from rlx.profile.keys import MAX_PROGRAMS
from rlx.profile.option import options_of
from rlx.prompt import TokenIds
from rlx.runners.auto import sniff
from rlx.runners.generator.original_names import OriginalNames

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.engine.opening.opened import WeightsCache
    from rlx.weights.loader import WeightLoader

_INPUTS = 3  # kinds of prompt input: tokens, embeddings, embeddings with a bias


class TokenGenerator(OriginalNames):
    """Generates tokens step by step. Make one with `from_path`; it supports every family.

        with TokenGenerator.from_path("model.gguf", max_seq=512) as generator:
            generator.prefill([1, 2, 3])
            print(generator.generate_cached(8))

    The `with_` methods choose compile profiles and cache modes (docs/caches.md) and return the generator itself. The
    generated tokens are the same in all modes.
    """

    def __init__(self, loader: WeightLoader, options: EngineOptions, include_mtp: bool = False) -> None:
        self._loader, self._options, self._mtp = loader, options, include_mtp
        super().__init__(_engine(loader, self._options))

    # ---------------------------------------------------------------------------------------------- ways to one

    @classmethod
    def from_path(cls, *arguments: Any, **options: Any) -> Self:
        """Opens a GGUF file, a safetensors file or a model directory: `from_path(path, ...)`.

        RLX's order, `from_path(config, path, device)`, is accepted, too.

        Args:
            arguments: the path; or config, path and device.
            options: `config` and those of `EngineOptions`, as for `auto_runner`. The weights are packed at first use.

        Raises:
            ArgumentError: an argument is missing, unknown or given twice.
            ConfigError: `config` describes another model than the file.
            ModelFileError: the file cannot be used.
            TargetError: there is no such device.
        """
        found = bound("from_path", arguments, options, ("path",), ("config", "path", "device"))
        return cls._opened("from_path", found.pop("path"), found)

    @classmethod
    def from_path_with_mtp(cls, *arguments: Any, **options: Any) -> Self:
        """As `from_path`. With `include_mtp`, True by default, `weights_cache` also has the tensors of the MTP head.

        Args:
            arguments: the path and `include_mtp`; or, in RLX's order, config, path, device and `include_mtp`.
        """
        ours, original = ("path", "include_mtp"), ("config", "path", "device", "include_mtp")
        orders = (ours, original) if len(arguments) != 2 or isinstance(arguments[1], bool) else (original,)
        found = bound("from_path_with_mtp", arguments, options, *orders)
        return cls._opened("from_path_with_mtp", found.pop("path"), found, bool(found.pop("include_mtp", True)))

    @classmethod
    def from_loader(cls, *arguments: Any, **options: Any) -> Self:
        """As `from_path`, for an open file: `from_loader(loader, ...)`, or in RLX's order (config, loader, device).

        The generator takes ownership of the loader and closes it; the loader must stay open until then. RLX copies all
        weights out of it instead.
        """
        found = bound("from_loader", arguments, options, ("loader",), ("config", "loader", "device"))
        return cls._opened("from_loader", found.pop("loader"), found)

    @classmethod
    def from_loader_at(cls, *arguments: Any, **options: Any) -> Self:
        """As `from_loader`, with the profile `<family>.rlx.toml`, such as `gemma.rlx.toml`, beside `weights_path`.

        `weights_path` is a file or a folder. The profile is used if it exists and no other is given.

        Args:
            arguments: the loader and `weights_path`; or, in RLX's order, config, loader, device and `weights_path`.
        """
        ours, original = ("loader", "weights_path"), ("config", "loader", "device", "weights_path")
        found = bound("from_loader_at", arguments, options, ours, original)
        if "weights_path" not in found:
            raise ArgumentError("weights_path is missing", where="from_loader_at", hint="from_loader needs none")
        path = Path(found.pop("weights_path"))
        path = path / "weights" if path.is_dir() else path
        if found.get("profile") is None:
            arch = sniff(found["loader"]).arch
            found["profile"] = None if arch is None else profile_beside(path, FAMILIES[arch].runner)
        return cls._opened("from_loader_at", found.pop("loader"), found)

    @classmethod
    def _opened(cls, where: str, source: Any, options: dict[str, Any], include_mtp: bool = False) -> Self:
        config = options.pop("config", None)
        check_arguments(where, options, ("config", *options_of(EngineOptions)))
        chosen = EngineOptions(**{"load": False, **options})
        loader = open_with(source, config)
        try:
            return cls(loader, chosen, include_mtp)
        except BaseException:
            loader.close()
            raise

    # ---------------------------------------------------------------------------------------------- profiles

    def with_compile_profiles(self, prefill: ProfileLike, decode: ProfileLike) -> Self:
        """Compiles prefill with one profile and decode with another; clears the history.

        Args:
            prefill, decode: each as `CompileProfile.load` takes it.

        Raises:
            ProfileError: the profiles differ in options that both phases share, or one is for another family.
        """
        profile = CompileProfile.of_phases(prefill, decode)
        self._check_open()
        options = replace(self._options, profile=profile)
        old, new = self._engine, _engine(self._loader, options)
        new.bucketing = replace(old.bucketing, ranges=new.bucketing.ranges)
        for phase, table in old.tables.items():
            new.tables[phase].limit(table.capacity)
        self._loop.close()
        self._options = options
        self._use(new)
        old.close(keep_file=True)
        return self

    @property
    def prefill_profile(self) -> CompileProfile:
        """The profile for prefill, with these options in both phases and the arguments of opening merged in."""
        return self._engine.profile.for_phase("prefill")

    @property
    def decode_profile(self) -> CompileProfile:
        """The profile for decode."""
        return self._engine.profile.for_phase("decode")

    # ---------------------------------------------------------------------------------------------- cache modes

    def with_prefill_cache(self, capacity: int) -> Self:
        """Exact prefill: one program per prompt length; the `capacity` most recently used ones stay loaded.

        Raises:
            ArgumentError: `capacity` is not a whole number above 0.
        """
        return self._with("prefill", whole("capacity", capacity, 1, MAX_PROGRAMS), prefill="exact")

    def with_dynamic_prefill_cache(self, capacity: int) -> Self:
        """Dynamic prefill: one program for every length and each kind of input; `capacity` programs stay loaded.

        The kinds are tokens, embeddings, and embeddings with a bias.

        Raises:
            ArgumentError: `capacity` is not a whole number above 0.
        """
        return self._with("prefill", whole("capacity", capacity, 1, MAX_PROGRAMS), prefill="dynamic")

    def with_decode_cache(self, max_past: int) -> Self:
        """Bucketed decode: one program per power of two, to which the past is rounded up, as far as `max_past`.

        The dynamic program runs beyond `max_past`.

        Raises:
            ArgumentError: `max_past` is not a whole number above 0.
        """
        buckets = past_buckets(whole("max_past", max_past, 1, MAX_PAST))
        return self._with("decode", buckets + 1, decode="buckets", max_past=int(max_past))

    def with_dynamic_decode_cache(self, capacity: int) -> Self:
        """Dynamic decode, the default: one program for every past; `capacity` as for `with_dynamic_prefill_cache`.

        Raises:
            ArgumentError: `capacity` is not a whole number above 0.
        """
        return self._with("decode", whole("capacity", capacity, 1, MAX_PROGRAMS), decode="dynamic")

    def with_exact_decode_cache(self, capacity: int) -> Self:
        """Exact decode: one program per past; the `capacity` most recently used ones stay loaded.

        It compiles for every token and exists for comparison.

        Raises:
            ArgumentError: `capacity` is not a whole number above 0.
        """
        return self._with("decode", whole("capacity", capacity, 1, MAX_PROGRAMS), decode="exact")

    def with_inference_caches(self, max_seq: int) -> Self:
        """Both caches for contexts of up to `max_seq` tokens: dynamic prefill, and bucketed decode up to `max_seq`.

        As in RLX, decode is dynamic if the environment variable RLX_GEMMA_DYNAMIC_DECODE is 1.

        Raises:
            ArgumentError: `max_seq` is not a whole number above 0, or the variable is neither 0 nor 1.
        """
        self.with_dynamic_prefill_cache(_INPUTS)
        return self.with_dynamic_decode_cache(_INPUTS) if env.dynamic_decode() else self.with_decode_cache(max_seq)

    def _with(self, phase: str, capacity: int, **modes: Any) -> Self:
        def change() -> None:
            self._engine.bucketing = replace(self._engine.bucketing, **modes)
            self._engine.tables[phase].limit(capacity)

        self._call(change)
        return self

    # ---------------------------------------------------------------------------------------------- weights

    @property
    def weights_cache(self) -> WeightsCache:
        """The model's tensors as float32 arrays, read from the file at each access."""
        from rlx.engine.opening.opened import WeightsCache

        return WeightsCache(self._engine.weights, self.config, mtp=self._mtp)

    def embed(self, ids: TokenIds) -> npt.NDArray[np.float32]:
        """The embeddings of tokens, float32[len(ids), hidden], as input for `prefill_from_embeds`.

        Raises:
            PromptError: `ids` is empty or holds an invalid token id.
        """
        return self.weights_cache.embed(check_ids(ids, self.config.vocab_size, "ids"))


GemmaGenerator = TokenGenerator
"""RLX's name for it. It supports every family."""


def _engine(loader: WeightLoader, options: EngineOptions) -> Engine:
    """An engine over an open file; the file stays open if this fails."""
    from rlx.engine.engine import Engine

    return Engine.of(loader, options)
