"""Encoders: float32 numbers to the bytes of a GGUF type, compiled and run by worker threads.

Part of the export stage: `quantize.py` chooses a tensor's type, this module encodes its values, `model.py` writes
them. An encoder is a loop kernel like those that pack weights: it uses the compile cache, and workers share its blocks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.backends.device import Loop
from rlx.closing import Closing
from rlx.compiler.compile import Compiler, worker_count
from rlx.errors import ArgumentError, WeightError
from rlx.export import k_quants
from rlx.export import simple_quants as simple
from rlx.export.model import ExportTensor, Planned
from rlx.ir.dtypes import BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, U8, DType
from rlx.store.cache import CompileCache
from rlx.store.key import digest_text

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
        kernel: the kernel's function.
        holes: values for its holes.
        by_importance: more of them, with which it reads the weights of numbers; None if it makes no use of weights.
    """

    unit: int
    limit: float
    kernel: Callable[..., Any]
    holes: Mapping[str, Any]
    by_importance: Mapping[str, Any] | None = None


def _search(tries: int, first: float, gap: float) -> dict[str, Any]:
    """How many steps are tried, the first, and their distance (see `k_quants.py`)."""
    return {"TRIES": tries, "FIRST": first, "GAP": gap, "SIGNED": False}


_WEIGHTED, _ALIKE = {"WEIGHT": k_quants.weighted}, {"WEIGHT": k_quants.unweighted}
_LINES = {"ROUNDS": 2, **_ALIKE}
_SCALES = {"STEP": k_quants.best_scale, "GROUP": 32, **_WEIGHTED}

#: Every type with an encoder. Twice the search of a K type would lower the error by only a few thousandths of it.
ENCODERS: dict[DType, Encoder] = {
    F16: Encoder(1024, _HALF, simple.encode_halves, {"CONVERT": simple.f32_to_f16}),
    BF16: Encoder(1024, float.fromhex("0x1.FEp127"), simple.encode_halves, {"CONVERT": simple.f32_to_bf16}),
    Q8_0: Encoder(32, 127 * _HALF, simple.encode_q8_0, {}),
    Q4_0: Encoder(
        32, 8 * _HALF, simple.encode_q4_0, {"BYTES": 18, "ZERO": 8, "STEP": simple.step_of_largest},
        _SCALES | _search(32, -2.0, 0.12),
    ),
    Q5_0: Encoder(
        32, 16 * _HALF, simple.encode_q5_0, {"BYTES": 22, "ZERO": 16, "STEP": simple.step_of_largest},
        _SCALES | _search(32, -4.0, 0.18),
    ),
    Q5_1: Encoder(
        32, _HALF, simple.encode_q5_1, {"BYTES": 24, "LINE": simple.line_of_range},
        {"LINE": k_quants.fit_line, "TOP": 31, **_WEIGHTED} | _search(32, -5.0, 0.18) | {"SIGNED": True},
    ),
    Q4_K: Encoder(
        256, 60 * _HALF, k_quants.encode_lines,
        {"TOP": 15, "BYTES": 144, "WRITE": k_quants.write_q4_k} | _LINES | _search(32, -3.0, 0.12), _WEIGHTED,
    ),
    Q5_K: Encoder(
        256, 60 * _HALF, k_quants.encode_lines,
        {"TOP": 31, "BYTES": 176, "WRITE": k_quants.write_q5_k} | _LINES | _search(32, -5.0, 0.18), _WEIGHTED,
    ),
    Q6_K: Encoder(
        256, 3900 * _HALF, k_quants.encode_q6_k,
        {"BYTES": 210, "GROUP": 16, "ZERO": 32} | _LINES | _search(40, -8.0, 0.22), _WEIGHTED,
    ),
}  # fmt: skip


