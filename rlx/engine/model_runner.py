"""Runs a model: a batch of segments -> programs -> logits, or a token -> the likeliest tokens after it.

Runners stage, under `engine.py`. A batch of one segment runs the program for a single sequence. Several segments share
a program whose rows belong to several sequences, as far as its largest bucket goes. The states of all sequences lie in
the pool. Before a program runs, it is told where: the page table is an input, and the addresses of states in slots are
written into its table of arguments. Where nobody has to see a token before the next one is computed, a run takes the
tokens of a step to the next one (`token_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx.backends.memory import Buffer, Values
from rlx.backends.program import Program
from rlx.engine.kv.pool import CachePool
from rlx.engine.kv.prefix import Pages
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings, shift_at
from rlx.engine.kv.sequence import Sequence
from rlx.engine.programs.programs import HIDDEN, LOGITS, Bucketing, Programs, ProgramSpec
from rlx.engine.request import Logits
from rlx.errors import ArgumentError, PromptError
from rlx.models.variants import EmbeddedRows, Features, LowRank
from rlx.passes.options import MAX_SEGMENTS

Ints: TypeAlias = npt.NDArray[Any]

ALL_ROWS_VALUES = 1 << 24  # maximum number of logits per call when those of every position are requested


Rows = Literal["none", "last", "all"]
"""The rows of a segment whose logits are returned."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of rows of one sequence: the next token, a chunk of a prompt, or a token and the drafts after it.

    Attributes:
        sequence: the sequence that the rows continue; at most one segment of a batch may have it.
        tokens: the token ids of the rows, at least one. Positions with prompt embeddings are computed from these.
        logits: the rows whose logits are returned.
        drafts: whether the rows after the first may be rejected: `Sequence.rewind` then takes them back at no cost,
            also from recurrent states.
    """

    sequence: Sequence
    tokens: Ids[int]
    logits: Rows = "last"
    drafts: bool = False


def packed(lengths: Ids[int], rows: int, texts: int) -> Iterator[list[int]]:
    """Numbers of texts that are computed together: up to `texts` texts of `rows` rows in all; a longer text is alone.

    The longest come first, and shorter ones fill what they leave.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first, last = 0, len(order) - 1
    while first <= last:
        chosen, left = [order[first]], rows - lengths[order[first]]
        first += 1
        while first <= last and len(chosen) < texts and lengths[order[first]] <= left:
            left -= lengths[order[first]]
            chosen.append(order[first])
            first += 1
        while first <= last and len(chosen) < texts and lengths[order[last]] <= left:
            left -= lengths[order[last]]
            chosen.append(order[last])
            last -= 1
        yield chosen


class Listener(Protocol):
    """Receives the hidden states of each step of a sequence.

    Attributes:
        reads: which ones, as in `ProgramSpec.hidden`.
    """

    sequence: Sequence | None
    reads: bool | Features

    def hear(self, start: int, ids: Ids[int], hidden: Buffer) -> None:
        """`ids` from position `start` on, and hidden f32 [len(ids), width], which is to be copied."""


@dataclass(frozen=True)
class Limits:
    """The limits of a step.

    Attributes:
        max_seq: maximum number of positions of a sequence.
        rows: maximum number of rows of a call.
        all_rows: the same where the logits of all rows are returned.
        ids: number of token ids; those from it on are invalid.
        embeds: how the model takes rows in place of token embeddings.
        widths: which widths such rows may have.
    """

    max_seq: int
    rows: int
    all_rows: int
    ids: int
    embeds: EmbeddedRows
    widths: tuple[int, ...]


@dataclass
class _Verified:
    """A sequence whose recurrent states still lack rows that were verified; and what advances them by some."""

    sequence: Sequence
    then: Program | None


