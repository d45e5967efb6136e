"""The model as users have it: it has an engine, the loop that computes its requests, and a session.

Runners stage, the API over the engine. `text.py`, `media.py` and `session.py` are what its methods call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np

from rlx import arguments, env, runners
from rlx import engine as engines
from rlx.closing import on_error
from rlx.engine.loop.handle import Generation, OnToken, Step, Stream
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.loop.room import KeptSequence
from rlx.engine.opening.options import SLOTS, STALL_MS, RunnerOptions, method_takes_options
from rlx.engine.opening.setup import open_with
from rlx.engine.request import Context, Logits, PromptLike, check_ids, checked_count, checked_prompt
from rlx.errors import BusyError, TokenizerError, UnsupportedModelError, named_refusals
from rlx.notebook import Stats, card
from rlx.prompt import Prompt, read_images
from rlx.runners import session
from rlx.runners.base import GREEDY, LmRunner, adapted, checked_speculation
from rlx.runners.session import Scores
from rlx.sampling import SampleOpts
from rlx.sampling.choice import log_probs
from rlx.sampling.options import Sample, resolved

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.engine.kv.snapshot import Snapshot
    from rlx.engine.opening.options import ModelSource
    from rlx.engine.programs.ready import ReadyPrograms
    from rlx.models.config import ModelConfig
    from rlx.runners.builder import RunnerBuilder
    from rlx.runners.text import Answer, Messages
    from rlx.text.tokenizer import Tokenizer
    from rlx.weights import ModelWeights


class Model(LmRunner):
    """A model over an engine: an `LmRunner` that caches what it has computed, with text, images and a session.

    Any number of threads, asyncio tasks and callbacks may use it at the same time. A closed runner always raises
    `BusyError`.

    Args:
        engine: a loaded model; closed with the runner.
        sample: default sampling options of calls that give none; "recommended" for those in the model's files; greedy
            by default.
        on_token: default callback of calls that give none.
        streams: whether `generate` calls it for each token as it is generated. False calls it after the last token; it
            then cannot stop the generation.
        speculative: default speculative decoding of requests: `prompt-lookup`, `mtp`, `model:PATH` or None.
        slots: maximum number of requests that are computed at the same time; others wait.
        stall_ms: how long a step of prompt tokens may keep those waiting whose answers are being generated, in
            milliseconds.

    Raises:
        ArgumentError: `speculative` is unknown, or `engine` is a path, which `from_path` opens.
        UnsupportedModelError: the engine holds a model of another family.
    """

    FAMILY: ClassVar[str | None] = None
    """The family that a subclass supports; None for any."""
    family: str = ""
    vocab_size: int = 0
    device: str = ""
    max_seq: int = 0
    _engine: Engine
    _kept: KeptSequence

    def __init__(
        self,
        engine: Engine,
        *,
        sample: Sample = None,
        on_token: OnToken | None = None,
        streams: bool = True,
        speculative: str | None = None,
        slots: int = SLOTS,
        stall_ms: float = STALL_MS,
    ) -> None:
        arguments.no_path(type(self), engine)
        config = engine.config
        if self.FAMILY not in (None, config.family):
            raise UnsupportedModelError(
                f"{type(self).__name__} runs the family '{self.FAMILY}', this model is of '{config.family}'",
                hint="rlx.auto_runner picks the right runner",
            )
        self._engine, self._closed, self._cached = engine, False, True
        self.family, self.vocab_size, self.max_seq = config.family, config.vocab_size, engine.max_seq
        self.device = engine.device
        self._on_token, self._streams = on_token, streams
        self.default_sample = GREEDY if sample is None else resolved(sample, engine.recommended, GREEDY)
        self.adapters = () if engine.adapters is None else tuple(engine.adapters.numbers)
        self._speculative = checked_speculation(speculative)
        if speculative is not None and speculative != "prompt-lookup":
            engine.drafting(speculative)
        self._images = engine.images
        if self._images is not None:
            self._images.seconds = stall_ms / 1000
        self._loop = EngineLoop(engine, slots=slots, stall_ms=stall_ms, kept=engine.kept)
        self._kept = KeptSequence(self._loop.release)
        own = weakref.ref(self)  # the engine must not keep its runner alive

        def loop() -> EngineLoop | None:
            return None if (runner := own()) is None else runner._loop

        if engine.prefix_writer is not None:
            engine.prefix_writer.start(loop)
        engine.ahead.is_busy = lambda: (now := loop()) is not None and not now.is_idle
        engine.ahead.is_over = lambda: (now := loop()) is None or now.is_closed

    @classmethod
    def builder(cls) -> RunnerBuilder[Self]:
        """A builder, which sets options one at a time: `builder().weights(path).max_seq(8192).build()`."""
        return runners.builder.RunnerBuilder(cls.__name__, cls.from_path)

    @classmethod
    @method_takes_options(RunnerOptions)
    def from_path(cls, path: ModelSource, options: RunnerOptions) -> Self:
        """Opens a GGUF file, a safetensors file, a model directory or an open `WeightLoader`, which the runner then
        owns.

        Args:
            path: the model.
            options: the fields of `RunnerOptions`.

        Raises:
            UnsupportedModelError: the model is of another family, or rlx does not support its architecture.
            ModelFileError: the file cannot be used.
            ArgumentError, ProfileError, TargetError: an option is out of its range.
        """
        engine = open_engine(path if options.config is None else open_with(path, options.config), options)
        with on_error(engine.close):
            return cls(engine, **options.runner())

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        """Sizes and switches of the model."""
        return self._engine.config

    @property
    def weights(self) -> ModelWeights:
        """The open file of the model."""
        return self._engine.weights

    @property
    def slots(self) -> int:
        """How many requests are computed at once."""
        return self._loop.scheduler.slots

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            TokenizerError: the file has none, or it cannot be built.
            BusyError: the runner was closed before the first use.
        """
        self._check_open("tokenizer")
        return self._engine.tokenizer

    @cached_property
    def stop_ids(self) -> Set[int]:
        """The tokenizer's `eog_ids`; `TokenizerError` if the file has no usable tokenizer."""
        try:
            return self.tokenizer.eog_ids
        except TokenizerError as error:
            hint = "stop ids come from the tokenizer: use generate(..., stop_at_eog=False)"
            raise TokenizerError(error.what, where=error.where, hint=hint) from error

    @property
    def recommended_sample(self) -> SampleOpts | None:
        return self._engine.recommended

    # -- text ---------------------------------------------------------------------------------------------------------

    def chat(self, messages: Messages, max_tokens: int | None = None, **options: Any) -> Answer:
        """The model's answer to a conversation.

            messages = [{"role": "user", "content": "What is 27 + 45?"}]
            answer = runner.chat(messages, max_tokens=64)
            messages += [answer.message, {"role": "user", "content": "And in words?"}]

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a string: one user message. A content is a string or
                a list of parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`; docs/images.md
                has the forms of an image.
            max_tokens: maximum length of the answer, reasoning included; by default what the context has room for.
            tools: JSON schemas of functions that the model may call. `Answer.tool_calls` are its calls; docs/tools.md
                shows the whole way.
            tool_choice: "auto" lets the model decide, "required" makes it call a tool, "none" forbids it;
                `{"type": "function", "function": {"name": ...}}` makes it call that one.
            parallel_tool_calls: whether an answer may have several calls.
            thinking: whether the model reasons before it answers, if it supports both; None takes the template's
                default.
            variables: further variables of the chat template.
            sample: a `SampleOpts`, or "recommended"; None as for `generate`. Single options of `SampleOpts`, such as
                `temperature` or `seed`, can be given as keyword arguments; they override `sample`.
            stop, min_tokens, speculative, top_logprobs: as for `generate`.
            grammar, json_schema: what the text must look like, as for `generate`. It begins after the reasoning.
                `Answer.parsed` is the value of the text.

        Raises:
            ChatTemplateError: the model has no chat template, or the template rejects the messages.
            ToolError: a tool, a call in a message or `tool_choice` is invalid, or a schema cannot be enforced.
            MultimodalError, ImageError: as `chat_ids`.
            UnknownArgumentError: there is no such option.
            SamplingError: an option is out of its range, or has no effect because decoding is greedy.
            GrammarError, PromptError, ArgumentError, NumericalError, BusyError: as `generate`.
        """
        call = runners.text.chat_call(self, "chat", messages, options)
        return runners.text.answered(self, call, max_tokens, options)

    def chat_stream(self, messages: Messages, max_tokens: int | None = None, **options: Any) -> Stream:
        """`chat` as a stream: an iterator of `Step` with `text`, `thinking` and `tool_calls`.

        for step in runner.chat_stream("Tell me a story.", max_tokens=200):
            print(step.text, end="", flush=True)
        """
        call = runners.text.chat_call(self, "chat_stream", messages, options)
        return runners.text.answer_stream(self, call, max_tokens, options)

    def complete(self, prompt: str, max_tokens: int | None = None, **options: Any) -> Answer:
        """The model's continuation of a text, without a chat template.

            print(runner.complete("Once upon a time", max_tokens=20).text)

        Args:
            prompt: the text; control tokens in it are ordinary text.
            max_tokens: maximum number of tokens; by default what the context has room for.
            options: `sample`, `stop`, `min_tokens`, `speculative`, `top_logprobs`, `grammar`, `json_schema` and
                sampling options, as for `chat`.

        Raises:
            TokenizerError: the model has no tokenizer, or `prompt` is not a string.
            GrammarError, PromptError, SamplingError, ArgumentError, NumericalError, BusyError: as `chat`.
        """
        return runners.text.answered(self, runners.text.text_call(self, "complete", prompt), max_tokens, options)

    def complete_stream(self, prompt: str, max_tokens: int | None = None, **options: Any) -> Stream:
        """`complete` as a stream: an iterator of `Step`."""
        return runners.text.answer_stream(
            self, runners.text.text_call(self, "complete_stream", prompt), max_tokens, options
        )

    def chat_ids(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        check: Callable[[str], None] | None = None,
        **variables: Any,
    ) -> list[int] | Prompt:
        """The token ids of a conversation, formatted with the model's chat template, up to the start of the answer.

        With images it is a `Prompt`, in which a placeholder stands for each image.

        Args:
            messages: as for `chat`; control tokens in a content are ordinary text.
            tools: JSON schemas of functions that the model may call.
            check: gets the formatted text before it is encoded, and may raise an error of its own, such as for a text
                that is far too long.
            variables: further variables of the template, such as `enable_thinking=False`.

        Raises:
            ChatTemplateError: the model has no chat template, or the template rejects the messages.
            MultimodalError: a message contains an image, and the model was opened without a vision tower; or a part
                that is neither text nor an image.
            ImageError: an image cannot be used.
        """
        return runners.text.chat_prompt(self, messages, tools, check, variables)

    def generate_packed(
        self, ids: PromptLike, n_new: int, on_token: OnToken | None = None, **options: Any
    ) -> Generation:
        """Alias of `generate`: RLX's name for it with packed weights. rlx always packs weights."""
        return self.generate(ids, n_new, on_token, **options)

    generate_stoppable = generate_packed
    """Alias of `generate`: RLX's name for it with a callback that may stop it. In rlx every callback may."""

    # -- images -------------------------------------------------------------------------------------------------------

    def generate_multimodal(
        self,
        prompt: str | PromptLike | Sequence[Mapping[str, Any]],
        images: Any,
        *arguments: Any,
        **options: Any,
    ) -> Generation:
        """`generate` for a prompt with images.

            answer = runner.generate_multimodal("What is this?", ["cat.png"], 50)
            print(answer.text)

        Args:
            prompt: a question, which is asked in the model's chat template behind the images. Or a formatted prompt, in
                which the model's own image token or `<__media__>` stands for each image and control tokens count as
                such: do not put a stranger's text into it. Or token ids with placeholders, see `Prompt`.
            images: a list of images, see `Prompt`; or one. A question may also be about a video: the part
                `{"type": "video", "video": [frame, ...], "fps": 2}` of messages.
            arguments: `n_new` and `on_token`, as for `generate`. Or in RLX's order, where `images` are the bytes of one
                image in rows of red, green and blue: width, height, tokenizer (None), `n_new` and `on_token`.
            options: further arguments of `generate`, or those of RLX by name.

        Raises:
            MultimodalError: the model was opened without a vision tower, or the number of images is not that of their
                places in the prompt.
            ImageError: an image cannot be used.
            PromptError, ArgumentError, NumericalError, BusyError: as `generate`.
        """
        return runners.media.generated(self, prompt, images, arguments, options)

    def with_images(self, prompt: Any, images: Any) -> Prompt | list[int]:
        """The prompt that `generate_multimodal` makes of a prompt and its images.

        Raises:
            MultimodalError, ImageError, ArgumentError: as there.
        """
        return runners.media.with_images(self, prompt, images)

    def image_features(self, image: Any) -> Logits:
        """The rows that stand for an image in the text model, from the vision tower. Stateless.

        Args:
            image: as for `Prompt`.

        Returns:
            float32[rows, hidden], in the order of the rows in a prompt.

        Raises:
            MultimodalError: the model was opened without a vision tower.
            ImageError: the image cannot be used.
            NumericalError: a value is NaN or infinite.
        """
        (read,) = read_images([image])
        return runners.media.features(self, read)

    def preprocess_image(self, image: Any) -> dict[str, Any]:
        """An image as the vision tower takes it.

        Args:
            image: as for `Prompt`.

        Returns:
            `pixel_values`: float32, the values and the shape of the model's reference processor; `grid`: the rows and
            columns of the tokens that the image becomes.

        Raises:
            MultimodalError: the model was opened without a vision tower.
            ImageError: the image cannot be used.
        """
        return runners.media.preprocessed(self, image)

    def count_tokens(self, prompt: PromptLike) -> int:
        """How many tokens a prompt has, the rows of its images included. It may be more than the context holds.

        Raises:
            PromptError, MultimodalError, ImageError: the prompt is invalid, as for `generate`.
        """
        return len(checked_prompt(prompt, self._images, self.vocab_size, None, "prompt", f"{self.family} model"))

    # -- logits -------------------------------------------------------------------------------------------------------

    def predict_logits(self, ids: PromptLike, all_positions: bool = False, *, adapter: str | None = None) -> Logits:
        return session.predicted(
            self._engine, self._loop, adapted(self, ids, adapter), arguments.flag("all_positions", all_positions)
        )

    def _scores(self, context: Context) -> Logits:
        return np.concatenate(session.measured(self._engine, self._loop, context, log_probs))

    def score_steps(self, ids: PromptLike, top_logprobs: int = 0, *, adapter: str | None = None) -> list[Step]:
        """`score` as steps, with the likeliest tokens at each position. Stateless.

        Args:
            top_logprobs: how many of the likeliest tokens each step has.
            adapter: as for `generate`.

        Returns:
            A step for each id but the first: `token`, `logprob`, `text` and `top_logprobs`.

        Raises:
            PromptError, NumericalError: as `score`.
            ArgumentError: `top_logprobs` is negative or no whole number, or there is no such adapter.
            TokenizerError: the model has no tokenizer.
        """
        count = checked_count("top_logprobs", top_logprobs) or 0
        context, steps = adapted(self, ids, adapter), partial(session.steps_of, self.tokenizer, count)
        self._check_open("score_steps")
        if len(context) < 2:
            return []
        return [step for piece in session.measured(self._engine, self._loop, context, steps) for step in piece]

    def embed(
        self,
        ids: PromptLike | str | Sequence[str],
        pooling: str = "mean",
        normalize: bool = True,
        *,
        adapter: str | None = None,
    ) -> Logits:
        """A text as one vector: the hidden states after the final norm, pooled. Stateless.

        Args:
            ids: of one text; or a text; or several.
            pooling: `mean` over all positions, or `last`, the only position that has seen the whole text.
            normalize: scale to length 1, so that the dot product of two vectors is their cosine similarity.
            adapter: as for `generate`.

        Returns:
            float32[hidden], of several texts float32[n, hidden].

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id.
            ArgumentError: `pooling` is unknown, or there is no such adapter.
            NumericalError: a hidden state is NaN or infinite.
        """
        session.checked_pooling(pooling)
        normalize = arguments.flag("normalize", normalize)
        self._check_open("embed")
        if (texts := runners.text.several(ids)) is not None:
            found = [adapted(self, self.tokenizer.encode(each), adapter, f"text {i}") for i, each in enumerate(texts)]
            return np.stack([session.embedding(self._engine, self._loop, each, pooling, normalize) for each in found])
        ids = self.tokenizer.encode(ids) if isinstance(ids, str) else cast(PromptLike, ids)
        return session.embedding(self._engine, self._loop, adapted(self, ids, adapter), pooling, normalize)

    def rerank(
        self, query: str, documents: Sequence[str], *, truncate: bool = False, adapter: str | None = None
    ) -> Scores:
        """How well each document answers a query: the probability that the model says yes. Stateless.

        It is meant for Qwen3-Reranker. Encoders that score pairs have an `EncoderRunner`.

        Args:
            truncate: cut documents that are too long; a warning says how many.
            adapter: as for `generate`.

        Returns:
            A list in the order of the documents; its `tokens` counts what the model has read.

        Raises:
            UnsupportedModelError: the model is of another architecture.
            PromptError: a pair is longer than the context.
        """
        self._check_open("rerank")
        if self.config.arch != "qwen3":
            hint = "use a cross-encoder, or Qwen3-Reranker"
            raise UnsupportedModelError(f"models of {self.config.arch} rank no documents", where="rerank", hint=hint)
        most = self.max_seq if arguments.flag("truncate", truncate) else None
        yes, no = runners.rerank.answer_ids(self.tokenizer)
        pairs = runners.rerank.checked_documents(query, documents)
        found = runners.rerank.rerank_prompts(self.tokenizer, runners.rerank.QWEN3, *pairs, most)
        prompts = [adapted(self, ids, adapter, f"document {i}") for i, ids in enumerate(found)]
        gaps = session.measured_ends(self._engine, self._loop, prompts, lambda row: float(row[no]) - float(row[yes]))
        return Scores((float(1 / (1 + np.exp(gap))) for gap in gaps), sum(map(len, prompts)))

    # -- the session --------------------------------------------------------------------------------------------------

    def prefill_logits(self, ids: PromptLike) -> Logits:
        """Starts a session with `ids`. What the cache knows of their beginning is not recomputed.

        Returns:
            float32[vocab_size], the logits after the last of `ids`.

        Raises:
            PromptError: `ids` is empty, longer than the context, or holds an invalid token id; the previous session is
                unchanged.
            NumericalError: a logit is NaN or infinite.
        """
        return self._session.prefill(self.checked_prompt(ids))

    def decode_logits(self, token: int) -> Logits:
        """Continues the session by one token.

        Returns:
            float32[vocab_size], the logits after it.

        Raises:
            PromptError: there is no session, the context is full, or `token` is not a valid token id.
            NumericalError: a logit is NaN or infinite.
        """
        (checked,) = check_ids([token], self.vocab_size, "token")
        return self._session.decode(checked)

    @property
    def past_seq(self) -> int:
        """Number of tokens in the session."""
        return self._kept.length

    def reset(self) -> None:
        """Ends the session."""
        self._check_open("reset")
        self._session.reset()

    def snapshot(self) -> Snapshot:
        """A copy of the session: its token ids, the used part of every cache, and the recurrent states.

        It is immutable, and `Snapshot.save` writes it to a file.
        """
        return self._session.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the session by a snapshot. The context may be longer or shorter than that of the snapshot's runner.

        Raises:
            SnapshotError: it is of another model, or of another KV cache type; the session is unchanged.
            PromptError: it holds more tokens than the context.
        """
        self._session.restore(snapshot)

    @cached_property
    def _session(self) -> session.Session:
        return session.Session(self._engine, self._loop, self._kept)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def disable_decode_compile_cache(self) -> None:
        """Makes `generate` recompute the whole context for every token: slow, for comparison with the cached path."""
        self._cached, self._speculative = False, None
        self._loop.use_engine(engines.token_engine.RecomputeEngine(partial(session.recomputed, self._engine)))

    # -- the engine ---------------------------------------------------------------------------------------------------

    def compile(
        self,
        on_program: Callable[[Any], None] | None = None,
        batch: int = 1,
        *,
        phase: str | None = None,
        rows: int | None = None,
    ) -> Sequence[Any]:
        """Compiles every program, or finds it in the cache.

        Args:
            on_program: called with each record when it is ready: `phase`, `bucket`, `kernels`, `object_bytes`,
                `seconds`, `cached`.
            batch: maximum number of prompts that `generate_batch` will compute at once.
            phase: "prefill", "decode", "greedy" or "batch": only the programs of this phase; "tower": only those of the
                vision tower.
            rows: only programs that accept this number of rows.

        Raises:
            ArgumentError: `batch` is below 1, or no program matches `phase` and `rows`.
            CompileError: a program cannot be compiled.
            CacheError: the cache is read-only and lacks a program.
        """
        self._check_open("compile")
        if on_program is not None:
            arguments.function("on_program", on_program)
        return self._engine.compile(on_program, batch, phase, rows)

    @property
    def programs(self) -> ReadyPrograms:
        """The programs compiled or loaded so far, each with `ir`, `source`, `llvm`, `asm` and `explain`.

        Example: `print(runner.programs["decode"].asm("linear"))`; `runner.compile()` makes the missing ones.

        Raises:
            BusyError: the runner was closed.
        """
        self._check_open("programs")
        return self._engine.ready

    def stats(self) -> Mapping[str, Any]:
        """Sizes and counters of the engine: bytes, threads, compile cache counters, and what was `compiled`.

        `reused_tokens` counts prompt tokens that were not computed because the cache knew them. `speculation` counts
        `steps` with drafts, and how many tokens were `drafted` and `accepted`. `requests` says how many wait (`queue`)
        and compute (`running`, at most `slots`), which those are (`active`), what was computed, and the gaps between
        two tokens of a request in seconds. With a vision tower `images` counts images that were encoded, and those
        that were found in the cache of features.
        """
        self._check_open("stats")
        requests = self._loop.stats()
        reused = requests.pop("reused_tokens") + self._session.reused
        speculation = asdict(self._speculated)
        images = {} if self._images is None else self._images.stats()
        own = {"reused_tokens": reused, "speculation": speculation, "requests": requests}
        return Stats({**self._engine.stats(), **images, **own})

    def _repr_html_(self) -> str:
        if self._closed:
            return card(f"{type(self).__name__}, closed")
        config, stats = self.config, self._engine.stats()
        rows: list[tuple[str, object]] = [("family", self.family), ("layers", config.layers), ("hidden", config.hidden)]
        rows += [("vocabulary", self.vocab_size), ("context", self.max_seq), ("device", self.device)]
        rows += [(name, stats[name]) for name in ("target", "threads", "kv_dtype") if name in stats]
        return card(type(self).__name__, [*rows, ("programs", ", ".join(p.name for p in self.programs) or "none yet")])

    def close(self) -> None:
        """Ends all requests, and releases memory and threads. Can be called more than once."""
        self._loop.close()
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        self._check_open("with")
        return self

    def _check_open(self, where: str) -> None:
        """`BusyError` if the runner was closed."""
        if self._closed:
            raise BusyError("the runner was closed", where=where, hint="open the model again")


@named_refusals()
def open_engine(path: ModelSource, options: RunnerOptions) -> Engine:
    """`Engine.open`."""
    if options.compile_ahead is None:
        options = replace(options, compile_ahead=env.compile_ahead())
    return engines.engine.Engine.open(path, **options.engine())
