"""Options: what a caller may choose about a compile, and what the target can do. The compile key holds both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlx.errors import ArgumentError
from rlx.passes.capabilities import Capabilities

MAX_SLOTS = 1 << 20  # upper bound of SLOTS
MAX_PAST = 1 << 20  # upper bound of PAST_SEQ: a run-time scalar, so a generous bound costs nothing
MAX_CTX = 1 << 30  # upper bound of CTX and WINDOW_CTX: also of a pool that many sequences share
MAX_SEGMENTS = 64  # upper bound of SEGMENTS and OUTS, whose values have room in a program's memory
#: Groups of fusion rules, and what each joins.
FUSION_MEANINGS = {
    "custom": "custom ops replace the formulas that they fuse",
    "gated": "gate, activation and up of a feed-forward block become one linear",
    "bias": "a bias joins its linear",
    "residual": "a residual add joins its linear",
    "norm": "a norm joins the quantization of its result; other ops round their own result to bf16",
    "rope": "rotation takes the head norm before it and the cache write after it",
    "pick": "a greedy choice joins the head, which then writes no logits",
    "elementwise": "a chain of elementwise ops becomes one",
    "prologue": "with few rows, every worker computes norms and quantization itself, which saves a barrier",
}
FUSIONS = tuple(FUSION_MEANINGS)
#: The passes that may be left out, and what each does.
PASS_MEANINGS = {
    "simplify": "algebra: scales are multiplied out, x * sigmoid(x) becomes silu(x)",
    "last_row": "a prefill computes the head and most of the last layer for the last row only, a batch for chosen rows",
    "reuse_memory": "values share memory when they do not live at the same time",
}
PASSES = tuple(PASS_MEANINGS)
#: The last stages, which make a program of a graph.
BACKEND = ("schedule", "memory")


PRECISIONS = ("auto", "exact")


def check_precision(precision: str) -> None:
    """Raises `ArgumentError` unless it is one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision {precision!r} is unknown", hint='Choose "exact" or "auto".')


def phase(seq: tuple[int, int], segments: bool = False) -> str:
    """The phase of a program: "batch" for rows of several sequences, else "decode" for one row, "prefill" for more.

    Args:
        seq: (smallest, largest) number of rows.
        segments: whether rows belong to several sequences.
    """
    if segments:
        return "batch"
    return "decode" if seq == (1, 1) else "prefill"


@dataclass(frozen=True)
class Options:
    """The options of one program.

    Attributes:
        precision: "exact" computes with float32 activations. "auto" may round activations to int8 over quantized
            weights, and to bf16 as `bf16_dots` and `bf16_tiles` say.
        seq: (smallest, largest) number of rows of a call. If both are equal, SEQ is a constant.
        all_rows: whether outputs keep all rows; if not, their last row only.
        fusions: the groups of fusion rules that run, of `FUSIONS`. "prologue" belongs to the pass `schedule`.
        passes: the optional passes that run, of `PASSES`.
        symbols: bounds of further symbols: name -> (lowest, highest).
        segments: whether rows belong to several sequences, see `rlx.ir.segments`.
        paged: whether full caches are pools of pages, see `rlx.ir.segments`.
        whole: outputs that keep all rows even without `all_rows`.
        packed: tables that are packed although the graph only looks rows up, because another graph of the model
            multiplies them.
        bf16_dots: whether activations may be bf16 over bf16 and f16 weights and 16-bit caches, if the target has bf16
            dot products.
        bf16_tiles: whether activations may be bf16 over quantized weights, and bf16 experts multiplied in tiles, if the
            target has tiles.
        deterministic: whether the arithmetic of a row must not depend on the number of rows of a call. Where it never
            does, the option has no effect.
        capabilities: those of the target, which the compile key describes.

    Raises:
        ArgumentError: an option has no such value.
    """

    precision: str = "auto"
    seq: tuple[int, int] = (1, 1)
    all_rows: bool = False
    fusions: tuple[str, ...] = FUSIONS
    passes: tuple[str, ...] = PASSES
    symbols: tuple[tuple[str, tuple[int, int]], ...] = field(default=())
    segments: bool = False
    paged: bool = False
    whole: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    bf16_dots: bool = True
    bf16_tiles: bool = True
    deterministic: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if not 1 <= self.seq[0] <= self.seq[1]:
            hint = "Give (smallest, largest), both at least 1."
            raise ArgumentError(f"a bucket {self.seq} is no range of row counts", hint=hint)
        if self.segments and self.seq[0] == self.seq[1]:
            raise ArgumentError(f"a batch of {self.seq[0]} rows and no other", hint="Give a range of row counts.")
        for name, (low, high) in self.symbols:
            if low > high:
                raise ArgumentError(f"the bounds {low}..{high} are no range", where=f"symbol {name}")
        for what, given, known in (("fusions", self.fusions, FUSIONS), ("passes", self.passes, PASSES)):
            if unknown := set(given) - set(known):
                raise ArgumentError(f"unknown {what} {sorted(unknown)}", hint=f"Known: {', '.join(known)}.")

    @property
    def phase(self) -> str:
        return phase(self.seq, self.segments)

    @property
    def decodes(self) -> bool:
        """Whether every row is computed with the arithmetic of a decode step: a single row, or a batch of few."""
        return self.phase == "decode" or (self.segments and self.seq[0] < self.capabilities.bf16_rows)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Bounds of every symbol."""
        pages = (1, MAX_PAST // self.capabilities.layouts.page)
        usual = {"SEQ": self.seq, "PAST_SEQ": (0, MAX_PAST), "PAGES": pages, "SLOTS": (1, MAX_SLOTS)}
        usual |= dict.fromkeys(("CTX", "WINDOW_CTX"), (16, MAX_CTX))
        usual |= dict.fromkeys(("SEGMENTS", "OUTS"), (1, min(self.seq[1], MAX_SEGMENTS)))
        return {**usual, **dict(self.symbols)}

    def effective(self, capabilities: Capabilities) -> Options:
        """The options for a target, without those that have no effect on it: equal programs have equal options.

        For example, on a CPU without tiles every program is deterministic. With tiles, only calls of enough rows round
        activations to bf16 over quantized weights. `rlx.passes.pipeline` goes further: it knows the graph.
        """
        differs = capabilities.many_differ or (capabilities.bf16_tiles and self.precision != "exact")
        same = self.deterministic or not differs
        few = replace(self, capabilities=capabilities).decodes
        rounds = self.precision == "auto"
        keeps_all = self.all_rows or self.seq[1] == 1
        return replace(
            self,
            fusions=tuple(name for name in FUSIONS if name in self.fusions),
            passes=tuple(name for name in PASSES if name in self.passes and not (keeps_all and name == "last_row")),
            symbols=tuple(sorted(self.symbols)),
            bf16_dots=self.bf16_dots and capabilities.bf16_dots and rounds and (same or self.phase != "decode"),
            bf16_tiles=self.bf16_tiles and capabilities.bf16_tiles and rounds and not (same or few),
            deterministic=same,
            capabilities=capabilities,
        )