class ModelRunner:
    """Runs segments.

    Args:
        programs: the model's programs.
        pool: the states.
        limits: the largest step.
        load: called before the first program runs; it loads the weights.

    Attributes:
        bucketing: chooses the program of a call of one sequence.
        listener: receives hidden states, if there is one.
        is_pending: whether a program is still to be compiled in the background. The owner sets it.
        adapters: those that sequences may have.
    """

    adapters: LowRank | None = None

    def __init__(
        self, programs: Programs, pool: CachePool, bucketing: Bucketing, limits: Limits, load: Callable[[], None]
    ) -> None:
        self.programs, self.pool, self.bucketing, self.limits = programs, pool, bucketing, limits
        self.listener: Listener | None = None
        self.is_pending: Callable[[ProgramSpec], bool] = lambda spec: False
        self._load: Callable[[], None] | None = load
        self._verified: list[_Verified] = []
        self._decode = programs.tables["decode"]
        # The programs of one row of text, by what else they return and add: found again for every token.
        self._one: dict[tuple[bool | Features, LowRank | None], Program] = {}

    # -- batches --------------------------------------------------------------------------------------------------

    def step(self, segments: Ids[Segment]) -> list[Logits | None]:
        """Appends the tokens of every segment to its sequence: those of different sequences, which one step computes.

        Segments that are longer than the largest bucket run in chunks. After an error or an interrupt each sequence
        holds the tokens of the calls that were finished.

            prompt = engine.open_sequence(ids)
            (logits,) = engine.step([Segment(prompt, ids[len(prompt) :])])

        Returns:
            For each segment float32 [vocab], the logits after its last row; or [rows, vocab] if it asks for all rows;
            or None.

        Raises:
            PromptError: a segment has no tokens, an invalid one, or more than its context has room for.
            ArgumentError: two segments are of one sequence.
            BusyError: a sequence was closed, or is paused.
            PoolFullError: the pool has no room for all of it; nothing was computed.
        """
        found = self.compute(segments, copies=True)
        return [None if logits is None else np.asarray(logits) for logits in found]

    def compute(self, segments: Ids[Segment], *, copies: bool = False) -> list[Values | None]:
        """As `step`, but the logits stay where they lie, which is valid until the next step.

        It is for callers that choose a token and are done with them.

        Args:
            copies: whether they are copied, and stay valid.
        """
        for segment in segments:
            self.prepare(segment.sequence, segment.tokens)
        if len(segments) == 1:  # quick, for every token of a sequence alone
            rows = [self._alone(segments[0], copies)]
        else:
            rows = self._several(segments, copies)
        return [
            None if segment.logits == "none" else logits if segment.logits == "all" else logits[-1]
            for segment, logits in zip(segments, rows, strict=True)
        ]

    def _several(self, segments: Ids[Segment], copies: bool) -> list[Values]:
        """The rows of segments of several sequences, as `_alone`."""
        if len({id(segment.sequence) for segment in segments}) < len(segments):
            hint = "Give them one after the other."
            raise ArgumentError("two segments are of one sequence", where="Engine.step", hint=hint)
        needs = [
            (s.sequence, len(s.sequence.ids) - s.sequence.done + len(s.tokens), _is_speculative(s)) for s in segments
        ]
        plans = [(each.memory, each.memory.plan(each.done, rows, drafts)) for each, rows, drafts in needs]
        if lacking := [(memory, plan) for memory, plan in plans if plan is not None]:
            self.pool.reserve(lacking)
        for segment, (_, count, _) in zip(segments, needs, strict=True):
            if count > len(segment.tokens):
                self.catch_up(segment.sequence)
        found: dict[int, Values] = {}
        groups = list(self._groups(segments))
        copies = copies or len(groups) > 1  # the next group may run the same program
        for group in groups:
            # Those whose first pages are the same stand side by side, so that attention reads these pages once.
            group.sort(key=lambda i: segments[i].sequence.pages.tobytes())
            some = [segments[i] for i in group]
            rows = self._together(some, copies) if len(some) > 1 else [self._alone(some[0], copies)]
            found |= zip(group, rows, strict=True)
        return [found[i] for i in range(len(segments))]

    def _groups(self, segments: Ids[Segment]) -> Iterator[list[int]]:
        """Numbers of segments that share a call, in order."""
        group: list[int] = []
        rows = outs = 0
        for i, segment in enumerate(segments):
            if not self._can_share(segment):
                yield [i]
                continue
            more, more_outs = len(segment.tokens), _outs(segment)
            full = rows + more > self.limits.rows or outs + more_outs > MAX_SEGMENTS or len(group) == MAX_SEGMENTS
            if group and full:
                yield group
                group, rows, outs = [], 0, 0
            group.append(i)
            rows, outs = rows + more, outs + more_outs
        if group:
            yield group

    def _can_share(self, segment: Segment) -> bool:
        """Whether a program for several sequences can compute a segment."""
        sequence, rows = segment.sequence, len(segment.tokens)
        is_biased = sequence.embeddings is not None and sequence.embeddings.is_biased(sequence.done)
        hears = self.listener is not None and self.listener.sequence is sequence
        special = is_biased or _is_speculative(segment) or hears
        return not special and rows <= self.limits.rows and _outs(segment) <= MAX_SEGMENTS

    def _alone(self, segment: Segment, copies: bool) -> Values:
        """The rows of logits of a segment, with the programs of a single sequence; at least the last one."""
        sequence, ids, every, drafts = segment.sequence, segment.tokens, segment.logits == "all", segment.drafts
        if sequence.done < len(sequence.ids):
            self._bring_up(sequence, len(ids), drafts and len(ids) > 1 and sequence.recurrent)
        most, start = self.limits.all_rows if every else self.limits.rows, sequence.done
        is_whole = len(ids) == 1 or drafts or (len(ids) <= most and not sequence.marks and sequence.embeddings is None)
        if is_whole or sequence.call_end(start, min(most, len(ids))) - start >= len(ids):
            return self.run(sequence, ids, every, speculative=drafts, copies=copies and segment.logits != "none")
        self._bring_up(sequence, len(ids), speculative=False)  # there is room for all calls, or for none
        if every:
            return np.concatenate([np.asarray(piece) for piece in self.pieces(sequence, ids, every)])
        *_, last = self.pieces(sequence, ids, copies=copies)
        return last

    def _together(self, segments: list[Segment], copies: bool) -> list[Values]:
        """The rows of segments that they ask for, with a program for the rows of several sequences."""
        sequences, counts = [s.sequence for s in segments], [len(s.tokens) for s in segments]
        adapters = self.adapters if any(s.adapter for s in sequences) else None
        spec = self.bucketing.segments(sum(counts), self.embedded(sequences, counts), adapters)
        if self.is_pending(spec):  # slower, but nobody waits for a compile
            return self._apart(segments)
        program = self.programs[spec]
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.begin(count)
        env = self.fed(program, segments)
        (program.run if copies else program.begin)(**env)
        for segment in segments:
            segment.sequence.end(segment.tokens)
        logits, outs = program.values(LOGITS, **env), [_outs(s) for s in segments]
        logits = np.array(logits) if copies else logits
        return [logits[end - count : end] for count, end in zip(outs, accumulate(outs), strict=True)]

    def fed(self, program: Program, segments: list[Segment]) -> dict[str, int]:
        """Sets the inputs of a program for rows of several sequences, which have begun; the values of its symbols."""
        sequences, counts = [s.sequence for s in segments], [len(s.tokens) for s in segments]
        outs, rows = [_outs(s) for s in segments], sum(counts)
        total, past, slots = sum(outs), [s.done for s in sequences], [max(0, s.memory.slot) for s in sequences]
        inputs, ends = program.inputs, np.array([*accumulate(counts)])
        table = inputs["segments"][: len(segments)]
        for number, column in enumerate((ends - counts, counts, past, slots)):
            table[:, number] = column
        _feed(inputs, segments, table, rows)
        if "adapter" in inputs:
            inputs["adapter"][:rows, 0] = np.repeat([s.adapter for s in sequences], counts)
        inputs["logit_rows"][: total or 1] = _runs(ends - outs, outs) if total else 0
        width = _feed_pages(inputs, [s.memory.pages for s in sequences])
        program.select_slot(0)
        env = {**self.pool.memory.extents, "SEQ": rows, "PAST_SEQ": max(past), "PAGES": width}
        return env | {"SEGMENTS": len(segments), "OUTS": total or 1}

    def _apart(self, segments: list[Segment]) -> list[Values]:
        """The rows of segments whose common program is not there yet: of those that decode together, if it is there."""
        few = [segment for segment in segments if len(segment.tokens) == 1]
        found = dict(zip(few, self._together(few, True), strict=True)) if 1 < len(few) < len(segments) else {}
        return [found[each] if each in found else self._alone(each, copies=True) for each in segments]

    # -- one sequence ---------------------------------------------------------------------------------------------

    def prepare(self, sequence: Sequence, ids: Ids[int]) -> None:
        """Checks that ids can follow a sequence, and loads the weights.

        Raises:
            PromptError: no ids, an invalid one, or more than the context has room for.
        """
        if not len(ids):
            raise PromptError("no token ids were given", hint="Give at least one.")
        if sequence.embeddings is not None:
            self._check_spans(sequence.embeddings, ids, len(sequence))
        elif max(ids) >= self.limits.ids:
            self._refuse_id(max(ids))
        if len(sequence.ids) + len(ids) > self.limits.max_seq:
            raise PromptError(
                f"{len(ids)} tokens after {len(sequence)} do not fit the context of {self.limits.max_seq}",
                hint="Shorten the prompt or open the model with a larger max_seq.",
            )
        if self._load is not None or self._verified:
            self._ready()
        if sequence.dirty or sequence.closed or sequence.saved is not None:
            sequence.settle()

    def _check_spans(self, embeddings: PromptEmbeddings, ids: Ids[int], start: int) -> None:
        """`PromptError` if an id has no embedding where no image stands, or if the ids end inside of a two-way span."""
        if (most := max(embeddings.looked_up(ids, start))) >= self.limits.ids:
            self._refuse_id(most)
        end = start + len(ids)
        if embeddings.two_way_at(end) is not None:
            what = f"the ids end at position {end}, inside of rows that see each other"
            raise PromptError(what, where="embeddings", hint="Append all ids of an image at once.")

    def _refuse_id(self, token: int) -> NoReturn:
        what = f"token id {token} is out of range: the smallest embedding table has {self.limits.ids} rows"
        raise PromptError(what, hint="Ids above stand for parts of images or sound: leave them out.")

    def reserve(self, sequence: Sequence, ids: Ids[int]) -> None:
        """Checks that ids can follow a sequence, takes the room for them, and brings the states up to date.

        Raises:
            PromptError, PoolFullError: as `step`.
        """
        self.prepare(sequence, ids)
        self._bring_up(sequence, len(ids), speculative=False)

    def _bring_up(self, sequence: Sequence, count: int, speculative: bool) -> None:
        """Takes the room for `count` more rows, and brings the states up to date."""
        rows = len(sequence.ids) - sequence.done + count
        if (plan := sequence.memory.plan(sequence.done, rows, speculative)) is not None:
            self.pool.reserve([(sequence.memory, plan)])
        if rows > count:
            self.catch_up(sequence)

    def refresh(self, sequence: Sequence) -> None:
        """Brings the states up to the sequence's ids, for callers that read them."""
        self._ready()
        sequence.settle()
        self.catch_up(sequence)

    def _ready(self) -> None:
        """Loads the weights, and ends what the last step left."""
        if self._load is not None:
            self._load()
            self._load = None
        if self._verified:
            self._advance()

    def pieces(
        self, sequence: Sequence, ids: Ids[int], all_rows: bool = False, output: str = LOGITS, *, copies: bool = True
    ) -> Iterator[Values]:
        """Appends ids in chunks that fit the buckets: the output of each chunk, f32 [rows or 1, width], as `run`."""
        most = self.limits.all_rows if all_rows else self.limits.rows
        first, at = sequence.done, 0
        while at < len(ids):
            end = sequence.call_end(first + at, min(most, len(ids) - at)) - first
            yield self.run(sequence, ids[at:end], all_rows, output, copies=copies)
            at = end

    def catch_up(self, sequence: Sequence) -> None:
        """Brings the states up to the sequence's ids: recomputes what a rewind dropped."""
        if sequence.done < len(sequence):
            for _ in self.pieces(sequence, sequence.ids[sequence.done :], copies=False):
                pass
            sequence.mark()

    def run(
        self,
        sequence: Sequence,
        ids: Ids[int],
        all_rows: bool = False,
        output: str = LOGITS,
        *,
        speculative: bool = False,
        copies: bool = True,
    ) -> Values:
        """Appends ids that fit one call: an output of the program, f32 [rows, width] or f32 [1, width].

        Args:
            speculative: whether rows after the first may be rejected: recurrent states then stay.
            copies: whether it is a copy of the host; otherwise it stays where it lies, valid until the next step.
        """
        rows, past, listener = len(ids), sequence.done, self.listener
        speculative = speculative and rows > 1 and sequence.recurrent
        if listener is not None and listener.sequence is not sequence:
            listener = None
        if output == HIDDEN and listener is not None and listener.reads is not True:
            listener = None  # it misses these rows
        hidden = output == HIDDEN or (listener is not None and listener.reads)
        adapters = self.adapters if sequence.adapter else None
        is_one = rows == 1 and sequence.embeddings is None and self._decode.capacity is None
        if is_one and (hidden, adapters) in self._one:
            program = self._one[hidden, adapters]
            self._decode.stats.hits += 1
        else:
            embeds, bias = None, 0
            if (spans := sequence.embeddings) is not None:
                bias = spans.bias.shape[1] if spans.bias is not None and spans.is_biased(past) else 0
                embeds = self.embedded([sequence], [rows])
            spec = self.bucketing.spec(rows, past, all_rows, hidden, speculative, embeds, bias, adapters)
            program = self.programs[spec]
            if is_one:
                self._one[hidden, adapters] = program
        sequence.begin(rows, speculative=speculative)
        for each in self._verified:
            if each.then is program.then:  # this run overwrites what it reads
                each.then = None
        feed(program.inputs, ids, past, sequence.embeddings)
        if adapters:
            program.inputs["adapter"][:rows] = sequence.adapter
        env = {"SEQ": rows, "PAST_SEQ": past, **self.bind_slots(program, sequence)}
        (program.run if copies else program.begin)(**env)
        sequence.end(ids, speculative=speculative)
        if speculative:
            self._verified.append(_Verified(sequence, program.then))
        if listener is not None:
            listener.hear(past, ids, program.result(HIDDEN, **env))
        found = program.values(output, **env)
        return np.array(found) if copies else found

    def embedded(self, sequences: Ids[Sequence], counts: Ids[int]) -> EmbeddedRows | None:
        """How a call takes the embedded rows among the next ones of some sequences; None if there are none."""
        spans = [
            span
            for each, rows in zip(sequences, counts, strict=True)
            if each.embeddings is not None
            for span, _, _ in each.embeddings.within(each.done, each.done + rows)
        ]
        if not spans:
            return None
        kind = self.limits.embeds
        return kind if any(span.two_way for span in spans) else replace(kind, two_way="none")

    def bind_slots(self, program: Program, sequence: Sequence, *, swapped: bool = False) -> dict[str, int]:
        """Tells a program where a sequence's states lie; returns the values of the symbols that say their sizes.

        Args:
            swapped: whether it reads recurrent states from the spare slot and writes them to the other one.
        """
        memory = sequence.memory
        if memory.has_slot:
            slots = max(0, memory.slot), max(0, memory.spare)
            program.select_slot(*(slots[::-1] if swapped else slots))
        pages = memory.pages
        if (table := program.inputs.get("pages")) is not None:
            table[: len(pages)] = pages
        return {**self.pool.memory.extents, "PAGES": len(pages)}

    # -- recurrent states -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advances recurrent states by the rows that the last step verified and nobody rejected."""
        verified, self._verified = self._verified, []
        for each in verified:
            sequence, then = each.sequence, each.then
            count, there = sequence.ahead
            if sequence.closed or sequence.saved or not count or not (there or (then and not then.closed)):
                sequence.leave()  # what is lacking is computed again
                continue
            if not there and then is not None:
                then.select_slot(sequence.memory.slot, sequence.memory.spare)
                then.run(SEQ=count)
            sequence.take(count)


