"""A token generator: a token history with selectable compile profiles and cache modes.

Runners stage, beside `model.py`: the calls of RLX's GemmaGenerator. RLX has it for Gemma only; here it supports every
family. A call is a task of an engine loop, with the pieces that the session of a model is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rlx import env
from rlx.arguments import bound, check_arguments, whole
from rlx.closing import Closing, on_error
from rlx.engine.engine import Engine
from rlx.engine.loop.handle import OnToken, says_stop
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.loop.room import KeptSequence
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import open_with, profile_beside
from rlx.engine.programs.programs import past_buckets
from rlx.engine.request import Context, Logits, PromptLike, check_ids, checked_count, checked_prompt, too_long
from rlx.errors import ArgumentError, BusyError, PromptError, WeightError
from rlx.ir.stored import dequantize
from rlx.models import ARCHITECTURES
from rlx.passes.options import MAX_PAST
from rlx.profile import CompileProfile, ProfileLike
from rlx.profile.keys import MAX_PROGRAMS
from rlx.profile.option import options_of
from rlx.prompt import TokenIds
from rlx.runners.auto import named_architecture
from rlx.runners.base import GREEDY
from rlx.runners.session import Session, embedded
from rlx.sampling import SampleOpts, Sampler

if TYPE_CHECKING:
    from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
    from rlx.models.config import ModelConfig
    from rlx.weights import ModelWeights
    from rlx.weights.loader import WeightLoader

_INPUTS = 3  # kinds of prompt input: tokens, embeddings, embeddings with a bias


EMBEDDINGS = "token_embd.weight"


class WeightsCache(Mapping[str, npt.NDArray[np.float32]]):
    """Canonical name (that of GGUF, such as `blk.0.attn_q.weight`) -> values, f32 of the tensor's shape.

    Nothing is cached: every access reads the file and returns a new array.

    Args:
        weights, config: of an open model.
        mtp: whether the tensors of the MTP head are included.
    """

    def __init__(self, weights: ModelWeights, config: ModelConfig, *, mtp: bool = False) -> None:
        self._weights, self._config = weights, config
        self._names = [name for name in weights.names if mtp or not self._predicts(name)]

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        """The values that the model computes with; files store some norms and decay rates in another form.

        Raises:
            KeyError: there is no such tensor.
            UnsupportedModelError: its type cannot be converted to numbers.
        """
        if name not in self:
            raise KeyError(name)
        info = self._weights.info(name)
        values = dequantize(self._weights.raw(name), info.dtype, tuple(info.shape))
        self._weights.release(name)
        return self._config.value(name, values)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def embed(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """The input of the first layer for tokens, f32 [len(ids), hidden]. Reads only their rows.

        Raises:
            WeightError: the file has no table of embeddings.
        """
        info = self._weights.info(EMBEDDINGS)
        rows, width = info.shape
        if max(ids, default=0) >= rows:
            raise WeightError(f"token id {max(ids)} is out of range: there are {rows} embeddings", where=EMBEDDINGS)
        raw = self._weights.raw(EMBEDDINGS).reshape(rows, -1)[ids]
        values = dequantize(raw.reshape(-1), info.dtype, (len(ids), width))
        return values * np.float32(self._config.embedding_scale)

    def _predicts(self, name: str) -> bool:
        """Whether a tensor belongs to the MTP head: a block after the layers, or the tensors that connect it."""
        block = name.split(".")[1] if name.startswith("blk.") else ""
        return ".nextn." in name or (block.isdigit() and int(block) >= self._config.layers)


class TokenHistory(Closing):
    """The tokens so far, and methods that append to them. Calls are tasks of a loop: threads wait for one another.

    Args:
        engine: a model; closed with the history.

    Attributes:
        max_seq: how many tokens the context holds.
    """

    def __init__(self, engine: Engine) -> None:
        self._closed = False
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        """Begins an empty history on an engine."""
        self._engine, self._loop = engine, EngineLoop(engine)
        self.max_seq = engine.max_seq
        kept = KeptSequence(self._loop.release)  # a prefix of the history
        self._session = Session(engine, self._loop, kept, shared=False)
        self._start([])

    # ---------------------------------------------------------------------------------------------- in tasks

    def _start(self, tokens: list[int], embeddings: PromptEmbeddings | None = None) -> None:
        """Replaces the history by tokens, which may begin with prompt embeddings."""
        self._tokens, self._embeddings = tokens, embeddings
        self._sampler: Sampler | None = None
        self._empty_caches()

    def _prefilled(self, context: Context) -> Generator[None, None, None]:
        """Replaces the history by a prompt."""
        self._start(context.ids, (yield from embedded(context)))

    def _empty_caches(self) -> None:
        """Forgets what was computed, and keeps the history."""
        self._logits: Logits | None = None  # after the whole history, if the caches hold all of it
        if (old := self._session.kept.take()) is not None:
            old.discard()

    def _stepped(self, opts: SampleOpts) -> Generator[None, None, int]:
        """Chooses a token and appends it."""
        logits = self._logits if self._logits is not None else (yield from self._computed())
        if self._sampler is None or self._sampler.opts != opts:
            self._sampler = Sampler(opts, self._tokens)
        (chosen,) = self._engine.choose([logits], [self._sampler.choice(len(logits))])
        token = self._sampler.advance(chosen, logits)
        self._tokens.append(token)
        self._logits = None
        return token

    def _last_logits(self) -> Generator[None, None, Logits]:
        """Computes the history; the logits after it, float32[vocab_size]."""
        self._logits = yield from self._computed()
        self._sampler = None  # it has not seen all tokens of the history
        return self._logits.copy()

    def _computed(self) -> Generator[None, None, Logits]:
        """Computes the history; the logits after it. The caches then hold all of it."""
        tokens, past = self._tokens, self._session.kept.length
        if not tokens:
            raise PromptError("there is no history", where="step", hint="call prefill with a prompt first")
        if len(tokens) > self._engine.max_seq:
            raise too_long(Context(tokens), self._engine.max_seq, "history")
        if past:
            return (yield from self._session.extend(tokens[past:]))
        return (yield from self._session.begin(tokens, self._embeddings, f"position {len(tokens) - 1}"))

    # ---------------------------------------------------------------------------------------------- the history

    def prefill(self, ids: PromptLike) -> None:
        """Replaces the history by a prompt. The next step computes it.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
        """
        context = self._checked(ids)
        self._checked_loop.call(lambda: self._prefilled(context))

    @property
    def tokens(self) -> list[int]:
        """The history, prompt and generated tokens; a copy."""
        return list(self._tokens)

    @property
    def past_seq(self) -> int:
        """Number of tokens in the caches: all but the last after a step, all after `*_get_logits`."""
        return self._session.kept.length

    def _checked(self, prompt: PromptLike) -> Context:
        engine, config, model = self._engine, self.config, f"{self.config.family} model"
        return checked_prompt(prompt, engine.images, config.vocab_size, engine.max_seq, "prompt", model)

    # ---------------------------------------------------------------------------------------------- one token

    def step(self, opts: SampleOpts = GREEDY) -> int:
        """Recomputes the whole history, chooses a token and appends it: slow, for comparison with `step_cached`.

        Equal options in consecutive steps continue one random number sequence; changed options restart from their seed.

        Raises:
            PromptError: there is no history, or the context is full.
            NumericalError: a logit is NaN or infinite.
        """

        def work() -> Generator[None, None, int]:
            self._empty_caches()
            return (yield from self._stepped(opts))

        return self._checked_loop.call(work)

    def step_cached(self, opts: SampleOpts = GREEDY) -> int:
        """As `step`, but computes only tokens that are not cached: the prompt at first, then one token.

        Afterwards `past_seq == len(tokens) - 1`: the new token is the input of the next step.
        """
        return self._checked_loop.call(lambda: self._stepped(opts))

    # ---------------------------------------------------------------------------------------------- several tokens

    def generate(
        self, n: int, opts: SampleOpts = GREEDY, *, on_token: OnToken | None = None, stop_ids: Set[int] = frozenset()
    ) -> list[int]:
        """`n` tokens by `step`; fewer if one is in `stop_ids`, `on_token` returns False, or the context is full.

        Raises:
            ArgumentError: `n` is not a whole number of at least 0.
            PromptError, NumericalError: as `step`; tokens generated before stay in the history.
        """
        return self._generate(self.step, n, opts, on_token, stop_ids)

    def generate_cached(
        self, n: int, opts: SampleOpts = GREEDY, *, on_token: OnToken | None = None, stop_ids: Set[int] = frozenset()
    ) -> list[int]:
        """As `generate`, by `step_cached`."""
        return self._generate(self.step_cached, n, opts, on_token, stop_ids)

    def _generate(
        self,
        step: Callable[[SampleOpts], int],
        n: int,
        opts: SampleOpts,
        on_token: OnToken | None,
        stop_ids: Set[int],
    ) -> list[int]:
        room, tokens = self._engine.max_seq + 1 - len(self._tokens), list[int]()
        most, is_over = min(checked_count("n", n) or 0, room), False
        while not is_over and len(tokens) < most:
            tokens.append(step(opts))
            is_over = says_stop(on_token, tokens[-1]) or tokens[-1] in stop_ids
        return tokens

    # ---------------------------------------------------------------------------------------------- logits

    def prefill_get_last_logits(self, ids: PromptLike) -> Logits:
        """Replaces the history by `ids` and computes it, without choosing a token. Then `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError, NumericalError: as `prefill` and `step`.
        """
        context = self._checked(ids)

        def work() -> Generator[None, None, Logits]:
            yield from self._prefilled(context)
            return (yield from self._last_logits())

        return self._checked_loop.call(work)

    def decode_get_logits(self, token: int) -> Logits:
        """Appends a token that the caller chose and computes it. Then `past_seq == len(tokens)`.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no history, the context is full, or `token` is not a valid token id.
            NumericalError: a logit is NaN or infinite; the history is then unchanged.
        """
        checked = check_ids([token], self.config.vocab_size, "token")

        def work() -> Generator[None, None, Logits]:
            if not (before := len(self._tokens)):
                raise PromptError("there is no history", where="decode_get_logits", hint="call prefill first")
            self._tokens += checked
            try:
                return (yield from self._last_logits())
            except BaseException:
                del self._tokens[before:]
                raise

        return self._checked_loop.call(work)

    # ---------------------------------------------------------------------------------------------- the model

    @property
    def config(self) -> ModelConfig:
        """Sizes and switches of the model."""
        return self._engine.config

    def stats(self) -> dict[str, Any]:
        """Sizes and counters of the engine; `programs` has the counters of the program tables by phase."""
        return self._checked_loop.call(self._engine.stats)

    def close(self) -> None:
        """Releases memory and threads. Can be called more than once."""
        self._loop.close()
        if not self._closed:
            self._closed = True
            self._engine.close()

    @property
    def _checked_loop(self) -> EngineLoop:
        """The loop; `BusyError` if the generator was closed."""
        if self._closed:
            raise BusyError("the generator was closed", where="generator", hint="open the model again")
        return self._loop

    def __repr__(self) -> str:
        config = self.config
        return f"<{type(self).__name__}: {config.family}, {len(self._tokens)} tokens, context {self.max_seq}>"


class TokenGenerator(TokenHistory):
    """Generates tokens step by step. Make one with `from_path`; it supports every family.

        with TokenGenerator.from_path("model.gguf", max_seq=512) as generator:
            generator.prefill([1, 2, 3])
            print(generator.generate_cached(8))

    The `with_` methods choose compile profiles and cache modes (docs/caches.md) and return the generator itself. The
    generated tokens are the same in all modes.
    """

    def __init__(self, loader: WeightLoader, options: EngineOptions, include_mtp: bool = False) -> None:
        self._loader, self._options, self._mtp = loader, options, include_mtp
        super().__init__(Engine.of(loader, options))

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
            _, _, arch = named_architecture(found["loader"])
            found["profile"] = None if arch is None else profile_beside(path, ARCHITECTURES[arch].runner)
        return cls._opened("from_loader_at", found.pop("loader"), found)

    @classmethod
    def _opened(cls, where: str, source: Any, options: dict[str, Any], include_mtp: bool = False) -> Self:
        config = options.pop("config", None)
        check_arguments(where, options, ("config", *options_of(EngineOptions)))
        chosen = EngineOptions(**{"load": False, **options})
        loader = open_with(source, config)
        with on_error(loader.close):
            return cls(loader, chosen, include_mtp)

    # ---------------------------------------------------------------------------------------------- profiles

    def with_compile_profiles(self, prefill: ProfileLike, decode: ProfileLike) -> Self:
        """Compiles prefill with one profile and decode with another; clears the history.

        Args:
            prefill, decode: each as `CompileProfile.load` takes it.

        Raises:
            ProfileError: the profiles differ in options that both phases share, or one is for another family.
        """
        profile = CompileProfile.of_phases(prefill, decode)
        self.sync_device()
        options = replace(self._options, profile=profile)
        old, new = self._engine, Engine.of(self._loader, options)
        new.model_runner.bucketing = replace(old.bucketing, ranges=new.bucketing.ranges)
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
            self._engine.model_runner.bucketing = replace(self._engine.bucketing, **modes)
            self._engine.tables[phase].limit(capacity)

        self._checked_loop.call(change)
        return self

    # ---------------------------------------------------------------------------------------------- weights

    @property
    def weights_cache(self) -> WeightsCache:
        """The model's tensors as float32 arrays, read from the file at each access."""
        return WeightsCache(self._engine.weights, self.config, mtp=self._mtp)

    def embed(self, ids: TokenIds) -> npt.NDArray[np.float32]:
        """The embeddings of tokens, float32[len(ids), hidden], as input for `prefill_from_embeds`.

        Raises:
            PromptError: `ids` is empty or holds an invalid token id.
        """
        return self.weights_cache.embed(check_ids(ids, self.config.vocab_size, "ids"))

    # ---------------------------------------------------------------------------------------------- RLX's further names

    def prefill_from_embeds(self, ids: PromptLike, embeds: Any, attn_bias: Any = None) -> None:
        """As `prefill`, with prompt embeddings instead of the tokens' own embeddings.

        Args:
            ids: the tokens for the history; layers with their own embedding tables (Gemma 3n and 4) look them up there.
            embeds: numbers [len(ids), hidden], or flat in that order: the input of the first layer, with the model's
                embedding scale applied, as `embed` returns it.
            attn_bias: numbers [len(ids), len(ids)] or [heads, len(ids), len(ids)], or flat in that order; added to the
                scaled scores of every layer and replaces the causal mask: 0 opens a key, -inf masks it, including later
                keys. Sliding windows still apply. Tokens after the prompt are causal.

        Raises:
            PromptError: as `prefill`; a wrong shape; NaN; an infinite number except -inf in the bias; a row of the bias
                that masks every key; later keys opened in a prompt that is longer than one chunk.
        """
        context = self._checked(ids)
        if context.images is not None:
            hint = "give the rows of images among `embeds`, and token ids"
            raise ArgumentError("a prompt with images takes no embeds", where="embeds", hint=hint)
        embeddings = self._engine.prompt_embeddings(len(context), embeds, attn_bias)
        self._checked_loop.call(lambda: self._start(context.ids, embeddings))

    def generate_from_embeds(
        self,
        ids: PromptLike,
        embeds: Any,
        n: int,
        opts: SampleOpts = GREEDY,
        *,
        attn_bias: Any = None,
        on_token: OnToken | None = None,
        stop_ids: Set[int] = frozenset(),
    ) -> list[int]:
        """`prefill_from_embeds`, then `generate_cached`."""
        self.prefill_from_embeds(ids, embeds, attn_bias)
        return self.generate_cached(n, opts, on_token=on_token, stop_ids=stop_ids)

    def sync_device(self) -> None:
        """Waits for pending work of the device. Returns at once: CPU calls are synchronous."""
        self._checked_loop.call(lambda: None)

    def generate_cached_with(self, n: int, opts: SampleOpts, on_token: OnToken) -> list[int]:
        """As `generate_cached`; `on_token` is called with every new token, and False from it ends the generation."""
        return self.generate_cached(n, opts, on_token=on_token)

    def generate_from_embeds_with(
        self, ids: PromptLike, embeds: Any, n: int, opts: SampleOpts, on_token: OnToken
    ) -> list[int]:
        """As `generate_from_embeds`, with a callback."""
        return self.generate_from_embeds(ids, embeds, n, opts, on_token=on_token)

    def generate_from_embeds_with_bias(
        self, ids: PromptLike, embeds: Any, attn_bias: Any, n: int, opts: SampleOpts
    ) -> list[int]:
        """As `generate_from_embeds`, with an attention bias; None is the causal mask."""
        return self.generate_from_embeds(ids, embeds, n, opts, attn_bias=attn_bias)

    def generate_from_embeds_with_bias_and_callback(
        self, ids: PromptLike, embeds: Any, attn_bias: Any, n: int, opts: SampleOpts, on_token: OnToken
    ) -> list[int]:
        """As `generate_from_embeds`, with a bias and a callback."""
        return self.generate_from_embeds(ids, embeds, n, opts, attn_bias=attn_bias, on_token=on_token)


GemmaGenerator = TokenGenerator
"""RLX's name for it. It supports every family."""
