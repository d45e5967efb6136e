"""A text encoder as users have it: texts as vectors, documents by how well they answer a query.

Runners stage, the API over `rlx.engine.encoder`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from rlx import runners
from rlx.arguments import did_you_mean, flag, no_path, several, whole
from rlx.arguments import text as checked_text
from rlx.closing import Closing, on_error
from rlx.engine.encoder import Encoder, Rows, Text
from rlx.engine.opening.options import RunnerOptions, method_takes_options
from rlx.engine.opening.setup import open_with, tokenizer_of
from rlx.engine.request import Context, PromptLike, checked_prompt
from rlx.errors import ArgumentError, BusyError, PromptError, UnsupportedModelError
from rlx.runners.base import adapter_number
from rlx.runners.session import Scores, of_unit_length
from rlx.text.rerank import checked_documents, rerank_prompts
from rlx.weights.sentence_modules import POOLINGS, SentenceModules

if TYPE_CHECKING:
    from rlx.engine.opening.options import ModelSource
    from rlx.models.encoder import EncoderConfig
    from rlx.text.tokenizer import Tokenizer
    from rlx.weights import ModelWeights

Progress = Callable[[str, int, int], None]


def as_encoder(runner: object) -> EncoderRunner | None:
    """A runner that `auto_runner` returned, if it is of an encoder."""
    return runner if isinstance(runner, EncoderRunner) else None


class EncoderRunner(Closing):
    """An encoder: `embed` makes vectors of texts, `rerank` compares documents with a query.

    Any number of threads may use it at the same time. What a server asks of a model, it answers as `Model` does.

    Args:
        encoder: closed with the runner.
        max_seq: tokens of the longest text; None for as many as the model has positions.

    Attributes:
        adapters: the names of the LoRA adapters that calls may choose.
    """

    slots, supports_multimodal, recommended_sample = 1, False, None

    def __init__(self, encoder: Encoder, max_seq: int | None = None) -> None:
        no_path(type(self), encoder)
        self._encoder, self._plan = encoder, encoder.plan
        self.adapters = () if self._plan.adapters is None else tuple(self._plan.adapters.numbers)
        self.max_seq = min(self._plan.config.context, max_seq or self._plan.config.context)
        self._closed = False

    @classmethod
    @method_takes_options(RunnerOptions)
    def from_path(cls, path: ModelSource, options: RunnerOptions) -> Self:
        """Opens a GGUF file, a safetensors file, a model directory or an open `WeightLoader`, which the runner then
        owns.

        Args:
            path: the model.
            options: the fields of `RunnerOptions`; those about caches and answers have no effect.

        Raises:
            ModelFileError: the file cannot be used.
            ArgumentError, ProfileError, TargetError: an option is out of its range.
        """
        loader = open_with(path, None)
        with on_error(loader.close):
            found = cls(Encoder(loader, options), options.max_seq)
        if options.compile_ahead:
            found._score(found._pairs("", [""], None)) if found.is_reranker else found.embed("", pooling="mean")
        return found

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EncoderConfig:
        """Sizes and switches of the model."""
        return self._plan.config

    @property
    def family(self) -> str:
        """The architecture."""
        return self._plan.config.arch

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self._plan.config.vocab_size

    @property
    def width(self) -> int:
        """Numbers of a vector, or logits of a pair."""
        head = self._plan.head
        return self._plan.config.hidden if head is None else int(str(head.outputs["y"].shape[-1]))

    @property
    def is_reranker(self) -> bool:
        """Whether the model scores pairs of texts instead of making vectors."""
        return self._plan.scores

    @property
    def prompts(self) -> dict[str, str]:
        """The texts that the model's files have to put before a text, by name."""
        return dict(self._plan.modules.prompts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return tokenizer_of(self._plan.weights.loader)

    @property
    def weights(self) -> ModelWeights:
        """The open file of the model."""
        return self._plan.weights

    @property
    def device(self) -> str:
        """The name of what it runs on."""
        return self._encoder.compiler.backend.name

    def stats(self) -> dict[str, Any]:
        """Sizes and counters, under the names that `Model.stats` has."""
        infos = self._plan.weights.loader.tensors.values()
        counted = {"slots": self.slots, "running": 0, "queue": 0, "active": [], "tokens": 0}
        return {
            "parameters": sum(prod(info.shape) for info in infos),
            "weights_bytes": self._encoder.nbytes,
            "target": self._encoder.compiler.target.level,
            "threads": self._encoder.threads,
            "precision": self._encoder.profile.precision,
            "kv_dtype": None,
            "deterministic": True,
            "requests": {**counted, "steps": self._encoder.steps, "prompt_tokens": self._encoder.tokens},
        }

    # -- vectors and scores -------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | Context | Iterable[str | Context],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        pooling: str | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
        adapter: str | None = None,
    ) -> Rows:
        """Texts as vectors, in the order given; texts of any lengths are computed together.

        Args:
            texts: one text, or several. Ids in a `Context` count as they are.
            prompt_name: the name of a text of `prompts` that is put before each; by default the model's, if it has one.
            prompt: the text itself.
            dimensions: how many of the first numbers of a vector it keeps (Matryoshka); None for all.
            normalize: scale what is kept to length 1, so that the dot product of two vectors is their cosine
                similarity.
            pooling: `mean`, `cls`, `last` or `max`, in place of what the files say.
            truncate: cut texts that are too long; a warning says how many. Otherwise such a text is an error.
            progress: called with ("embedding texts", texts that are done, all texts).
            adapter: the name of one of `adapters`; None for the model as it is.

        Returns:
            float32[n, width]; of one text float32[width].

        Raises:
            PromptError: a text has more tokens than the model has positions.
            ArgumentError: an argument is out of its range, or the files do not say how to pool.
            UnsupportedModelError: the model scores pairs.
        """
        self._check("embed")
        if self._plan.scores:
            hint = "give rerank(query, documents) the texts, or use an embedding model"
            raise UnsupportedModelError("the model scores pairs and makes no vectors", where="embed", hint=hint)
        modules = self._plan.modules
        chosen, before = _pooling(modules, pooling), _prompt(modules, prompt_name, prompt)
        kept = self.width if dimensions is None else whole("dimensions", dimensions, 1, self.width)
        single = isinstance(texts, str | Context)
        every = [texts] if single else several("texts", texts)
        ids = [self._text(each, before, i) for i, each in enumerate(every)]
        told, number = _told(progress, "embedding texts", len(ids)), adapter_number(self._plan.adapters, adapter)
        rows = self._encoder.pooled(self._cut(ids, flag("truncate", truncate)), chosen, told, number)
        found = self._encoder.through_head(rows).reshape(len(ids), self.width)[:, :kept]
        if flag("normalize", normalize):
            found = of_unit_length(found)
        return np.ascontiguousarray(found[0] if single else found)

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        truncate: bool = False,
        progress: Progress | None = None,
        adapter: str | None = None,
    ) -> Scores:
        """How well each document answers a query.

        Args:
            truncate, progress, adapter: as for `embed`; it cuts documents, not the query.

        Returns:
            A list with, for each document in the order given, the logit of the classifier. For decoders that answer yes
            or no, the probability of yes. Its `tokens` counts what the model has read.

        Raises:
            PromptError: a pair has more tokens than the model has positions.
            UnsupportedModelError: the model makes vectors, or has several classes.
        """
        self._check("rerank")
        if not self._plan.scores:
            hint = "use the dot products of embed(query) and embed(documents), or a reranker (cross-encoder)"
            raise UnsupportedModelError("the model makes vectors and scores no pairs", where="rerank", hint=hint)
        yes_no = self._plan.labels == ("yes", "no") or self._plan.template is not None
        if self.width != 1 and not (yes_no and self.width == 2):
            what = f"the classifier has {self.width} classes, and a reranker has one"
            raise UnsupportedModelError(what, where="rerank")
        asked, texts = checked_documents(query, documents)
        most = self.max_seq if flag("truncate", truncate) else None
        pairs = self._cut(self._pairs(asked, texts, most), truncate, "document")
        return Scores(self._score(pairs, progress, adapter_number(self._plan.adapters, adapter)), sum(map(len, pairs)))

    def _score(self, pairs: list[Text], progress: Progress | None = None, adapter: int = 0) -> list[float]:
        """The scores of pairs as ids."""
        told = _told(progress, "scoring documents", len(pairs))
        rows = self._encoder.pooled(pairs, self._plan.config.pooling, told, adapter)
        logits = self._encoder.through_head(rows).astype(np.float64).reshape(len(pairs), self.width)
        if self.width == 1:
            return [float(value) for value in logits[:, 0]]
        return [float(value) for value in 1 / (1 + np.exp(logits[:, 1] - logits[:, 0]))]

    def _text(self, text: Any, before: str, number: int) -> Text:
        if isinstance(text, Context):
            return Text(text.ids)
        return Text(self.tokenizer.encode(before + checked_text(f"text {number}", text)))

    def checked_prompt(self, prompt: PromptLike, what: str = "prompt") -> Context:
        """Ids of a text that fits the model's positions; `PromptError` as `LmRunner.checked_prompt`."""
        return checked_prompt(prompt, None, self.vocab_size, self.max_seq, what, f"{self.family} model")

    def _pairs(self, query: str, documents: list[str], most: int | None) -> list[Text]:
        if (template := self._plan.template) is not None:
            return [Text(ids) for ids in rerank_prompts(self.tokenizer, template, query, documents, most)]
        pairs = (self.tokenizer.encode_pair(query, document) for document in documents)
        return [Text([*first, *second], len(first)) for first, second in pairs]

    def _cut(self, texts: list[Text], truncate: bool, what: str = "text") -> list[Text]:
        """Texts that fit into the model's positions."""
        most = min(self.max_seq, (truncate and self._plan.modules.max_tokens) or self.max_seq)
        long = [number for number, text in enumerate(texts) if len(text) > most]
        if not long:
            return texts
        if not truncate:
            count = len(texts[long[0]])
            hint = "pass truncate=True to cut it, or divide it"
            found = f"it has {count} tokens, the model's positions end at {most}"
            raise PromptError(found, where=f"{what} {long[0]}", hint=hint)
        warnings.warn(f"{len(long)} of {len(texts)} {what}s were cut to {most} tokens", stacklevel=4)
        suffix = self.tokenizer.suffix
        for number in long:
            ids, second = list(texts[number].ids), texts[number].second
            if second is not None and second + len(suffix) >= most:
                what, hint = f"the query alone has {second} tokens", f"at most {most} are allowed"
                raise PromptError(what, where="rerank", hint=hint)
            texts[number] = Text([*ids[: most - len(suffix)], *suffix], second)
        return texts

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _check(self, where: str) -> None:
        if self._closed:
            raise BusyError("the model was closed", where=where)

    def close(self) -> None:
        """Releases memory and closes the file. Can be called more than once."""
        self._closed = True
        self._encoder.close()

    def __repr__(self) -> str:
        kind = "pairs of texts -> scores" if self._plan.scores else f"texts -> {self.width} numbers"
        return f"<{type(self).__name__}: {self.family}, {kind}, at most {self.max_seq} tokens>"

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(runners.Model, name):
            command, call = ("rerank", "rerank(query, documents)") if self._plan.scores else ("embed", "embed(texts)")
            hint = f"use `rlx {command}`, or in Python {call}"
            raise UnsupportedModelError("the model is a text encoder: it generates no text", hint=hint)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


def _told(progress: Progress | None, what: str, count: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda done: progress(what, done, count)


def _pooling(modules: SentenceModules, asked: str | None) -> str:
    """The pooling that a call asks for, else that of the files."""
    found: Any = modules.pooling if asked is None else asked
    if found is None:
        what = f"the files do not say how to pool: {modules.lacks} is missing"
        hint = f"pass pooling=NAME, one of {', '.join(POOLINGS)}; the model's card says which"
        raise ArgumentError(what, where="embed", hint=hint)
    if not isinstance(found, str) or found not in POOLINGS:
        raise ArgumentError(f"pooling is {found!r}", where="embed", hint=did_you_mean(found, POOLINGS))
    return found


def _prompt(modules: SentenceModules, name: str | None, text: str | None) -> str:
    """The text that a call puts before each text."""
    if text is not None:
        return checked_text("prompt", text)
    name = name or modules.default_prompt
    if name is None:
        return ""
    if name not in modules.prompts:
        hint = "the model's files have no prompts: pass prompt=TEXT"
        hint = did_you_mean(name, modules.prompts) if modules.prompts else hint
        raise ArgumentError(f"there is no prompt {name!r}", where="prompt_name", hint=hint)
    return modules.prompts[name]