def feed(inputs: Mapping[str, Any], ids: Ids[int], past: int, embeddings: PromptEmbeddings | None, at: int = 0) -> None:
    """Writes the inputs of a program for the rows of one sequence: `ids` after `past` positions.

    Args:
        inputs: name -> memory for the largest call.
        embeddings: those of the sequence. A program without an input for their rows gets none of their positions.
        at: the first row.
    """
    if embeddings is None and "row_index" not in inputs:  # text alone
        count = len(ids)
        if "tokens" in inputs:
            inputs["tokens"][at if count == 1 else slice(at, at + count)] = ids[0] if count == 1 else ids
        if (positions := inputs.get("positions")) is not None:
            if count == 1:  # quick, for every token
                positions[at] = past
            else:  # a row of equal components, where positions have some
                positions[at : at + count].T[...] = np.arange(past, past + count)
        return
    feed_positions(inputs, len(ids), past, embeddings, at)
    feed_tokens(inputs, ids, past, embeddings, at)


def feed_positions(
    inputs: Mapping[str, Any], count: int, past: int, embeddings: PromptEmbeddings | None, at: int = 0
) -> None:
    """As `feed`, the positions of `count` rows only."""
    if (positions := inputs.get("positions")) is None:  # no layer has rope
        return
    if positions.ndim == 2:
        positions[at : at + count] = (embeddings or PromptEmbeddings(())).components(past, past + count)
    else:
        first = past + shift_at(embeddings, past)
        positions[at : at + count] = range(first, first + count)


