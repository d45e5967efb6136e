"""The device "cuda" for a kind of card that is not there: programs are compiled to look at their code, not to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

from rlx.backends.cuda import build, sass
from rlx.backends.cuda.backend import Cuda
from rlx.backends.cuda.target import Target
from rlx.backends.device import Builder, Built, Code, Loadable, Lowered, OnKernel, Packer
from rlx.backends.host import HOST
from rlx.backends.memory import Memory
from rlx.backends.program import Manifest, Program
from rlx.errors import TargetError
from rlx.ir.dtypes import DType
from rlx.sampling.choice import Choose


class CompileOnly(Cuda):
    """Cards that are not there. Its memory is that of the host, which takes none before something is written."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__(numbers)
        self.memory = HOST

    def build(self, program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
        return build.build_program(program, target, on_kernel, None)

    def _linked(self, text: str) -> bytes:
        return sass.assembled(text)

    def load(self, stored: Loadable) -> Code:
        texts = (stored.files.read(name) for name in stored.files.names if name.endswith(".ptx"))
        return Code(partial(_NotLoaded, stored.manifest, self.memory), sum(map(len, texts)))

    def workers(self, count: int, builder: Builder) -> _NoWorkers:
        return _NoWorkers()

    def packer(self, dtype: DType, workers: Any, builder: Builder) -> Packer:
        return Packer(partial(builder.target.layouts.matrix_bytes, dtype), partial(_refuse, builder.target.level))

    def prepare_packing(self, dtypes: Iterable[DType], builder: Builder) -> None:
        return

    def prepare_choosing(self, builder: Builder) -> None:
        return

    def chooser(self, workers: Any, builder: Builder) -> Choose:
        return partial(_refuse, builder.target.level)


backend_of = cache(CompileOnly)


@dataclass(frozen=True)
class _NoWorkers:
    """Who would run programs."""

    n: int = 1

    def close(self) -> None:
        """Nothing runs."""


class _NotLoaded(Program):
    """A program that is only looked at."""

    def __init__(self, manifest: Manifest, memory: Memory, workers: _NoWorkers) -> None:
        super().__init__(manifest, workers.n, memory)

    def launch(self) -> None:
        _refuse("another card")


def _refuse(level: str, *_: Any, **__: Any) -> NoReturn:
    what = f"code for {level} is there to look at: no card of this machine runs it"
    raise TargetError(what, where="device cuda", hint="Leave RLX_TARGET and `target` out for the card that is there.")
