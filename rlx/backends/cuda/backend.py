"""The CUDA backend: kernels for NVIDIA cards, from LLVM's PTX and the driver's linker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rlx import env
from rlx.backends import cuda
from rlx.backends.cuda import clocks, driver, layouts, packing, ptx, target
from rlx.backends.cuda.agreed.steps import MANY_ROWS, MOST_CARDS
from rlx.backends.cuda.chooser import Chooser, compiled
from rlx.backends.cuda.driver import Loaded
from rlx.backends.cuda.formats import CardFormats
from rlx.backends.cuda.memory import CardMemory, opened
from rlx.backends.cuda.program import CardProgram, Stream
from rlx.backends.cuda.steps import CardCode
from rlx.backends.cuda.target import Target, dotted
from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer, Workers
from rlx.backends.program import Manifest
from rlx.errors import TargetError
from rlx.ir.dtypes import DType
from rlx.sampling.choice import Choose
from rlx.store.key import compiler_versions

if TYPE_CHECKING:
    from rlx.passes.pipeline import Pass

#: How many cards can compute together.
COUNTS = (1, 2, 4, MOST_CARDS)


class Cuda(Backend):
    """The device "cuda": the first card, or the one or those that its name tells.

    Args:
        numbers: of the cards. One that comes twice is taken as two cards.
    """

    native_loops = True
    batch_rows = 8, 32, MANY_ROWS, 512  # those of more rows than `MANY_ROWS` have other kernels, and other tiles
    call_rows, shared_rows = (MANY_ROWS, 2048), 2048

    def __init__(self, numbers: tuple[int, ...] = (0,)) -> None:
        self.name = "cuda" if numbers == (0,) else f"cuda:{','.join(map(str, numbers))}"
        self.numbers, self.cards = numbers, cache(partial(opened, numbers))
        self.memory, self.calls_host = CardMemory(self.cards), len(numbers) == 1

    def versions(self) -> Mapping[str, Any]:
        return compiler_versions()

    def passes(self, phase: str) -> tuple[Pass, ...]:
        """The usual ones, but for which activations are rounded."""
        return cuda.passes.passes(phase, len(self.numbers))

    def target(self, level: str | None = None) -> Target:
        """The card; with a level such as "sm_80" that card, whose code is only looked at if this one does not run it.

        RLX_TARGET is the level by default. Levels of other devices mean nothing.
        """
        chosen = level or env.target() or ""
        if not chosen.startswith("sm_"):
            return target.of_cards(self.cards(), self.numbers)
        named = target.named(chosen, self.numbers)
        try:
            return target.as_level(target.of_cards(self.cards(), self.numbers), named)
        except TargetError:
            return named

    def description(self) -> str:
        """The card, its machine language, the CUDA version of the driver, and how many cards there are."""
        found, count = target.of_cards(self.cards(), self.numbers), driver.count()
        more = f", {count} cards" if count > 1 else ""
        return f"{self.cards()[0].name}, {found.level}, CUDA {dotted(found.driver)}{more}"

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
        return cuda.build.build_program(program, target, on_kernel, self._linked)

    def _linked(self, text: str) -> bytes:
        self.cards()[0].use()
        return driver.link(text)

    def load(self, stored: Loadable) -> Code:
        code = CardCode(self.cards(), stored.manifest, stored.files.read)
        return Code(partial(CardProgram, code, stored.manifest, self.memory), code.nbytes)

    def workers(self, count: int, builder: Builder) -> Workers:
        """The stream of each card, whatever the count."""
        return Stream(self.cards(), self.memory)

    def packer(self, dtype: DType, workers: Stream, builder: Builder) -> Packer:
        loaded, lie = self._packing(dtype, builder), builder.target.layouts
        return Packer(partial(lie.matrix_bytes, dtype), packing.packing(dtype, workers.rings, loaded, lie))

    def prepare_packing(self, dtypes: Iterable[DType], builder: Builder) -> None:
        for loaded in [self._packing(dtype, builder) for dtype in dtypes]:
            loaded()

    def _packing(self, dtype: DType, builder: Builder) -> Callable[[], Sequence[Loaded]]:
        """Begins to make the kernel that packs a type."""
        return packing.begun(partial(packing.kernel, builder, dtype, self._linked, self.cards()))

    def prepare_choosing(self, builder: Builder) -> None:
        self._choosing(builder)

    def chooser(self, workers: Stream, builder: Builder) -> Choose:
        kernels = partial(self._choosing, builder)
        chooser = Chooser(self.cards(), self.memory, kernels, overlaps=builder.target.features.overlaps)
        workers.owns(chooser.close)
        return chooser

    def _choosing(self, builder: Builder) -> list[list[Loaded]]:
        return compiled(builder, self._linked, self.cards())

    def bandwidth(self, workers: Stream, nbytes: int) -> float:
        return clocks.copy_bandwidth(self.cards()[0], nbytes) * len({*self.numbers})

    def peaks(self, workers: Stream, builder: Builder) -> dict[str, float]:
        one = clocks.peaks(self.cards()[0], builder.target.level)
        return {kind: rate * len({*self.numbers}) for kind, rate in one.items()}

    def assembly(self, text: str, target: Target, form: str | None = None) -> str:
        """The PTX of a module, and with "sass" the machine code that it becomes."""
        code = ptx.compiled([text], target.level, target.ptx)[0]
        return cuda.sass.disassembled(self._linked(code)) if form == "sass" else code

    def formats(self, manifest: Manifest) -> CardFormats:
        return CardFormats(layouts.LAYOUTS)

    def levels(self) -> list[str]:
        return list(target.LEVELS)


BACKEND = Cuda()


@cache
def backend_of(numbers: tuple[int, ...]) -> Cuda:
    """The backend of some cards."""
    return BACKEND if numbers == BACKEND.numbers else Cuda(numbers)


def chosen(which: str) -> Cuda:
    """The backend of the cards with these numbers, such as "0,1".

    Raises:
        TargetError: these are no numbers, or not so many as can compute together.
    """
    found = which.split(",")
    if not all(map(str.isdecimal, found)) or len(found) not in COUNTS:
        hint = f'Write device="cuda:0,1": the numbers of {", ".join(map(str, COUNTS))} cards.'
        raise TargetError(f"{which!r} names no cards", where="device cuda", hint=hint)
    return backend_of(tuple(map(int, found)))