def feed_tokens(
    inputs: Mapping[str, Any], ids: Ids[int], past: int, embeddings: PromptEmbeddings | None, at: int = 0
) -> None:
    """As `feed`, everything but the positions."""
    if "row_index" in inputs:
        ids = _feed_rows(inputs, ids, past, embeddings or PromptEmbeddings(()), at)
    if "tokens" in inputs:  # absent if there is no embedding lookup
        inputs["tokens"][at : at + len(ids)] = ids


def _feed_rows(inputs: Mapping[str, Any], ids: Ids[int], past: int, embeddings: PromptEmbeddings, at: int) -> Ids[int]:
    """Writes the inputs of a program that takes rows in place of embeddings; returns the ids to look up."""
    count = len(ids)
    inputs["row_index"][at : at + count] = -1
    visible = np.arange(past, past + count)
    for span, first, last in embeddings.within(past, past + count):
        own = slice(at + first - past, at + last - past)
        rows = span.rows[first - span.start : last - span.start]
        inputs["rows"][own, : rows.shape[1]] = rows
        inputs["rows"][own, rows.shape[1] :] = 0
        inputs["row_index"][own] = range(own.start, own.stop)
        if span.two_way:
            visible[first - past : last - past] = span.end - 1
    if "visible" in inputs:
        inputs["visible"][at : at + count] = visible
    if "bias" in inputs and embeddings.bias is not None:
        bias = embeddings.bias[past : past + count, :, : past + count]
        inputs["bias"].reshape(-1)[: bias.size] = bias.reshape(-1)
    return embeddings.looked_up(ids, past)


