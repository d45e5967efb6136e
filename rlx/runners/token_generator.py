"""A generator of tokens: a history of tokens with compile profiles and cache modes to choose.

Runners stage, the last layer over `token_history.py`. RLX has it for Gemma; here it serves every family alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rlx import env
from rlx.arguments import OPENING, check_arguments
from rlx.errors import ArgumentError
from rlx.models import FAMILIES
from rlx.passes.options import MAX_PAST
from rlx.profile import CompileProfile, ProfileLike
from rlx.profile.keys import MAX_PROGRAMS
from rlx.runners.auto import sniff
from rlx.runners.checks import TokenIds, check_ids
from rlx.runners.configured import open_with
from rlx.runners.modes import past_buckets
from rlx.runners.original_names import OriginalNames, bound
from rlx.runners.setup import profile_beside
from rlx.runtime.devices import device as find_device
from rlx.runtime.limits import whole

if TYPE_CHECKING:
    from rlx.runners.engine import Engine
    from rlx.runners.weights_cache import WeightsCache
    from rlx.weights.loader import WeightLoader

_INPUTS = 3  # kinds of inputs that a prompt may have: tokens, embeddings, embeddings with a bias


class TokenGenerator(OriginalNames):
    """A model that is asked for one token after the other. Make one with `from_path`; it serves every family.

        with TokenGenerator.from_path("model.gguf", max_seq=512) as generator:
            generator.prefill([1, 2, 3])
            print(generator.generate_cached(8))

    The `with_` methods choose compile profiles and cache modes (docs/caches.md) and return the generator itself. All
    modes give the same tokens.
    """

    def __init__(self, loader: WeightLoader, options: Mapping[str, Any], include_mtp: bool = False) -> None:
        self._loader, self._options, self._mtp = loader, dict(options), include_mtp
        super().__init__(_engine(loader, self._options))

    # ---------------------------------------------------------------------------------------------- ways to one

    @classmethod
    def from_path(cls, *arguments: Any, **options: Any) -> Self:
        """Opens a GGUF file, a safetensors file or a model directory: `from_path(path, ...)`.

        The original's order, `from_path(config, path, device)`, is accepted, too.

        Args:
            arguments: the path, what `auto_runner` takes; or config, path and device.
            options: `config`, `device`, `threads`, `max_seq`, `kv_dtype`, `precision`, `profile`, `cache`, `progress`,
                `dump_ir`, those of `auto_runner`. The weights are packed when they are first needed.

        Raises:
            ArgumentError: an argument is missing, unknown or given twice.
            ConfigError: a config is given for another model than the file's.
            ModelFileError: the file cannot be used, and why.
            TargetError: there is no such device.
        """
        found = bound("from_path", arguments, options, ("path",), ("config", "path", "device"))
        return cls._opened("from_path", found.pop("path"), found)

    @classmethod
    def from_path_with_mtp(cls, *arguments: Any, **options: Any) -> Self:
        """As `from_path`; with `include_mtp`, which is True unless it is given, the tensors that predict further tokens
        are in `weights_cache`, too.

        Args:
            arguments: the path and `include_mtp`; or, in the original's order, config, path, device and `include_mtp`.
        """
        ours, original = ("path", "include_mtp"), ("config", "path", "device", "include_mtp")
        orders = (ours, original) if len(arguments) != 2 or isinstance(arguments[1], bool) else (original,)
        found = bound("from_path_with_mtp", arguments, options, *orders)
        return cls._opened("from_path_with_mtp", found.pop("path"), found, bool(found.pop("include_mtp", True)))

    @classmethod
    def from_loader(cls, *arguments: Any, **options: Any) -> Self:
        """As `from_path`, of an open file: `from_loader(loader, ...)`, or in the original's order (config, loader,
        device).

        The loader then belongs to the generator: it must stay open as long as the generator, which closes it. The
        original copies all weights out of it instead.
        """
        found = bound("from_loader", arguments, options, ("loader",), ("config", "loader", "device"))
        return cls._opened("from_loader", found.pop("loader"), found)

    @classmethod
    def from_loader_at(cls, *arguments: Any, **options: Any) -> Self:
        """As `from_loader`, with the profile `<family>.rlx.toml`, such as `gemma.rlx.toml`, if it lies beside
        `weights_path`, a file or a folder, and no other is given.

        Args:
            arguments: the loader and `weights_path`; or, in the original's order, config, loader, device and
                `weights_path`.
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
        check_arguments(where, options, ("config", *sorted(OPENING)))
        find_device(options.pop("device", None))
        loader = open_with(source, options.pop("config", None))
        try:
            return cls(loader, {"load": False, **options}, include_mtp)
        except BaseException:
            loader.close()
            raise

    # ---------------------------------------------------------------------------------------------- profiles

    def with_compile_profiles(self, prefill: ProfileLike, decode: ProfileLike) -> Self:
        """Compiles with the prefill of one profile and the decode of another; the history is forgotten.

        Args:
            prefill, decode: each as `CompileProfile.load` takes it.

        Raises:
            ProfileError: the two differ in what both phases share, or one is for another family.
        """
        profile = CompileProfile.of_phases(prefill, decode)
        with self._exclusive("with_compile_profiles"):
            options = {**self._options, "profile": profile}
            old, new = self._engine, _engine(self._loader, options)
            new.modes = replace(old.modes, ranges=new.modes.ranges)
            for phase, table in old.tables.items():
                new.tables[phase].limit(table.capacity)
            self._engine, self._options = new, options
            old.close(keep_file=True)
            self._start([])
        return self

    @property
    def prefill_profile(self) -> CompileProfile:
        """The profile that prompts are compiled with, its choices in both phases."""
        return self._engine.profile.for_phase("prefill")

    @property
    def decode_profile(self) -> CompileProfile:
        """The profile that steps of one token are compiled with."""
        return self._engine.profile.for_phase("decode")

    # ---------------------------------------------------------------------------------------------- cache modes

    def with_prefill_cache(self, capacity: int) -> Self:
        """Exact prefill: a program for each length of a prompt, of which the `capacity` last used ones are kept.

        Raises:
            ArgumentError: `capacity` is no whole number above 0.
        """
        return self._with("prefill", whole("capacity", capacity, 1, MAX_PROGRAMS), prefill="exact")

    def with_dynamic_prefill_cache(self, capacity: int) -> Self:
        """Dynamic prefill: one program for every length; `capacity` programs are kept, one for each kind of input
        (tokens, embeddings, embeddings with a bias).

        Raises:
            ArgumentError: `capacity` is no whole number above 0.
        """
        return self._with("prefill", whole("capacity", capacity, 1, MAX_PROGRAMS), prefill="dynamic")

    def with_decode_cache(self, max_past: int) -> Self:
        """Bucketed decode: a program for each power of two that the past is rounded up to, as far as `max_past`; from
        there on the dynamic program.

        Raises:
            ArgumentError: `max_past` is no whole number above 0.
        """
        buckets = past_buckets(whole("max_past", max_past, 1, MAX_PAST))
        return self._with("decode", buckets + 1, decode="buckets", max_past=int(max_past))

    def with_dynamic_decode_cache(self, capacity: int) -> Self:
        """Dynamic decode, the default: one program for every past; `capacity` as for `with_dynamic_prefill_cache`.

        Raises:
            ArgumentError: `capacity` is no whole number above 0.
        """
        return self._with("decode", whole("capacity", capacity, 1, MAX_PROGRAMS), decode="dynamic")

    def with_exact_decode_cache(self, capacity: int) -> Self:
        """Exact decode: a program for each past, of which the `capacity` last used ones are kept. It compiles for every
        token, and is there to compare the others with.

        Raises:
            ArgumentError: `capacity` is no whole number above 0.
        """
        return self._with("decode", whole("capacity", capacity, 1, MAX_PROGRAMS), decode="exact")

    def with_inference_caches(self, max_seq: int) -> Self:
        """Both caches for contexts of up to `max_seq` tokens: dynamic prefill, and decode in buckets up to there.

        As in the original, decode is dynamic where the environment has RLX_GEMMA_DYNAMIC_DECODE=1.

        Raises:
            ArgumentError: `max_seq` is no whole number above 0, or the variable is neither 0 nor 1.
        """
        self.with_dynamic_prefill_cache(_INPUTS)
        return self.with_dynamic_decode_cache(_INPUTS) if env.dynamic_decode() else self.with_decode_cache(max_seq)

    def _with(self, phase: str, capacity: int, **modes: Any) -> Self:
        with self._exclusive("with a cache"):
            self._engine.modes = replace(self._engine.modes, **modes)
            self._engine.tables[phase].limit(capacity)
        return self

    # ---------------------------------------------------------------------------------------------- weights

    @property
    def weights_cache(self) -> WeightsCache:
        """The model's tensors as numbers, each read from the file when it is asked for."""
        from rlx.runners.weights_cache import WeightsCache

        return WeightsCache(self._engine.weights, self.config, mtp=self._mtp)

    def embed(self, ids: TokenIds) -> npt.NDArray[np.float32]:
        """The embeddings of tokens, float32[len(ids), hidden], as `prefill_from_embeds` takes them.

        Raises:
            PromptError: `ids` is empty or holds something that is no id.
        """
        return self.weights_cache.embed(check_ids(ids, self.config.vocab_size, "ids"))


GemmaGenerator = TokenGenerator
"""The name that it has in RLX. It serves every family alike."""


def _engine(loader: WeightLoader, options: Mapping[str, Any]) -> Engine:
    """An engine over an open file, which stays open if this fails."""
    from rlx.runners.engine import Engine

    return Engine.of(loader, **options)
