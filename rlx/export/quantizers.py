"""Encoders: float32 numbers to the bytes of a GGUF type, compiled and run by worker threads.

Part of the export stage: `mix.py` chooses a tensor's type, this module encodes its values, `writer.py` writes them. An
encoder is a loop kernel like those that pack weights: it uses the compile cache, and workers share its blocks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.device import Loop
from rlx.compiler.compile import Compiler
from rlx.compiler.limits import worker_count
from rlx.errors import ArgumentError, WeightError
from rlx.export import k_quants, simple_quants
from rlx.export.model import ExportTensor
from rlx.export.writer import Planned
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, U8, DType
from rlx.store.cache import CompileCache
from rlx.store.key import digest_text
from rlx.weights.mapped import Closing

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SLICE = 4 << 20  # numbers encoded at a time: limits memory, and the delay of an interrupt
COPY = 16 << 20  # bytes copied at a time
_HALF = 65504.0  # the greatest half-precision number


@dataclass(frozen=True)
class Encoder:
    """The parameters of an encoder.

    Attributes:
        unit: numbers per unit of the kernel.
        limit: greatest magnitude that the type can represent.
        kernel: name of the kernel's function.
        holes: values for the kernel's holes; helpers by their names.
        search: for a K type: how many steps are tried, the first, their distance (see `k_quants.py`).
    """

    unit: int
    limit: float
    kernel: str
    holes: Mapping[str, Any]
    search: tuple[int, float, float] | None = None


#: Every type with an encoder. Twice the search of a K type would lower the error by only a few thousandths of it.
ENCODERS: dict[DType, Encoder] = {
    F16: Encoder(1024, _HALF, "encode_halves", {"CONVERT": "f32_to_f16"}),
    BF16: Encoder(1024, float.fromhex("0x1.FEp127"), "encode_halves", {"CONVERT": "f32_to_bf16"}),
    Q8_0: Encoder(32, 127 * _HALF, "encode_q8_0", {}),
    Q4_0: Encoder(32, 8 * _HALF, "encode_q4_0", {"BYTES": 18, "ZERO": 8}),
    Q5_0: Encoder(32, 16 * _HALF, "encode_q5_0", {"BYTES": 22, "ZERO": 16}),
    Q5_1: Encoder(32, _HALF, "encode_q5_1", {"BYTES": 24}),
    Q4_K: Encoder(256, 60 * _HALF, "encode_lines", {"TOP": 15, "BYTES": 144, "WRITE": "write_q4_k"}, (32, -3.0, 0.12)),
    Q5_K: Encoder(256, 60 * _HALF, "encode_lines", {"TOP": 31, "BYTES": 176, "WRITE": "write_q5_k"}, (32, -5.0, 0.18)),
    Q6_K: Encoder(256, 3900 * _HALF, "encode_q6_k", {"BYTES": 210}, (40, -8.0, 0.22)),
}
ROUNDS = 2


def encoder(dtype: DType) -> Loop:
    """The loop kernel from f32 numbers to the bytes of a type. Buffers x, out; F16 and BF16 also have n, the count of
    numbers.

    Raises:
        ArgumentError: there is no encoder for this type.
    """
    _encoder(dtype)
    floats = dtype in (F16, BF16)
    return Loop(
        name=dtype.name,
        what=f"the encoder of {dtype.name}",
        kind="encode",
        version=_source_digest(),
        function=partial(_kernel, dtype),
        buffers=[("x", F32), ("out", dtype if floats else U8)],
        extents=("n",) if floats else (),
    )


def _kernel(dtype: DType) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of an encoder, and the values of its holes."""
    encoder = _encoder(dtype)
    module = simple_quants if encoder.search is None else k_quants
    holes = {name: getattr(module, value) if isinstance(value, str) else value for name, value in encoder.holes.items()}
    if encoder.search is not None:
        holes |= {**dict(zip(("TRIES", "FIRST", "GAP"), encoder.search, strict=True)), "ROUNDS": ROUNDS}
    return getattr(module, encoder.kernel), holes


