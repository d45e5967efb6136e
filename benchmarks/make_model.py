"""Write a GGUF file with a real model's shapes and random weights, for benchmarks and tests without a download.

    python benchmarks/make_model.py --shape qwen3-0.6b --type Q4_K_M --out qwen3-0.6b-Q4_K_M.gguf
    python benchmarks/make_model.py --shape qwen3-0.6b --type BF16 --out qwen3-0.6b       # a Hugging Face folder

The blocks of a quantized type are drawn at random instead of quantizing drawn numbers, so a file is written about as
fast as the disk takes it, tensor by tensor, in little memory. Weights have a standard deviation of 0.02 whatever the
type, so activations stay finite; the types of the tensors are those of `rlx quantize` and so of `llama-quantize`, and
the file weighs what a real one does. The tokenizer inside is small and works (every text can be encoded); the rest of
the vocabulary is unused filler. What such a model writes is noise: it serves to measure, not to talk to.

If the name of the output does not end in `.gguf`, it is a Hugging Face folder (`hf_folder.py`), of type BF16.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from hf_folder import write_folder
from model_vocab import add_tokenizer
from numpy.typing import NDArray

from rlx.export.convert import header_of_shape
from rlx.export.quantize import FILE_TYPES
from rlx.ir.dtypes import BF16, DType
from rlx.models.shapes import SHAPES, Shape

Bytes = NDArray[np.uint8]
_KINDS = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
STD = 0.02
CHUNK = 16 << 20  # bytes drawn and written at a time


# ---------------------------------------------------------------------------------------------------- types


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the file to be."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def type(self) -> Type:
        assert self.dtype.ggml is not None  # the types of files are all GGUF's
        return Type(self.dtype.ggml)

    @property
    def nbytes(self) -> int:
        block, width = GGML_QUANT_SIZES[self.type]
        if self.shape[-1] % block:
            rows = f"{self.name}: rows of {self.shape[-1]} elements"
            raise SystemExit(f"{rows} cannot be stored as {self.type.name}: no multiple of {block}")
        return prod(self.shape) // block * width


def plan(s: Shape, kind: str) -> list[Planned]:
    """The tensors of a file of this kind, with their types."""
    return [Planned(info.name, info.shape, info.dtype) for info in header_of_shape(s, kind).tensors.values()]


# ---------------------------------------------------------------------------------------------------- random blocks


def random_bytes(rng: np.random.Generator, n: int, width: int) -> Bytes:
    words = rng.integers(0, 2**64, -(-n * width // 8), dtype=np.uint64)
    return words.view(np.uint8)[: n * width].reshape(n, width)


def halves(rng: np.random.Generator, n: int, mean: float, signed: bool = False) -> Bytes:
    """n scales around `mean` as the two bytes of a float16, [n, 2]; half of them negative if `signed`."""
    scale = rng.random(n, dtype=np.float32) * np.float32(0.5 * mean) + np.float32(0.75 * mean)
    if signed:
        scale *= rng.integers(0, 2, n, dtype=np.int8) * 2 - 1
    return scale.astype(np.float16).view(np.uint8).reshape(n, 2)


def floats(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    """n uniform values; uniform because that is several times faster than normal."""
    return (rng.random(n, dtype=np.float32) - np.float32(0.5)) * np.float32(STD * sqrt(12))


def f32(rng: np.random.Generator, n: int) -> Bytes:
    return floats(rng, n).view(np.uint8)


def f16(rng: np.random.Generator, n: int) -> Bytes:
    return floats(rng, n).astype(np.float16).view(np.uint8)


def bf16(rng: np.random.Generator, n: int) -> Bytes:
    return (floats(rng, n).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def q8_0(rng: np.random.Generator, n: int) -> Bytes:
    out = random_bytes(rng, n, 34)
    out[:, :2] = halves(rng, n, STD / 73.3)  # 73.3: the deviation of the codes -127..127
    codes = out[:, 2:].view(np.int8)
    np.maximum(codes, -127, out=codes)  # a quantizer never writes -128
    return out


def symmetric(width: int, deviation: float) -> Callable[[np.random.Generator, int], Bytes]:
    """Q4_0 and Q5_0: the codes are off centre by a half, so the scale's sign is drawn too, as in quantized files."""

    def draw(rng: np.random.Generator, n: int) -> Bytes:
        out = random_bytes(rng, n, width)
        out[:, :2] = halves(rng, n, STD / deviation, signed=True)
        return out

    return draw


