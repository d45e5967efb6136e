"""Program spec: which of a model's programs a call needs - number of rows, past, inputs and outputs.

Runners stage, under `programs.py`, which has one program per spec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.models import variants
from rlx.models.variants import EmbeddedRows
from rlx.passes.options import Options, phase
from rlx.profile import CompileProfile

Range = tuple[int, int]

LOGITS, HIDDEN = "logits", "hidden"  # output names; "hidden" is the hidden state that the head multiplies


@dataclass(frozen=True)
class ProgramSpec:
    """The spec of one program.

    Attributes:
        seq: (smallest, largest) number of rows.
        all_rows: whether it returns the logits of every row, not only of the last.
        hidden: whether it returns the hidden states before the head, for every row.
        past: (smallest, largest) number of past positions; None for any.
        embeds: how rows may take the place of token embeddings; None: there are no such rows.
        bias: number of heads of an attention bias that replaces the causal mask, 1 if all heads share it; 0: no bias.
        greedy: whether it returns the likeliest token, as output "token" i32 [rows], instead of logits.
        segments: whether rows belong to several sequences; it returns the logits of the rows `logit_rows`.
        verifies: whether rows may be rejected: it then leaves the recurrent states and writes new ones beside them.
        advances: whether it only updates the recurrent states, by the accepted rows of a verifying program.
        swapped: whether a verifying program is the one of two that reads the spare slot, in runs that alternate between
            the slots.
    """

    seq: Range
    all_rows: bool = False
    hidden: bool = False
    past: Range | None = None
    embeds: EmbeddedRows | None = None
    bias: int = 0
    greedy: bool = False
    segments: bool = False
    verifies: bool = False
    advances: bool = False
    swapped: bool = False

    @cached_property
    def phase(self) -> str:
        return phase(self.seq, self.segments)

    @property
    def kind(self) -> str:
        """The phase, or "greedy"."""
        return "greedy" if self.greedy else self.phase

    @property
    def name(self) -> str:
        """Name of the folder for dumps."""
        past = f"-past-{self.past[0]}-{self.past[1]}" if self.past else ""
        extra = (
            "-all" * self.all_rows
            + "-hidden" * self.hidden
            + (f"-{self.embeds.name}" if self.embeds else "")
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

    def options(self, profile: CompileProfile, packed: tuple[str, ...] = (), paged: bool = True) -> Options:
        """The compiler's options under a profile.

        Args:
            packed: names of tables that another graph of the model uses as matrices.
            paged: whether full caches are pages of a pool.
        """
        more = {"all_rows": self.all_rows, "symbols": self.symbols, "whole": (HIDDEN,), "packed": packed}
        return profile.options(self.seq, segments=self.segments, paged=paged, **more)

    @property
    def advancing(self) -> ProgramSpec:
        """The spec of the program that updates the recurrent states after this verifying program."""
        return ProgramSpec((1, self.seq[1]), all_rows=True, advances=True, swapped=self.swapped)

    @cached_property
    def form(self) -> ProgramSpec:
        """The spec without what its graph does not depend on: the numbers of rows and of past positions."""
        return replace(self, seq=(0, 0), past=None, all_rows=False, segments=False, swapped=False)

    def variant(self, graph: Graph) -> Graph:
        """The model's graph with the inputs and outputs of this spec."""
        if self.advances:
            return variants.advancing(graph)
        outputs = {name: node for name, node in graph.outputs.items() if self.hidden or name != HIDDEN}
        if self.greedy:
            outputs["token"] = ops.pick(outputs.pop(LOGITS))
        graph = graph.replace(outputs=outputs)
        graph = variants.verifying(graph) if self.verifies else graph
        graph = variants.with_embedded_rows(graph, self.embeds) if self.embeds else graph
        return variants.with_bias(graph, self.bias) if self.bias else graph


DECODE, GREEDY = ProgramSpec((1, 1)), ProgramSpec((1, 1), greedy=True)
