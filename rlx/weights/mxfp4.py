"""MXFP4 checkpoints: joins the codes and the scales, which are two tensors in the file, into blocks of one format.

Weights stage. A stack of experts is `*_blocks` uint8 [E, n, k / 32, 16], two codes in a byte, the first in the low
half, and `*_scales` uint8 [E, n, k / 32], exponents. The result is the format `MXFP4` of `rlx.ir.dtypes`: the exponent,
then 16 bytes with codes 0 to 15 in the low halves and 16 to 31 in the high ones. Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlx.errors import WeightError
from rlx.ir.dtypes import MXFP4, U8
from rlx.weights.composed import Composed
from rlx.weights.loader import WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo

CODES_END, _SCALES_END = "_blocks", "_scales"
_HALF = MXFP4.block // 2


@dataclass(frozen=True, slots=True)
class Mxfp4(Composed):
    """A stack [E, n, k] of MXFP4 codes with its scales."""

    loader: WeightLoader
    scales: str

    def pieces(self) -> Iterator[Bytes]:
        count = self.info.shape[0]
        codes = self.loader.raw(self.info.name).reshape(count, -1, _HALF)
        scales = self.loader.raw(self.scales).reshape(count, -1, 1)
        for matrix, exponents in zip(codes, scales, strict=True):
            yield np.concatenate([exponents, _halves_apart(matrix)], axis=1).reshape(-1)

    def files(self) -> tuple[str, ...]:
        return self.info.name, self.scales


def mxfp4(loader: WeightLoader, name: str) -> Mxfp4:
    """The tensor of codes `name`, with its scales; `WeightError` if they do not fit."""
    info, scales = loader.tensors[name], name.removesuffix(CODES_END) + _SCALES_END
    if info.dtype is not U8 or len(info.shape) != 4 or info.shape[3] != _HALF:
        what = f"MXFP4 tensor {name!r} is {info.dtype}{list(info.shape)}, expected u8 [experts, n, k / 32, {_HALF}]"
        raise WeightError(what, where=loader.path)
    found = loader.tensors.get(scales)
    if found is None or (found.dtype, found.shape) != (U8, info.shape[:3]):
        there = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
        what = f"{scales!r}, the scales of {name!r}, is {there}, expected u8{list(info.shape[:3])}"
        raise WeightError(what, where=loader.path, hint="the checkpoint is incomplete or damaged: download it again")
    shape = (*info.shape[:2], info.shape[2] * MXFP4.block)
    return Mxfp4(TensorInfo(name, MXFP4, shape, MXFP4.size(shape)), loader, scales)


def _halves_apart(pairs: Bytes) -> Bytes:
    """uint8 [blocks, 16], two neighbours in a byte -> [blocks, 16], those of the first half in the low halves."""
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), 2, _HALF)
    found: Bytes = codes[:, 0] | codes[:, 1] << 4
    return found