def q5_1(rng: np.random.Generator, n: int) -> Bytes:
    out = random_bytes(rng, n, 24)
    out[:, :2] = halves(rng, n, STD / 9.23)
    minimum = out[:, :2].copy().view(np.float16) * np.float16(-15.5)
    out[:, 2:4] = minimum.view(np.uint8)
    return out


def k_blocks(width: int, middle: float, deviation: float) -> Callable[[np.random.Generator, int], Bytes]:
    """Q4_K and Q5_K: codes 0..2*middle with 6-bit scales and minima, both held in 32..63.

    The variance is that of scale * code around its middle plus that of the group offset middle * (scale - minimum).
    """
    scale_square, scale_variance = 47.5**2 + 1023 / 12, 1023 / 12
    total = sqrt(scale_square * deviation**2 + 2 * scale_variance * middle**2)

    def draw(rng: np.random.Generator, n: int) -> Bytes:
        out = random_bytes(rng, n, width)
        out[:, :2] = halves(rng, n, STD / total)
        out[:, 2:4] = (out[:, :2].copy().view(np.float16) * np.float16(middle)).view(np.uint8)
        out[:, 4:12] |= 0xA0  # the highest bit of all sixteen 6-bit numbers
        return out

    return draw


def q6_k(rng: np.random.Generator, n: int) -> Bytes:
    out = random_bytes(rng, n, 210)
    scales = out[:, 192:208]
    scales[:] = (scales & 0xBF) | (~scales >> 1 & 0x40)  # bit 6 = not the sign: magnitudes of 64..128
    out[:, 208:] = halves(rng, n, STD / (97.8 * 18.5))
    return out


DRAW: dict[Type, Callable[[np.random.Generator, int], Bytes]] = {
    Type.F32: f32, Type.F16: f16, Type.BF16: bf16, Type.Q8_0: q8_0, Type.Q4_0: symmetric(18, 4.64),
    Type.Q5_0: symmetric(22, 9.25), Type.Q5_1: q5_1, Type.Q4_K: k_blocks(144, 7.5, 4.61),
    Type.Q5_K: k_blocks(176, 15.5, 9.23), Type.Q6_K: q6_k,
}  # fmt: skip


