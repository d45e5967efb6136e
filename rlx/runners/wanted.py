"""What a call wants of a program: how many rows, behind how many positions, with which inputs and outputs.

Runners stage, under `programs.py`, which has a program for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.models import variants
from rlx.passes.options import Options, phase
from rlx.profile import CompileProfile

Range = tuple[int, int]

LOGITS, HIDDEN = "logits", "hidden"  # outputs; the second is what the head multiplies


@dataclass(frozen=True)
class Wanted:
    """Which of a model's programs a call needs.

    Attributes:
        seq: (smallest, largest) number of rows.
        all_rows: whether the logits of every row are wanted, not those of the last one only.
        hidden: whether what the head multiplies is wanted, of every row.
        past: (smallest, largest) number of positions before them; None for any.
        embeds: whether the caller gives embeddings in place of tokens.
        bias: heads of a bias on attention in place of the causal mask, 1 for all; 0 for none.
        greedy: whether the likeliest token is wanted, the output "token" i32 [rows], and no logits.
        sequences: whether every row is the one new token of a sequence of its own.
        verifies: whether rows may turn out wrong, so that recurrent states stay and new ones are written beside them.
        advances: whether only that is done, for the first rows of such a call.
        turn: the side of the recurrent states that is read then, 0 or 1.
    """

    seq: Range
    all_rows: bool = False
    hidden: bool = False
    past: Range | None = None
    embeds: bool = False
    bias: int = 0
    greedy: bool = False
    sequences: bool = False
    verifies: bool = False
    advances: bool = False
    turn: int = 0

    @cached_property
    def phase(self) -> str:
        return phase(self.seq, self.sequences)

    @property
    def kind(self) -> str:
        """The phase, or "greedy"."""
        return "greedy" if self.greedy else self.phase

    @property
    def name(self) -> str:
        """For a folder of dumps."""
        past = f"-past-{self.past[0]}-{self.past[1]}" if self.past else ""
        extra = (
            "-all" * self.all_rows
            + "-hidden" * self.hidden
            + "-embeds" * self.embeds
            + f"-bias-{self.bias}" * bool(self.bias)
            + "-greedy" * self.greedy
            + "-verifies" * self.verifies
            + "-advances" * self.advances
        )
        return f"{self.phase}-{self.seq[0]}-{self.seq[1]}{past}{extra}"

    @property
    def symbols(self) -> tuple[tuple[str, Range], ...]:
        """Bounds of symbols, for the compiler's options."""
        return (("PAST_SEQ", self.past),) if self.past else ()

    def options(self, profile: CompileProfile, packed: tuple[str, ...] = ()) -> Options:
        """The compiler's options, by a profile.

        Args:
            packed: tables that another graph of the model multiplies.
        """
        more = {"all_rows": self.all_rows, "symbols": self.symbols, "whole": (HIDDEN,), "packed": packed}
        return profile.options(self.seq, sequences=self.sequences, **more)

    @property
    def advancing(self) -> Wanted:
        """What moves the states by rows of a program that verifies."""
        return Wanted((1, self.seq[1]), all_rows=True, advances=True, turn=self.turn)

    def variant(self, graph: Graph) -> Graph:
        """The model's graph with the inputs that it takes and the outputs that it has."""
        if self.advances:
            return variants.advancing(graph)
        outputs = {name: node for name, node in graph.outputs.items() if self.hidden or name != HIDDEN}
        if self.greedy:
            outputs["token"] = ops.pick(outputs.pop(LOGITS))
        graph = graph.replace(outputs=outputs)
        graph = variants.verifying(graph) if self.verifies else graph
        graph = variants.from_embeds(graph) if self.embeds else graph
        return variants.with_bias(graph, self.bias) if self.bias else graph


DECODE, GREEDY = Wanted((1, 1)), Wanted((1, 1), greedy=True)