def _feed(inputs: Mapping[str, Any], segments: list[Segment], table: Ints, rows: int) -> None:
    """Writes tokens, positions and embedded rows of segments, which `table` describes as the input of programs."""
    if "row_index" in inputs:
        for segment, at in zip(segments, table[:, 0].tolist(), strict=True):
            feed(inputs, segment.tokens, segment.sequence.done, segment.sequence.embeddings, at)
        return
    inputs["tokens"][:rows] = [*chain.from_iterable([segment.tokens for segment in segments])]  # at once: quick
    if "positions" in inputs:
        sequences = [segment.sequence for segment in segments]
        shifts = [0 if s.embeddings is None else s.embeddings.shift(s.done) for s in sequences]
        inputs["positions"][:rows] = _runs(table[:, 2] + shifts, table[:, 1])


def _feed_pages(inputs: Mapping[str, Any], pages: list[Pages]) -> int:
    """Writes the page tables of sequences; returns how many pages each has room for."""
    counts = [len(each) for each in pages]
    width = max(counts)
    if "pages" in inputs:
        table = inputs["pages"].reshape(-1)[: len(pages) * width].reshape(len(pages), width)
        table[np.arange(width) < np.array(counts)[:, None]] = np.concatenate(pages)
    return width


def _runs(starts: Ints, counts: Ids[int] | Ints) -> Ints:
    """The numbers from each start on, so many of each."""
    ends: Ints = np.cumsum(counts)
    found: Ints = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
    return found


def _is_speculative(segment: Segment) -> bool:
    """Whether recurrent states must stay, because rows of the segment may be rejected."""
    return segment.drafts and len(segment.tokens) > 1 and segment.sequence.recurrent


def _outs(segment: Segment) -> int:
    return 1 if segment.logits == "last" else len(segment.tokens) if segment.logits == "all" else 0