def chunks(tensor: Planned, s: Shape, seed: int) -> Iterator[Bytes]:
    """The bytes of one tensor; they depend on the seed and the tensor's name only."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
    small = small_values(tensor, s, rng)
    if small is not None:
        yield small.astype(np.float32).reshape(-1).view(np.uint8)
        return
    block, width = GGML_QUANT_SIZES[tensor.type]
    left = prod(tensor.shape) // block
    while left:
        n = min(left, CHUNK // width)
        yield DRAW[tensor.type](rng, n)
        left -= n


def small_values(tensor: Planned, s: Shape, rng: np.random.Generator) -> NDArray[np.floating] | None:
    """Tensors in float32 whose values mean something, [shape]; None for all others, which are noise around 0."""
    name, shape = tensor.name, tensor.shape
    if name == "rope_freqs.weight":
        return header_of_shape(s, "F32").raw(name).view(np.float32)
    if name.endswith(("norm.weight", "layer_output_scale.weight")):
        return 1 + 5 * floats(rng, shape[0])
    if name.endswith("ssm_a"):
        return -rng.uniform(1, 16, shape)  # as Mamba 2 draws it, and so the next two
    if name.endswith("ssm_dt.bias"):
        return np.log(np.expm1(np.exp(rng.uniform(np.log(0.001), np.log(0.1), shape))))  # softplus gives 0.001 to 0.1
    if name.endswith("ssm_conv1d.weight"):
        return rng.uniform(-0.5, 0.5, shape)
    return None


# ---------------------------------------------------------------------------------------------------- file


@dataclass(frozen=True, slots=True)
class Written:
    """What a file holds: parameters, bytes in all, and of them those of the tensors by type."""

    parameters: int
    nbytes: int
    by_type: dict[str, int]


def write_model(out: Path, name: str, s: Shape, kind: str, seed: int = 0) -> Written:
    """Write the file; a broken-off run leaves none of that name."""
    writer = GGUFWriter(None, s.arch)
    writer.add_type("model")
    writer.add_name(f"{name} with random weights")
    writer.add_file_type(FILE_TYPES[kind].ggml)
    writer.add_quantization_version(2)
    for key, value in header_of_shape(s, kind).metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _KINDS[type(value)])
    add_tokenizer(writer, s)
    planned = plan(s, kind)
    for t in planned:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=t.type)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file: BinaryIO = writer.fout[0]
    writer.write_padding(file, file.tell())
    by_type: Counter[str] = Counter()
    for t in planned:
        for part in chunks(t, s, seed):
            file.write(part.data)
        writer.write_padding(file, t.nbytes)
        by_type[t.type.name] += t.nbytes
    writer.close()
    partial.replace(out)
    return Written(sum(prod(t.shape) for t in planned), out.stat().st_size, dict(by_type.most_common()))


def write_checkpoint(out: Path, s: Shape, kind: str, seed: int = 0) -> int:
    """Write a Hugging Face folder; returns the number of parameters."""
    if kind != "BF16":
        raise SystemExit(f"--type {kind}: a Hugging Face folder has weights in BF16; a GGUF file ends in .gguf")

    def draw(name: str, shape: tuple[int, ...]) -> Iterator[Bytes]:
        tensor = Planned(name, shape, BF16)
        small = small_values(tensor, s, np.random.default_rng([seed, zlib.crc32(name.encode())]))
        if small is None:
            yield from chunks(tensor, s, seed)
        else:
            yield (small.astype(np.float32).reshape(-1).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    return write_folder(out, s, draw)


def arguments() -> argparse.Namespace:
    lines = [
        f"  {n:14s} {s.arch:7s} hidden {s.hidden:5d}  ffn {s.ffn:5d}  layers {s.layers:2d}"
        f"  heads {s.heads:2d}/{s.kv_heads}  head dim {s.head_dim:3d}  vocab {s.vocab:6d}"
        f"  {'tied' if s.tied else 'untied'}"
        for n, s in SHAPES.items()
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="shapes:\n" + "\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, choices=SHAPES, metavar="NAME", help="one of the shapes below")
    parser.add_argument("--type", required=True, choices=FILE_TYPES, dest="kind", help="weight type or mix of types")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the GGUF file or the folder to write")
    parser.add_argument("--layers", type=int, metavar="N", help="another number of layers (for a smaller file)")
    parser.add_argument("--vocab", type=int, metavar="N", help="another vocabulary size, at least 512")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args()
    if args.layers is not None and not 1 <= args.layers <= 512:
        parser.error(f"--layers {args.layers}: expected 1 to 512")
    if args.vocab is not None and not 512 <= args.vocab <= 1 << 20:
        parser.error(f"--vocab {args.vocab}: expected 512 to {1 << 20}")
    return args


def main() -> None:
    args = arguments()
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers, vocab=args.vocab or shape.vocab)
    start = time.perf_counter()
    if args.out.suffix != ".gguf":
        count = write_checkpoint(args.out, shape, args.kind, args.seed)
        print(f"{args.out}: {count:,} parameters in BF16, {time.perf_counter() - start:.1f} s")
        return
    written = write_model(args.out, args.shape, shape, args.kind, args.seed)
    seconds = time.perf_counter() - start
    bits = 8 * written.nbytes / written.parameters
    print(f"{args.out}: {written.parameters:,} parameters, {written.nbytes:,} bytes ({bits:.2f} bits a parameter), "
          f"{seconds:.1f} s")  # fmt: skip
    print("  " + ", ".join(f"{name} {size:,}" for name, size in written.by_type.items()))


if __name__ == "__main__":
    main()