def encoder(dtype: DType, by_importance: bool = False) -> Loop:
    """The loop kernel from f32 numbers to the bytes of a type. Buffers x, the weights w where the type has a use for
    them, and out; F16 and BF16 also have n, the count of numbers.

    Raises:
        ArgumentError: there is no encoder for this type.
    """
    found = _encoder(dtype)
    floats, weighs = dtype in (F16, BF16), found.by_importance is not None
    more = found.by_importance if by_importance else None
    return Loop(
        name=f"{dtype.name}{' by importance' if more else ''}",
        what=f"the encoder of {dtype.name}",
        kind="encode",
        version=_source_digest(),
        function=lambda: (found.kernel, {**found.holes, **(more or {})}),
        buffers=[("x", F32), *([("w", F32)] if weighs else []), ("out", dtype if floats else U8)],
        extents=("n",) if floats else (),
    )


@cache
def _source_digest() -> str:
    """Digest of the encoders' sources, which the keys of other programs do not include."""
    modules = (k_quants, simple, sys.modules[__name__])
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
        self._loops: dict[tuple[DType, bool], Callable[..., None]] = {}

    def pieces(self, values: Floats, dtype: DType, name: str, weights: Floats | None = None) -> Iterator[Bytes]:
        """The bytes of a tensor in order, a slice at a time.

        Args:
            values: float32 of any shape; rows are along the last axis.
            dtype: F32 or a type in `ENCODERS`.
            name: name of the tensor, for messages.
            weights: how much the squared error of each column counts, float32 [matrices, columns], all above 0, where
                the tensor is a stack of so many matrices; None if all count the same. Some types make no use of it.

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
            own = None if weights is None else _spread(weights, values.shape, start, part.size)
            yield part.view(np.uint8) if dtype is F32 else self._encode(part, dtype, own)

    def planned(self, tensor: ExportTensor, dtype: DType, weights: Floats | None = None) -> Planned:
        """The output of a tensor: its bytes unchanged if it has the type already, otherwise encoded ones.

        Args:
            weights: as for `pieces`.
        """

        def pieces() -> Iterator[Bytes]:
            if tensor.raw is not None and dtype is tensor.dtype:
                data = tensor.raw()
                yield from (data[start : start + COPY] for start in range(0, data.size, COPY))
            else:
                yield from self.pieces(tensor.values(), dtype, tensor.name, weights)

        return Planned(tensor.name, tensor.shape, dtype, pieces)

    def encode(self, values: Floats, dtype: DType, name: str = "tensor", weights: Floats | None = None) -> Bytes:
        """The bytes of a tensor, 1-D uint8: `pieces` in one array."""
        return np.concatenate([np.empty(0, np.uint8), *self.pieces(values, dtype, name, weights)])

    def _encode(self, flat: Floats, dtype: DType, weights: Floats | None) -> Bytes:
        out = np.empty(dtype.size(flat.shape), np.uint8)
        units = -(-flat.size // ENCODERS[dtype].unit)
        extents = [flat.size] if dtype in (F16, BF16) else []
        weighs = ENCODERS[dtype].by_importance is not None
        key = dtype, weighs and weights is not None
        if key not in self._loops:
            self._loops[key] = self.compiler.backend.loop(encoder(*key), self.pool, self.compiler)
        given = [flat if weights is None else weights] if weighs else []  # without weights nobody reads them
        self._loops[key](flat, *given, out, *extents, units)
        return out

    def close(self) -> None:
        self.pool.close()


def _spread(weights: Floats, shape: tuple[int, ...], start: int, count: int) -> Floats:
    """The weights of `count` numbers of a tensor from the number `start` on."""
    columns = shape[-1]
    rows = np.arange(start // columns, (start + count - 1) // columns + 1)
    matrices = rows // (prod(shape[:-1]) // len(weights))
    first = start - int(rows[0]) * columns
    return np.ascontiguousarray(weights[matrices].reshape(-1)[first : first + count])


def _check(part: Floats, limit: float, dtype: DType, name: str) -> None:
    """Checks minimum and maximum: both are NaN if any number is."""
    low, high = float(part.min()), float(part.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        hint = "The file is damaged, or the model was saved wrongly: download or convert it again."
        raise WeightError(f"the tensor holds {low if not np.isfinite(low) else high}", where=name, hint=hint)
    if max(-low, high) > limit:
        what = f"the tensor holds {low if -low > high else high:g} and {dtype} ends at {limit:g}"
        raise WeightError(what, where=name, hint="Choose BF16 or F32.")
