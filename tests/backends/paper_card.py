"""A card on paper: the passes, the layouts and the code of the device "cuda", with each op computed by its meaning.

It holds what can be held without a card: every kernel becomes PTX, and values lie where the kernels look for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from far import FarMemory

from rlx import backends
from rlx.backends.cuda import backend as cuda
from rlx.backends.cuda import build, compile_only, layouts
from rlx.backends.cuda import target as cards
from rlx.backends.cuda.formats import CardFormats
from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer
from rlx.backends.memory import Buffer, Bytes
from rlx.backends.program import Manifest
from rlx.backends.reference.backend import Alone, ReferenceProgram
from rlx.backends.reference.evaluate import Weights
from rlx.ir.dtypes import DType
from rlx.passes import pipeline


class PaperProgram(ReferenceProgram):
    """Computes each op by its meaning, over its own view of the memory."""

    def bytes_of(self, buffer: Buffer) -> Bytes:
        return BACKEND.memory.see(buffer)


class PaperTarget(cards.Target):
    """A kind of card that is not there."""

    @property
    def backend(self) -> Backend:
        return BACKEND


class PaperCard(Backend):
    """The device "paper".

    Attributes:
        level: of the card.
        cards: how many there are.
        ptx: PTX of all programs, by the name of its module.
        manifests: of all programs.
    """

    name, memory, level, cards = "paper", FarMemory(), "sm_90", 1
    native_loops = True

    def __init__(self) -> None:
        self.ptx: dict[str, str] = {}
        self.manifests: list[dict[str, Any]] = []

    def passes(self, phase: str) -> tuple[pipeline.Pass, ...]:
        return cuda.BACKEND.passes(phase)

    def target(self, level: str | None = None) -> PaperTarget:
        capabilities = cards.capabilities_of(self.cards)
        return PaperTarget(self.level, capabilities=capabilities, numbers=tuple(range(self.cards)))

    def build(self, program: Lowered, target: Any, on_kernel: OnKernel) -> Built:
        built = build.build_program(program, target, on_kernel, None)
        self.manifests.append(built.manifest)
        self.ptx |= {name: str(text) for name, text in built.files.items() if name.endswith(".ptx")}
        return built

    def assembly(self, text: str, target: Any, form: str | None = None) -> str:
        return compile_only.backend_of((0,)).assembly(text, target, form)

    def load(self, stored: Loadable) -> Code:
        lowered = pipeline.place(stored.graph(), stored.options)
        return Code(partial(PaperProgram, lowered, stored.manifest, self.memory), 0)

    def workers(self, count: int, builder: Builder) -> Alone:
        return Alone(Weights(CardFormats(layouts.LAYOUTS)))

    def formats(self, manifest: Manifest) -> CardFormats:
        return CardFormats(layouts.LAYOUTS)

    def packer(self, dtype: DType, workers: Any, builder: Builder) -> Packer:
        def pack(raw: np.ndarray[Any, Any], target: Buffer, n: int, k: int) -> None:
            target.write(layouts.pack(dtype, raw.reshape(-1), n, k))

        return Packer(partial(layouts.matrix_bytes, dtype), pack)


BACKEND = PaperCard()


@contextmanager
def registered() -> Iterator[PaperCard]:
    """The device is there, in a `with` block."""
    backends.register("paper", __name__)
    try:
        yield BACKEND
    finally:
        del backends.MODULES["paper"]
