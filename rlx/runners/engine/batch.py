"""Batched generation: each step computes one token of every running sequence.

Runners stage, over the engine. A step of many rows reads the weights once for all of them, so tokens per second grow
with the rows as long as memory bandwidth is the limit. Every sequence has its own slot in the states. Prompts are
computed one after the other by the single-sequence programs; when a sequence ends, the next prompt takes its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from rlx.errors import ArgumentError
from rlx.profile import CompileProfile
from rlx.runners.engine.program_spec import GREEDY, ProgramSpec
from rlx.runners.engine.programs import Programs
from rlx.runners.generation.checks import check_finite
from rlx.runners.generation.requests import Generation, Logits, Request, Step, step_of
from rlx.runtime.kv import States
from rlx.runtime.session import Session

SLOTS = 32  # maximum number of sequences at once: beyond it arithmetic is the limit, and batching gains nothing
_ROWS = ((1, 1), (2, 8), (9, SLOTS))


def batch_program(rows: int) -> ProgramSpec:
    """The spec of the program for steps of `rows` rows; one row uses the single-sequence program."""
    return ProgramSpec(next(bounds for bounds in _ROWS if rows <= bounds[1]), segments=rows > 1)


def batch_programs(sequences: int) -> list[ProgramSpec]:
    """Specs of the programs that batches of up to `sequences` sequences need besides the single-sequence programs.

    Raises:
        ArgumentError: the number is below 1.
    """
    if sequences < 1:
        raise ArgumentError(f"a batch of {sequences} sequences", where="batch", hint="Give a number of at least 1.")
    return [batch_program(bounds[1]) for bounds in _ROWS[1:] if bounds[0] <= sequences]


def programs_of(
    profile: CompileProfile, batch: int = 1, phase: str | None = None, rows: int | None = None
) -> list[ProgramSpec]:
    """Specs of the programs that `compile` makes for a model.

    Args:
        batch: maximum number of sequences in a batch.
        phase: "prefill", "decode", "greedy" or "batch"; all by default.
        rows: only programs that accept this number of rows; all by default.

    Raises:
        ArgumentError: no program matches.
    """
    table = [*map(ProgramSpec, profile.ranges), GREEDY, *batch_programs(batch)]
    of_phase = [w for w in table if phase in (None, w.kind)]
    found = [w for w in of_phase if rows is None or w.seq[0] <= rows <= w.seq[1]]
    if not found:
        has = ", ".join(f"{w.kind} {w.seq[0]}-{w.seq[1]}" for w in of_phase or table)
        what = f"takes {rows} rows" if of_phase else f"is of phase {phase!r}"
        raise ArgumentError(f"no program {what}", hint=f"The programs are: {has}.")
    return found


class Batch:
    """A batch of sequences on one engine, each in a slot: a context manager. The engine serves nothing else inside it.

    Args:
        states: the states of all slots; closed on exit.
        programs: the engine's programs.
        kept: the engine's own session; restored on exit.
        enter: makes a session the engine's current one.
        forward: appends ids to the engine's current session and returns the logits after the last.
    """

    def __init__(
        self,
        states: States,
        slots: int,
        programs: Programs,
        kept: Session,
        enter: Callable[[Session], None],
        forward: Callable[[Sequence[int]], Logits],
    ) -> None:
        self._states, self._programs, self._kept = states, programs, kept
        self._enter, self._forward = enter, forward
        self._sessions = [Session(states.slot(i), checkpoints=False) for i in range(slots)]

    def start(self, slot: int, prompt: Sequence[int]) -> Logits:
        """Starts a new sequence in a slot and drops the previous one: the logits after its prompt, float32[vocab]."""
        self._sessions[slot].rewind(0)
        return self._alone(slot, prompt)

    def step(self, tokens: Mapping[int, int]) -> Logits:
        """Appends one token to some slots: the logits after each, float32[len(tokens), vocab], in the same order."""
        if len(tokens) == 1:
            ((slot, token),) = tokens.items()
            return self._alone(slot, [token])[None]
        self._enter(self._sessions[0])  # batch programs address slots relative to the first one
        rows = len(tokens)
        program = self._programs[batch_program(rows)]
        sessions = [self._sessions[slot] for slot in tokens]
        past = [session.done for session in sessions]
        segments = [(row, 1, length, slot) for row, (length, slot) in enumerate(zip(past, tokens, strict=True))]
        inputs = {"tokens": list(tokens.values()), "positions": past, "segments": segments, "logit_rows": range(rows)}
        for name, view in program.inputs.items():
            view[:rows] = inputs[name]
        env = {"SEQ": rows, "SEGMENTS": rows, "OUTS": rows, **self._states.extents}
        for session in sessions:
            session.begin(1)
        program.run(**env)
        for session, token in zip(sessions, tokens.values(), strict=True):
            session.end([token])
        return program.output("logits", **env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._enter(self._kept)
        self._states.close()

    def _alone(self, slot: int, ids: Sequence[int]) -> Logits:
        self._enter(self._sessions[slot])
        return self._forward(ids)


class BatchEngine(Protocol):
    """The part of an engine that batched generation uses."""

    def batch(self, slots: int, length: int) -> AbstractContextManager[Batch]:
        """A context with `slots` sequences of at most `length` tokens; on exit the session is restored."""


def generate_together(engine: BatchEngine, requests: Sequence[Request], length: int) -> list[Generation]:
    """The tokens of every request, computed as a batch, in the order of the requests.

    Args:
        length: maximum length of a prompt with its answer.

    Raises:
        NumericalError: a logit of one of them is NaN or infinite.
    """
    found: list[list[int]] = [[] for _ in requests]
    steps: list[list[Step]] = [[] for _ in requests]
    waiting = deque(i for i, request in enumerate(requests) if request.stopping.reason is None)
    free = list(range(min(len(waiting), SLOTS)))
    live: dict[int, int] = {}  # slot -> request

    def take(slot: int, i: int, logits: Logits) -> None:
        """Chooses the next token of a request; an unfinished request keeps its slot."""
        request = requests[i]
        found[i].append(request.sampler.sample(check_finite(logits, f"sequence {i}"), request.stopping.banned))
        reason = request.stopping.push(found[i][-1])
        if request.alternatives is not None:
            steps[i].append(step_of(found[i][-1], logits, request))
        if reason is None:
            live[slot] = i
        else:
            live.pop(slot, None)
            free.append(slot)

    if waiting:
        with engine.batch(len(free), length) as batch:
            while waiting or live:
                while waiting and free:
                    slot, i = free.pop(), waiting.popleft()
                    take(slot, i, batch.start(slot, requests[i].context))
                if live:
                    rows = list(live.items())
                    logits = batch.step({slot: found[i][-1] for slot, i in rows})
                    for (slot, i), row in zip(rows, logits, strict=True):
                        take(slot, i, row)
    return [
        Generation(found[i], request, None if request.alternatives is None else steps[i])
        for i, request in enumerate(requests)
    ]
