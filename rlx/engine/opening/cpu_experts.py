"""Which layers' experts the CPU computes, while a card computes the rest of the model.

They are the last ones: of a prompt the last layer computes only the rows that get logits, so that its experts cost
least. A layer's experts go as a whole, because a token may choose any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rlx.ir.graph import Graph
from rlx.passes.capabilities import Layouts
from rlx.passes.layout import weight_bytes, weight_table
from rlx.passes.outline import Experts, experts_of, outline


@dataclass(frozen=True)
class CpuExperts:
    """The experts of a model that the CPU computes.

    Attributes:
        graph: the model.
        layouts: of the card.
        chosen: in how many layers, if the caller says so; None to find it.
        lacking: bytes of weights on the card -> bytes of memory that it then lacks; 0 if the model fits.
        calls_host: whether the device can leave experts to the CPU.
    """

    graph: Graph
    layouts: Layouts
    chosen: int | None
    lacking: Callable[[int], int]
    calls_host: bool

    @cached_property
    def layers(self) -> list[Experts]:
        """The experts of each layer that has some; none if the device computes all of them."""
        return experts_of(self.graph) if self.calls_host else []

    @cached_property
    def n(self) -> int:
        """The number of layers: what the user says, else the fewest with which the rest fits the card."""
        if self.chosen is not None:
            return min(self.chosen, len(self.layers))
        fits = (n for n in range(len(self.layers)) if not self.lacking(self.card_bytes(n)))
        return next(fits, len(self.layers))

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of their weights."""
        return frozenset(name for each in self._last(self.n) for name in each.weights)

    def placed(self, graph: Graph) -> Graph:
        """A variant of the model, in which nodes `call` stand for these experts."""
        return outline(graph, self.weights)

    def card_bytes(self, n: int) -> int:
        """Bytes of the card's memory that weights take, if the CPU computes the experts of the last n layers."""
        there = {name for each in self._last(n) for name in each.weights}
        return weight_bytes({name: row for name, row in self._table.items() if name not in there}, self.layouts)

    def hint(self, short: int) -> str:
        """What helps if the card lacks `short` bytes; "" if the experts that it still has take fewer."""
        now, more = self.card_bytes(self.n), range(self.n + 1, len(self.layers) + 1)
        found = next((n for n in more if now - self.card_bytes(n) >= short), 0)
        return f"Give n_cpu_moe={found}: the CPU then computes the experts of {found} layers." if found else ""

    def _last(self, n: int) -> list[Experts]:
        return self.layers[len(self.layers) - n :]

    @cached_property
    def _table(self) -> dict[str, dict[str, object]]:
        return weight_table(self.graph, self.layouts)
