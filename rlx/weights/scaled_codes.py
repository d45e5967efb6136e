"""FP8 and MXFP4 checkpoints: joins codes and scales, two tensors in the file, into blocks of one format.

Weights stage. An FP8 checkpoint has `weight` in F8_E4M3 [n, k] and one of two tensors of scales: `weight_scale_inv`,
with a scale for each block of rows and columns (`weight_block_size` of the configuration), or `weight_scale`, with one
for each row or for the whole matrix (compressed-tensors, fbgemm). Both are factors of the code, in spite of the name
"inv". The result is the format `F8_E4M3` of `rlx.ir.dtypes`: a float32 scale, then 32 codes. Scales of activations are
not read, because they do not change the weights.

A stack of MXFP4 experts is `*_blocks` uint8 [E, n, k / 32, 16], two codes in a byte, the first in the low half, and
`*_scales` uint8 [E, n, k / 32], exponents. The result is the format `MXFP4`: the exponent, then 16 bytes with codes 0
to 15 in the low halves and 16 to 31 in the high ones. Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.dtypes import F8_E4M3, MXFP4, U8
from rlx.ir.stored import FLOATS, to_float32
from rlx.weights.composed import Composed
from rlx.weights.loader import WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.quantization import block_size

SCALE_SUFFIXES = ("_scale_inv", "_scale")
_GROUP = F8_E4M3.block
_SCALE_BYTES = 4
_USE = "use the BF16 checkpoint or a GGUF file of the model"

Floats = npt.NDArray[np.float32]


def fp8(loader: WeightLoader, name: str) -> Composed:
    """A matrix [n, k], or a stack [E, n, k], of FP8 codes with its scales.

    Raises:
        WeightError: no scales, or scales whose shape does not fit the codes.
        UnsupportedModelError: a shape, or blocks of a size, that no format of rlx holds.
    """
    info = loader.tensors[name]
    if len(info.shape) not in (2, 3) or info.shape[-1] % _GROUP:
        what = f"FP8 tensor {name!r} has shape {list(info.shape)}, expected rows of a multiple of {_GROUP}"
        raise UnsupportedModelError(what, where=loader.path, hint=_USE)
    tried = [name + suffix for suffix in SCALE_SUFFIXES]
    scale = next((loader.tensors[each] for each in tried if each in loader.tensors), None)
    if scale is None:
        raise WeightError(f"FP8 tensor {name!r} has no scales; names tried: {', '.join(tried)}", where=loader.path)
    if scale.dtype not in FLOATS:
        raise WeightError(f"scale {scale.name!r} has type {scale.dtype}, expected a float", where=loader.path)
    grid, block = _layout(info, scale, loader)
    n, k = info.shape[-2:]

    def pieces() -> Iterator[Bytes]:
        codes = loader.raw(name).reshape(-1, n, k)
        scales = to_float32(loader.raw(scale.name), scale.dtype).reshape(grid)
        rows, columns = np.arange(n) // block[0], np.arange(0, k, _GROUP) // block[1]
        for matrix, own in zip(codes, np.broadcast_to(scales, (len(codes), *grid[1:])), strict=True):
            yield _blocks(matrix, own[rows][:, columns])

    seen = TensorInfo(name, F8_E4M3, info.shape, F8_E4M3.size(info.shape))
    return Composed(seen, (name, scale.name), pieces)


def _layout(info: TensorInfo, scale: TensorInfo, loader: WeightLoader) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """The grid of scales [matrices, scales a column, scales a row], and the (rows, columns) that share one of them."""
    *lead, n, k = info.shape
    if prod(scale.shape) == 1:
        return (1, 1, 1), (n, k)
    count, own = prod(lead), list(scale.shape[len(lead) :])
    if list(scale.shape[: len(lead)]) == lead:
        if own in ([], [1], [1, 1]):
            return (count, 1, 1), (n, k)
        if own in ([n], [n, 1]):
            return (count, n, 1), (1, k)
        size = block_size(loader.metadata)
        if size and own == [-(-n // size[0]), -(-k // size[1])]:
            return (count, own[0], own[1]), _whole_groups(size, info, loader)
    size = block_size(loader.metadata)
    blocks = f"{size[0]} by {size[1]} as weight_block_size says" if size else "a weight_block_size, which is missing"
    what = f"scale {scale.name!r} has shape {list(scale.shape)} for codes of shape {list(info.shape)}"
    raise WeightError(f"{what}, expected one scale, one a row, or one for blocks of {blocks}", where=loader.path)


def _whole_groups(size: tuple[int, int], info: TensorInfo, loader: WeightLoader) -> tuple[int, int]:
    if size[1] % _GROUP and size[1] < info.shape[-1]:
        what = f"the scales of {info.name!r} are for {size[1]} columns, expected a multiple of {_GROUP}"
        raise UnsupportedModelError(what, where=loader.path, hint=_USE)
    return size


def _blocks(codes: Bytes, scales: Floats) -> Bytes:
    """Codes uint8 [n, k] and scales float32 [n, k / 32] -> the bytes of `F8_E4M3`: for each 32 codes the scale, then
    the codes.
    """
    blocks = np.empty((*scales.shape, F8_E4M3.nbytes), np.uint8)
    blocks[..., :_SCALE_BYTES] = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(*scales.shape, -1)
    blocks[..., _SCALE_BYTES:] = codes.reshape(*scales.shape, _GROUP)
    return blocks.reshape(-1)


CODES_END, _SCALES_END = "_blocks", "_scales"
_HALF = MXFP4.block // 2


def mxfp4(loader: WeightLoader, name: str) -> Composed:
    """A stack [E, n, k] of MXFP4 codes with its scales; `WeightError` if they do not fit."""
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

    def pieces() -> Iterator[Bytes]:
        codes = loader.raw(name).reshape(shape[0], -1, _HALF)
        for matrix, exponents in zip(codes, loader.raw(scales).reshape(shape[0], -1, 1), strict=True):
            yield np.concatenate([exponents, _halves_apart(matrix)], axis=1).reshape(-1)

    return Composed(TensorInfo(name, MXFP4, shape, MXFP4.size(shape)), (name, scales), pieces)


def _halves_apart(pairs: Bytes) -> Bytes:
    """uint8 [blocks, 16], two neighbours in a byte -> [blocks, 16], those of the first half in the low halves."""
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), 2, _HALF)
    found: Bytes = codes[:, 0] | codes[:, 1] << 4
    return found
