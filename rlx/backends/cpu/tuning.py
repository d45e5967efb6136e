"""The parameters of linear kernels that `rlx tune` measures, such as the prefetch distance and the rows of a tile.

Tuning changes speed and never a result: the order of every sum is the same under any tuning. Parameters that change the
order of sums, such as the ranges of attention, are not part of it.

The table of defaults says how linears are computed on each kind of machine before `rlx tune` has measured it.

A row applies to targets of its levels that have some features and lack others; later
rows override earlier ones. No row changes a result: all ways to compute a linear give the same bits, so that they may
depend on the number of rows (docs/deterministic.md). `rlx tune` measures every number on the machine at hand.

The choice for a format and a number of rows r:

| weights, activations | r = 1 | r < unpack_from_* | more |
|---|---|---|---|
| integer codes, int8 | streamed | streamed in tiles of rows | unpacked (without VNNI: `dots.magnitudes`) |
| plain, f32 or bf16 | streamed | streamed in tiles of rows (AVX-512) | unpacked to f32, or to pairs of bf16 |

Why Q8_0 keeps int8 activations without VNNI: with f32 ones a prompt would cost as much as a BF16 one, and decoding
would have to do the same to give the same bits, where that takes 20 instructions for 64 weights instead of 8.

What bounds it: a register of products takes four instructions (move the sign, multiply and add pairs, add pairs of
those, add to the sum), and no exact way with fewer is known: products of i16 and codes in two parts of 4 bits take as
many. Two of the four are multiplications. So with registers of 256 bits Zen 4 can do 25.5 multiply-adds a cycle in a
tile of 4 rows (measured on registers and the first-level cache; 19.7 with `vpsignb`, which takes a multiplier), that is
187 GFLOP/s a core; with 512 bits 30 to 32, 222 to 234 GFLOP/s. Scaling the sums of every 32 k takes 7% and 11%,
unpacking for 48 rows 4% and 6%. llvm-mca expects 0.88 of the cycles of before on Skylake-SP, and 0.85 on Skylake.

GFLOP/s of one core of Zen 4 (2026-11-23, 288 rows, 1024 x 1024, the fastest of 5 to 12 runs; peak of f32: 117). `rlx
tune` measures them again, with `RLX_TARGET` those of another level:

| level | weights | | | |
|---|---|---|---|---|
| avx2 | Q8_0 | `vpsignb` moves signs: 112 to 123 | magnitudes: 133 to 154 | f32 (BF16 weights): 94 to 104 |
| avx512 without VNNI | Q8_0 | masks move signs: 147 to 153 | magnitudes: 161 to 170 | f32: 97 to 107 |
| avx2 | BF16 | tile of 3 rows: 66 to 88 | of 6 rows: 94 to 99, one run 72 to 76 | |
| avx512 without BF16 | BF16 | tile of 6 rows: 100 to 104 | of 8 rows: 101 to 107 | of 12 rows: 81 to 98 |

GB/s of two cores of Zen 4 decoding, medians of 12 runs in turns, 200 MB of weights; the read kernel: 31.2 and 33.6:

| weights | prefetched 4096 bytes ahead into L1 | into L2 | not prefetched |
|---|---|---|---|
| Q8_0 | 27.6 | 27.4 | 30.9 |
| BF16 | 30.6 | 28.6 | 34.0 |

GFLOP/s of two cores of Zen 4, medians of 275 to 297 runs in turns (2026-11-23, all other processes stopped). Plain
weights of 32 rows (2048 columns): 344 if prefetched at the start of a tile, 401 step by step, as all are since then.

| rows | BF16 streamed | unpacked or in place | | rows | Q8_0 unpacked | streamed | Q4_K | | Q6_K | |
|---|---|---|---|---|---|---|---|---|---|---|
| 8 | 169 | 255 | | 32 | 570 | 620 | 536 | 524 | 468 | 521 |
| 12 | 224 | 353 | | 512, 1024 columns | 530 | 633 | 501 | 562 | | |
| 16 | 257 | 408 | | 512, 3072 columns | 555 | 620 | | | 460 | 525 |
| 24 | 297 | 412 | | | | | | | | |

Two cores of Zen 5, 300 MB of weights, the fastest of runs in turns, GB/s (2026-11-27; other machines on the host make
its memory and its arithmetic twice as fast or as slow from minute to minute):

| weights, rows | not prefetched | prefetched 4096 bytes ahead into L1 |
|---|---|---|
| Q4_K, 1 | 37.9 | 44.6 |
| Q6_K, 1 | 40.9 | 44.2 |
| Q8_0, 1 | 72.3 | 70.9 |
| BF16, 1 | 63.6 | 69.0 |
| BF16, 4 | 38.1 | 42.7 |
| BF16, 8, streamed | 27.9 | 65.4 (in a tile over weights in place: 54.8) |

GOP/s of one core of Zen 5 with 256-bit registers, 1024 x 1024, unpacked -> streamed:

| rows | Q4_K, VNNI | Q6_K, VNNI | Q8_0, VNNI | Q4_K | Q6_K | Q8_0 |
|---|---|---|---|---|---|---|
| 8 | 244 -> 336 | 181 -> 267 | 217 -> 368 | 220 -> 239 | 169 -> 178 | 142 -> 183 |
| 12 | 300 -> 336 | 236 -> 271 | 279 -> 383 | 248 -> 250 | 193 -> 181 | 164 -> 189 |
| 24 | 340 -> 338 | 278 -> 273 | 342 -> 386 | 271 -> 253 | 222 -> 182 | 189 -> 189 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from rlx.errors import ArgumentError


@dataclass(frozen=True)
class Row:
    """Numbers of `Tuning` for some targets.

    Attributes:
        levels: names of levels; empty for all.
        has, lacks: LLVM features that the code of a target uses, and does not use.
        numbers: field of `Tuning` -> value.
    """

    levels: tuple[str, ...] = ()
    has: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    numbers: Mapping[str, int] = field(default_factory=dict)

    def applies(self, level: str, features: frozenset[str]) -> bool:
        """Whether the row is for a target of this level whose code uses these features."""
        here = not self.levels or level in self.levels
        return here and self.has <= features and not self.lacks & features


_NEON = ("neon", "dotprod", "i8mm", "bf16")

ROWS = (
    Row(("generic",), numbers={"tile_rows_int8": 4, "unpack_from_int8": 0, "tile_rows_float": 12}),
    # Not measured: as many sums as the registers hold. The hardware follows one stream of weights by itself; prefetches
    # would be a tenth of a kernel's instructions.
    Row(_NEON, numbers={"unpack_from_int8": 8, "tile_rows_float": 8, "prefetch_level": 0}),
    Row(("avx2",), numbers={"unpack_from_int8": 12, "tile_rows_float": 12}),
    # With VNNI four rows of codes as they are packed take little more than a tile of six over unpacked ones.
    Row(("avx2",), has=frozenset({"avxvnni"}), numbers={"unpack_from_int8": 24}),
    # All such processors have 1 MiB of second-level cache. On Zen 4: Q8_0 169 and 173 GFLOP/s with 48 and 96, Q4_K 248
    # and 259.
    Row(("avx512",), lacks=frozenset({"avx512vnni", "avxvnni"}), numbers={"macro_rows_int8": 96}),
    # More streams keep more lines on their way: 33.2, 37.0 and 38.0 tokens/s with 1, 2 and 4 (docs/measurements.md).
    # Codes as they are packed: a core multiplies 16 rows at 272 GOP/s, and six rows times two unpacked blocks at 222 to
    # 264.
    Row(("amx",), numbers={"streams": 4, "unpack_from_int8": 512}),
    # Processors with bf16 dot products and no tiles follow one stream best by themselves. With VNNI, eight rows times a
    # block of codes as they are packed are faster than six rows times two unpacked blocks.
    Row(("avx512",), has=frozenset({"avx512bf16"}), numbers={"prefetch_level": 0, "unpack_from_plain": 8}),
    Row(("avx512",), has=frozenset({"avx512bf16", "avx512vnni"}), numbers={"unpack_from_int8": 512}),
    # Those that also have VNNI for 256 bits (Zen 5) wait for memory unless weights are prefetched.
    Row(("avx512",), has=frozenset({"avx512bf16", "avxvnni"}), numbers={"prefetch_level": 1, "unpack_from_plain": 9}),
)


def defaults(level: str, features: frozenset[str]) -> dict[str, int]:
    """The numbers of all rows that apply: field of `Tuning` -> value."""
    found: dict[str, int] = {}
    for row in ROWS:
        if row.applies(level, features):
            found |= row.numbers
    return found


# Field -> (minimum, maximum, step) of its values.
_RANGES = {
    "prefetch": (64, 1 << 16, 64),
    "prefetch_level": (0, 3, 1),
    "streams": (1, 8, 1),
    "macro_rows_int8": (1, 512, 1),
    "macro_rows_float": (1, 512, 1),
    "tile_rows_int8": (2, 8, 2),
    "tile_rows_float": (2, 12, 2),
    "unpack_from_int8": (0, 512, 1),
    "unpack_from_plain": (0, 512, 1),
    "macro_bytes_tiles": (1 << 16, 1 << 26, 1),
}


@dataclass(frozen=True)
class Tuning(Mapping[str, int]):
    """The parameters that `rlx tune` chooses. Field defaults are those of AVX-512; `default` has those of every target.

    Attributes:
        prefetch: prefetch distance in bytes for streamed weights: about latency times bandwidth of a core. Plain
            weights, which need the least arithmetic, use twice the distance.
        prefetch_level: the cache that they are prefetched into, 1 to 3; 0 leaves it to the hardware.
        streams: number of distant places at which a worker reads weights in parallel, for one row. Some hardware
            prefetchers follow several streams and stop at the end of a page; others handle several streams badly.
        macro_rows_int8: rows of int8 activations that share one unpacking of a chunk of weights.
        macro_rows_float: the same for f32 and bf16 activations.
        tile_rows_int8: rows of int8 activations whose sums are in registers at once, over unpacked weights. Without
            int8 dot instructions, 256-bit registers hold two thirds of them.
        tile_rows_float: the same for f32 and bf16 activations with 512-bit registers; narrower registers hold
            proportionally fewer rows.
        unpack_from_int8: fewest rows of int8 activations for which weights are unpacked to memory. With fewer rows,
            weights are streamed for each tile of rows, because unpacking costs more than reading them again from the
            cache.
        unpack_from_plain: the same for plain weights (f32, f16, bf16); below AVX-512 they are always unpacked.
        macro_bytes_tiles: bytes of bf16 activations that share one unpacking on tile registers. They should fit the
            L2 cache.

    Raises:
        ArgumentError: a number is out of its range.
    """

    prefetch: int = 4096
    prefetch_level: int = 1
    streams: int = 1
    macro_rows_int8: int = 48
    macro_rows_float: int = 144
    tile_rows_int8: int = 6
    tile_rows_float: int = 8
    unpack_from_int8: int = 24
    unpack_from_plain: int = 32
    macro_bytes_tiles: int = 1 << 20

    def __post_init__(self) -> None:
        for name, (least, most, step) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or value % step:
                steps = f" in steps of {step}" if step > 1 else ""
                hint = f"Give a number from {least} to {most}{steps}."
                raise ArgumentError(f"{name} = {value!r}", where="tuning", hint=hint)

    @staticmethod
    def default(level: str, features: Iterable[str] = ()) -> Tuning:
        """The tuning of a target before anything is measured on it, see the rows above.

        Args:
            level: the target's level.
            features: the LLVM features that its code uses.
        """
        return Tuning(**defaults(level, frozenset(features)))

    def __getitem__(self, name: str) -> int:
        return int(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))
