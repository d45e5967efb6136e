"""The parameters of linear kernels that `rlx tune` measures, such as the prefetch distance and the rows of a tile.

Tuning changes speed and never a result: the order of every sum is the same under any tuning. Parameters that change the
order of sums, such as the ranges of attention, are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from rlx.backends.cpu.tuning_table import defaults
from rlx.errors import ArgumentError

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
    macro_bytes_tiles: int = 3 << 19

    def __post_init__(self) -> None:
        for name, (least, most, step) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or value % step:
                steps = f" in steps of {step}" if step > 1 else ""
                hint = f"Give a number from {least} to {most}{steps}."
                raise ArgumentError(f"{name} = {value!r}", where="tuning", hint=hint)

    @staticmethod
    def default(level: str, features: Iterable[str] = ()) -> Tuning:
        """The tuning of a target before anything is measured on it, see `tuning_table.py`.

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
