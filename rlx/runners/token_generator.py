"""A generator of tokens: a history of tokens with compile profiles and cache modes to choose.

Runners stage, the last layer over `token_history.py`. RLX has it for Gemma; here it serves every family alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rlx.passes.options import MAX_PAST
from rlx.profile import CompileProfile, ProfileLike
from rlx.profile.keys import MAX_PROGRAMS
from rlx.runners.checks import TokenIds, check_ids
from rlx.runners.modes import past_buckets
from rlx.runners.setup import profile_beside
from rlx.runners.token_history import TokenHistory
from rlx.runtime.devices import device
from rlx.runtime.limits import whole

if TYPE_CHECKING:
    from rlx.runners.engine import Engine
    from rlx.runners.weights_cache import WeightsCache
    from rlx.weights.loader import WeightLoader

_INPUTS = 3  # kinds of inputs that a prompt may have: tokens, embeddings, embeddings with a bias


class TokenGenerator(TokenHistory):
    """A model that is asked for one token after the other. Make one with `from_path`; it serves every family.

    The `with_` methods choose compile profiles and cache modes (docs/caches.md) and return the generator itself. All
    modes give the same tokens.
    """

    def __init__(
        self, source: str | PathLike[str] | WeightLoader, options: dict[str, Any], include_mtp: bool = False
    ) -> None:
        super().__init__(_open(source, options))
        self._options, self._mtp = options, include_mtp

    # ---------------------------------------------------------------------------------------------- ways to one

    @classmethod
    def from_path(cls, path: str | PathLike[str], **options: Any) -> Self:
        """Opens a GGUF file, a safetensors file or a model directory.

        Args:
            options: `config`, `device`, `threads`, `max_seq`, `kv_dtype`, `precision`, `profile`, `cache`, `progress`,
                `dump_ir`, those of `auto_runner`. The weights are packed when they are first needed.

        Raises:
            ModelFileError: the file cannot be used, and why.
            TargetError: there is no such device.
        """
        return cls(path, options)

    @classmethod
    def from_path_with_mtp(cls, path: str | PathLike[str], include_mtp: bool = True, **options: Any) -> Self:
        """As `from_path`; with `include_mtp` the tensors that predict further tokens are in `weights_cache`, too."""
        return cls(path, options, include_mtp)

    @classmethod
    def from_loader(cls, loader: WeightLoader, **options: Any) -> Self:
        """As `from_path`, of an open file, which then belongs to the generator."""
        return cls(loader, options)

    @classmethod
    def from_loader_at(cls, loader: WeightLoader, weights_path: str | PathLike[str], **options: Any) -> Self:
        """As `from_loader`, with the profile `<family>.rlx.toml`, such as `gemma.rlx.toml`, if it lies beside
        `weights_path`, a file or a folder.
        """
        generator = cls(loader, options)
        try:
            path = Path(weights_path)
            found = profile_beside(path / "weights" if path.is_dir() else path, generator.config.family)
            return generator if found is None else generator._with_profile(CompileProfile.load(found))
        except BaseException:
            generator.close()
            raise

    # ---------------------------------------------------------------------------------------------- profiles

    def with_compile_profiles(self, prefill: ProfileLike, decode: ProfileLike) -> Self:
        """Compiles with the prefill of one profile and the decode of another; the history is forgotten.

        Args:
            prefill, decode: each as `CompileProfile.load` takes it.

        Raises:
            ProfileError: the two differ in what both phases share, or one is for another family.
        """
        return self._with_profile(CompileProfile.of_phases(prefill, decode))

    def _with_profile(self, profile: CompileProfile) -> Self:
        with self._exclusive("with_compile_profiles"):
            options = {**self._options, "profile": profile}
            old, new = self._engine, _open(self._engine.weights.loader.path, options)
            new.modes = replace(old.modes, ranges=new.modes.ranges)
            for phase, table in old.tables.items():
                new.tables[phase].limit(table.capacity)
            self._engine, self._options = new, options
            old.close()
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

        Raises:
            ArgumentError: `max_seq` is no whole number above 0.
        """
        return self.with_dynamic_prefill_cache(_INPUTS).with_decode_cache(max_seq)

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


def _open(source: Any, options: Mapping[str, Any]) -> Engine:
    from rlx.runners.engine import Engine
    from rlx.weights.loader import open_weights

    options = {"load": False, **options}
    device(options.pop("device", None))
    config = options.pop("config", None)
    if config is not None and isinstance(source, str | PathLike):
        source = open_weights(source, config=config)
    return Engine.open(source, **options)
