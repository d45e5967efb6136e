"""Drafts of a smaller model: an engine of its own with the same vocabulary, whose likeliest tokens are the drafts.

Runners stage, beside `heads.py`. Each generation has a sequence of the draft model, too. Before it drafts, the sequence
goes back to what it has in common with the text, and takes the tokens that it lacks. Then it goes on by itself. A
generation alone drafts in one native call; several draft in the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING

from rlx import env
from rlx.closing import on_error
from rlx.compiler.compile import Progress
from rlx.compiler.state_memory import Sizes
from rlx.engine.kv.sequence import Sequence
from rlx.engine.model_runner import Segment
from rlx.engine.opening.options import EngineOptions
from rlx.engine.opening.setup import Plan, Setup, open_model, tokenizer_of
from rlx.engine.programs.programs import expected_programs
from rlx.engine.speculation.drafts import MOST, Counters, Drafts, ModelHits
from rlx.errors import ArgumentError, NumericalError, PoolFullError
from rlx.sampling.choice import LIKELIEST
from rlx.text import Tokenizer
from rlx.text.tokenizer import TokenType
from rlx.weights import WeightLoader

if TYPE_CHECKING:
    from rlx.engine.engine import Engine

ROWS = 256  # of a prompt that the draft model computes in a turn; it drafts once it has computed all of them
SPARE = 128  # how many tokens only one of the two vocabularies may have, such as control tokens that were added later


def draft_plan(engine: Engine, setup: Setup, loader: WeightLoader) -> Plan:
    """How a draft model is opened: with the settings of the engine that it drafts for, and room for as many positions.

    Raises:
        ModelFileError: the file cannot be used.
    """
    config, _ = open_model(loader)
    profile = replace(setup.profile, family=None, model=None, kv_bytes=None, cache_kv=None)
    most = min(setup.max_seq, config.context)
    chosen = EngineOptions(
        profile=profile, max_seq=most, threads=setup.threads, cache=setup.cache, device=engine.device
    )
    plan = Plan.of(loader, chosen)
    sizes = Sizes.of(plan.graph, plan.setup.layouts, most, profile.buckets[-1])
    share = sizes.sequence_bytes(most) / engine.pool.sizes.sequence_bytes(most)
    nbytes = max(ceil(share * engine.pool.kv_bytes), sizes.sequence_bytes(most))
    setup = replace(plan.setup, profile=replace(plan.setup.profile, kv_bytes=nbytes))
    return replace(plan, setup=setup, image_bytes=0)  # the images of a prompt are the model's


def check_vocabulary(model: Tokenizer, draft: Tokenizer, path: str) -> None:
    """`ArgumentError` if a draft model has another vocabulary than the model.

    A token that only one of them has is none of the other's: vocabularies are padded, and control tokens were added.
    """
    ours, theirs = _named(model), _named(draft)
    differ = [token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]]
    if differ:
        token = min(differ)
        how = f"token {token} is {theirs[token]!r}, and {ours[token]!r} in the model's"
    elif len(ours.keys() ^ theirs.keys()) > SPARE:
        how = f"it has {len(theirs)} tokens, and the model's has {len(ours)}"
    else:
        return
    what, hint = f"the draft model has another vocabulary: {how}", "give a smaller model of the same family"
    raise ArgumentError(what, where=path, hint=hint)


def _named(tokenizer: Tokenizer) -> dict[int, str]:
    """The text of each id that has a token."""
    vocabulary = tokenizer.vocabulary
    unused = {*vocabulary.of_type(TokenType.UNUSED)}
    return {token: text for token, text in enumerate(vocabulary.tokens) if text and token not in unused}


class DraftModel:
    """An open model that drafts for another one.

    Args:
        engine: of the draft model.
        ids: the model takes ids below this.
        cost: time of a step of the draft model relative to one of the model.
    """

    def __init__(self, engine: Engine, ids: int, cost: float) -> None:
        self.engine, self.ids, self.cost = engine, ids, cost

    @classmethod
    def of(cls, loader: WeightLoader, engine: Engine, setup: Setup, progress: Progress | None) -> DraftModel:
        """The model of an open file, for an engine that it drafts for.

        Args:
            loader: closed with the result.
            setup, progress: of the engine.

        Raises:
            ModelFileError, TokenizerError: the file cannot be used.
            ArgumentError: it has another vocabulary.
        """
        plan = draft_plan(engine, setup, loader)
        check_vocabulary(engine.tokenizer, tokenizer_of(loader), str(loader.path))
        made = type(engine)(plan, progress, ahead=expected_programs(env.compile_ahead(), plan.setup))
        made.ahead.is_busy, made.ahead.is_over = lambda: engine.ahead.is_busy(), lambda: engine.ahead.is_over()
        with on_error(partial(made.close, keep_file=True)):
            made.load()
        return cls(made, engine.model_runner.limits.ids, _bytes(loader) / _bytes(engine.weights.loader))

    def drafts(self, sequence: Sequence, ids: list[int], salt: str, counters: Counters) -> ModelDrafts | None:
        """As `Drafting.drafts`; none for prompts with images or rows of a caller, which the model does not see."""
        return None if sequence.embeddings else ModelDrafts(ModelDrafter(self, ids, salt), counters)

    def close(self) -> None:
        """Closes the model and its file."""
        self.engine.close()

    def draft(self, lengths: Mapping[ModelDrafter, int]) -> dict[ModelDrafter, list[int]]:
        """At most so many drafts for each text, all in the same steps; fewer where the draft model has no room."""
        found: dict[ModelDrafter, list[int]] = {each: [] for each in lengths}
        try:
            rows = {each: lacking for each in lengths if (lacking := each.lacking())}
            while rows:
                rows = self._step(rows, found, lengths)
        except (PoolFullError, NumericalError):
            pass  # fewer drafts: the answer does not depend on them
        return {each: [*takewhile(lambda token: 0 <= token < self.ids, tokens)] for each, tokens in found.items()}

    def _step(
        self,
        rows: dict[ModelDrafter, list[int]],
        found: dict[ModelDrafter, list[int]],
        lengths: Mapping[ModelDrafter, int],
    ) -> dict[ModelDrafter, list[int]]:
        """Adds a draft for each text, or all for one that is alone; returns the rows of the next step."""
        if len(rows) == 1:
            ((one, tokens),) = rows.items()
            left = lengths[one] - len(found[one])
            if len(tokens) == 1 and (more := self.engine.greedy(one.sequence, tokens[0], left)):
                found[one] += more
                return {}
        segments = [
            Segment(each.sequence, tokens[:ROWS], "last" if len(tokens) <= ROWS else "none")
            for each, tokens in rows.items()
        ]
        computed = zip(rows, self.engine.compute(segments), strict=True)
        ends = {each: logits for each, logits in computed if logits is not None}
        chosen = self.engine.choose([*ends.values()], [LIKELIEST] * len(ends)) if ends else ()
        for each, (token, _, _) in zip(ends, chosen, strict=True):
            found[each].append(token)
        return {each: found[each][-1:] for each in ends if found[each][-1] >= 0 and len(found[each]) < lengths[each]}


def _bytes(loader: WeightLoader) -> int:
    return sum(size for _, size, _ in loader.stamps())


class ModelDrafter:
    """A `Drafter` that asks a draft model.

    Args:
        ids: the prompt.
        salt: only texts of the same salt share prefixes.

    Attributes:
        model: it.
    """

    def __init__(self, model: DraftModel, ids: list[int], salt: str) -> None:
        self.model, self._ids, self._salt = model, [*ids], salt
        self._hits = ModelHits(MOST, model.cost)
        self._right = 0  # how many ids of the sequence were compared with the text

    @cached_property
    def sequence(self) -> Sequence:
        """The text in the draft model, and drafts after it; opened at first use."""
        return self.model.engine.open_sequence(self._ids, salt=self._salt)

    def observe(self, token: int) -> None:
        self._hits.observe(token)
        self._ids.append(token)

    def acceptance_probs(self, limit: int) -> list[float]:
        room = self.model.engine.max_seq - len(self._ids) + 1
        return self._hits.acceptance_probs(min(limit, room)) if room > 0 else []

    def propose(self, count: int) -> list[int]:
        return self.expect(self.model.draft({self: count})[self])

    def expect(self, drafts: list[int]) -> list[int]:
        """Drafts that the model verifies next: the tokens that are observed then count as hits, or not."""
        self._hits.open = [*drafts]
        return drafts

    def lacking(self) -> list[int]:
        """Has the sequence hold nothing but the text: the ids that it lacks, at least the last one.

        Empty if the draft model does not know one of them.
        """
        engine, ids, held = self.model.engine, self._ids, self.sequence.ids
        most = min(len(held), len(ids) - 1)
        while self._right < most and held[self._right] == ids[self._right]:
            self._right += 1
        if self._right < len(held):
            self.sequence.rewind(self._right)
        lacking = ids[self._right :]
        if max(lacking) >= engine.model_runner.limits.ids:
            return []
        if self.sequence.recurrent:  # states that cannot go back are copied before the drafts
            self.sequence.mark(len(ids) - 1)
            if 1 < len(lacking) <= ROWS:
                engine.step([Segment(self.sequence, lacking[:-1], "none")])
                return lacking[-1:]
        return lacking

    def close(self) -> None:
        """Ends it."""
        if "sequence" in vars(self):
            self.sequence.close()


class ModelDrafts(Drafts):
    """The drafts of a draft model for one generation, until `close`."""

    _drafter: ModelDrafter

    def propose_together(self, lengths: Mapping[Drafts, int]) -> Mapping[Drafts, list[int]]:
        """The drafts of all generations that have the same draft model."""
        model = self._drafter.model
        ours = [each for each in lengths if isinstance(each, ModelDrafts) and each._drafter.model is model]
        found = model.draft({each._drafter: lengths[each] for each in ours})
        return {each: each._drafter.expect(found[each._drafter]) for each in ours}

    def close(self) -> None:
        self._drafter.close()