@cache
def _source_digest() -> str:
    """Digest of the encoders' sources, which the keys of other programs do not include."""
    modules = (k_quants, simple_quants, sys.modules[__name__])
    return digest_text("".join(map(inspect.getsource, modules)))[:16]


def _encoder(dtype: DType) -> Encoder:
    if dtype not in ENCODERS:
        raise ArgumentError(f"no encoder makes {dtype}", hint=f"There are {', '.join(map(str, [F32, *ENCODERS]))}.")
    return ENCODERS[dtype]


class Quantizer(Closing):
    """Encodes tensors with worker threads; a context manager that stops them.

    Args:
        threads: number of workers; by default RLX_THREADS or the physical cores that this process may use.
        cache: the cache for compiled encoders; by default the shared compile cache.

    Raises:
        ArgumentError: `threads` is out of range.
    """

    def __init__(self, threads: int | None = None, cache: CompileCache | None = None) -> None:
        self.compiler = Compiler(cache=cache)
        self.pool = self.compiler.workers(worker_count(threads))
        self._loops: dict[DType, Callable[..., None]] = {}

    def pieces(self, values: Floats, dtype: DType, name: str) -> Iterator[Bytes]:
        """The bytes of a tensor in order, a slice at a time.

        Args:
            values: float32 of any shape; rows are along the last axis.
            dtype: F32 or a type in `ENCODERS`.
            name: name of the tensor, for messages.

        Raises:
            ArgumentError: there is no encoder for this type.
            WeightError: a row is not a multiple of the type's block, or a number is not finite or beyond the type's
                range.
        """
        if values.ndim == 0 or values.shape[-1] % dtype.block:
            what = f"rows of {values.shape[-1] if values.ndim else 1} numbers are no multiple of the {dtype.block}"
            raise WeightError(f"{what}-number blocks of {dtype}", where=name)
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        limit = float(np.finfo(np.float32).max) if dtype is F32 else _encoder(dtype).limit
        for start in range(0, flat.size, SLICE):
            part = flat[start : start + SLICE]
            _check(part, limit, dtype, name)
            yield part.view(np.uint8) if dtype is F32 else self._encode(part, dtype)

    def planned(self, tensor: ExportTensor, dtype: DType) -> Planned:
        """The output of a tensor: its bytes unchanged if it has the type already, otherwise encoded ones."""

        def pieces() -> Iterator[Bytes]:
            if tensor.raw is not None and dtype is tensor.dtype:
                data = tensor.raw()
                yield from (data[start : start + COPY] for start in range(0, data.size, COPY))
            else:
                yield from self.pieces(tensor.values(), dtype, tensor.name)

        return Planned(tensor.name, tensor.shape, dtype, pieces)

    def encode(self, values: Floats, dtype: DType, name: str = "tensor") -> Bytes:
        """The bytes of a tensor, 1-D uint8: `pieces` in one array."""
        return np.concatenate([np.empty(0, np.uint8), *self.pieces(values, dtype, name)])

    def _encode(self, flat: Floats, dtype: DType) -> Bytes:
        out = np.empty(dtype.size(flat.shape), np.uint8)
        units = -(-flat.size // ENCODERS[dtype].unit)
        extents = [flat.size] if dtype in (F16, BF16) else []
        if dtype not in self._loops:
            self._loops[dtype] = self.compiler.backend.loop(encoder(dtype), self.pool, self.compiler)
        self._loops[dtype](flat, out, *extents, units)
        return out

    def close(self) -> None:
        self.pool.close()


def _check(part: Floats, limit: float, dtype: DType, name: str) -> None:
    """Checks minimum and maximum: both are NaN if any number is."""
    low, high = float(part.min()), float(part.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        hint = "The file is damaged, or the model was saved wrongly: download or convert it again."
        raise WeightError(f"the tensor holds {low if not np.isfinite(low) else high}", where=name, hint=hint)
    if max(-low, high) > limit:
        what = f"the tensor holds {low if -low > high else high:g} and {dtype} ends at {limit:g}"
        raise WeightError(what, where=name, hint="Choose BF16 or F32.")
