"""Launches: kernels, what their pointers are, how many blocks they have, and what each block computes for itself."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from rlx.backends.cuda.code import Code, Kernel, Own, kernel_of
from rlx.backends.cuda.features import Features
from rlx.backends.cuda.kernels.cards import Part
from rlx.backends.cuda.layouts import LAYOUTS, CardLayouts
from rlx.backends.sizes import static
from rlx.errors import CompileError
from rlx.ir import dims
from rlx.ir.dims import Bounds, DimLike
from rlx.ir.node import Node
from rlx.passes.program import maker, root

#: What pointers of a kernel may be beside operands: the result of the node, memory for what its blocks pass on, the
#: same with a size per range of positions, and counters, which are 0 between kernels.
RESULT, SCRATCH, PER_RANGE, COUNTERS = -1, -2, -3, -4

#: More than any count.
ANY = 1 << 62


@dataclass(frozen=True)
class Blocks:
    """How many blocks a launch has: ceil(count / per) * times, and once more for each range of positions if `split`.

    None unless the count is from `least` to `most`: another kernel then serves.
    """

    count: DimLike
    per: int = 1
    times: int = 1
    split: bool = False
    least: int = 0
    most: int = ANY


#: What a pointer of a kernel is: a value, or one of the numbers above.
Arg = Node | int


class Body(ABC):
    """What a kernel does, as data: that of equal ones is the same."""

    @abstractmethod
    def __call__(self, k: Code) -> None:
        """Writes the kernel."""


@dataclass(frozen=True)
class Launch:
    """A kernel of a node.

    Attributes:
        kernel: it is.
        args: its parameters.
        blocks: how many.
        scratch: bytes of each piece of memory among the pointers that is neither operand nor result.
        counters: how many it has.
        split: whether each card computes a part of the result, and writes it on all cards.
    """

    kernel: Kernel
    args: tuple[Arg, ...]
    blocks: Blocks
    scratch: DimLike = 0
    counters: DimLike = 0
    split: bool = False


@dataclass(frozen=True)
class Context:
    """What selection knows beside a node.

    Attributes:
        symbols: of the program.
        bounds: of its symbols.
        features: what the card has.
        deterministic: whether the arithmetic of a row must not depend on the number of rows: no kernels for many rows.
        exact: whether the precision is "exact".
        layouts: which part of a matrix a card has.
        places: values of the region that each block computes for itself, and where they are in shared memory.
        own: the launches that compute them, in order.
        start: first byte of shared memory that is free.
        inner: whether the kernel is one of these itself.
        weights: bytes of the matrices of all linears of the region, which run side by side.
        outputs: of these linears.
    """

    symbols: tuple[str, ...]
    bounds: Bounds
    features: Features
    deterministic: bool = False
    exact: bool = False
    layouts: CardLayouts = LAYOUTS
    places: Mapping[Node, int] = field(default_factory=dict)
    own: Mapping[Node, Launch] = field(default_factory=dict)
    start: int = 0
    inner: bool = False
    weights: int = 0
    outputs: int = 0

    def part(self, n: int) -> Part:
        """What a card has of a matrix with `n` outputs."""
        return Part(self.layouts.own_rows(n), n)

    def kernel(
        self, op: str, pointers: Mapping[str, int | None], body: Callable[[Code], None], own: Sequence[Launch] = (),
        soon: Sequence[tuple[int, int]] = (), *, split: bool = False,
    ) -> Kernel:  # fmt: skip
        """A kernel, named by its op and a digest of its text. That of a `Body` is made once."""
        assert not (split and self.inner), "what a block computes for itself is not split"
        each = tuple(Own(some.kernel, some.blocks.count, some.blocks.per, some.blocks.times) for some in own)
        start = self.start if own or self.inner else 0
        features = replace(self.features, overlaps=self.features.overlaps and not self.inner)
        make = _kernel if isinstance(body, Body) else _kernel.__wrapped__
        peers = self.layouts.cards - 1 if split else 0
        return make(op, tuple(pointers.items()), body, self.symbols, features, each, tuple(soon), start, peers)

    def launch(
        self, n: Node, op: str, args: Mapping[str, Arg], blocks: Blocks, body: Callable[[Code], None],
        scratch: DimLike = 0, counters: DimLike = 0, takes: Set[Node] = frozenset(), *, split: bool = False,
    ) -> Launch:  # fmt: skip
        """A kernel of a node with its pointers.

        Args:
            split: see `Launch`; the result is then its pointer "out".
            takes: nodes among those that each block computes for itself that this kernel computes in its own way.
        """
        places = {name: self._place(n, arg) for name, arg in args.items()}
        own = [] if self.inner else [self.own[node] for node in self.needed(args.values()) if node not in takes]
        given = [arg for name, arg in args.items() if places[name] is None]
        given += chain.from_iterable(each.args for each in own)
        soon = [(i, nbytes) for i, arg in enumerate(given) if (nbytes := _soon(arg))] if not self.inner else []
        kernel = self.kernel(op, places, body, own, soon, split=split)
        return Launch(kernel, tuple(given), blocks, scratch, counters, split)

    def _place(self, n: Node, arg: Arg) -> int | None:
        if isinstance(arg, Node):
            return self.places.get(root(arg))
        return self.places.get(n) if arg == RESULT and self.inner else None

    def needed(self, args: Iterable[Arg]) -> list[Node]:
        """What each block computes for itself to find these values, in order."""
        found, waiting = set[Node](), [arg for arg in args if isinstance(arg, Node)]
        while waiting:
            node = maker(waiting.pop())
            if node in self.own and node not in found:
                found.add(node)
                waiting += node.inputs
        return [node for node in self.own if node in found]

    def most(self, dim: DimLike) -> int:
        """The largest value of a dim."""
        return dims.bounds(dim, self.bounds)[1]


@lru_cache(maxsize=256)
def _kernel(
    op: str, pointers: tuple[tuple[str, int | None], ...], body: Callable[[Code], None], symbols: tuple[str, ...],
    features: Features, own: tuple[Own, ...], soon: tuple[tuple[int, int], ...], start: int, peers: int,
) -> Kernel:  # fmt: skip
    code = Code("KERNEL", dict(pointers), symbols, features, own, soon, start)
    if peers:
        code.pointers["out"] = replace(code.pointers["out"], peers=peers)
    body(code)
    kernel = kernel_of(code)
    if kernel.shared > features.shared:
        what = f"a block of {op} takes {kernel.shared} bytes of shared memory, of {features.shared} of this card"
        raise CompileError(what, where="device cuda", hint='Choose another card, or device="cpu".')
    name = f"{op}_{hashlib.sha256(kernel.text.encode()).hexdigest()[:16]}"
    return replace(kernel, name=name, text=kernel.text.replace("@KERNEL", f"@{name}"))


def _soon(arg: Arg) -> int:
    """Bytes of a weight that is no matrix: every block reads all of it, or some."""
    if not isinstance(arg, Node) or arg.op != "weight" or len(arg.shape) != 1:
        return 0
    return arg.dtype.size((static(arg, 0),))
