"""Capabilities: what passes may ask of the machine that a program is for, so that no pass knows a machine's name."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlx.ir.dtypes import DTYPES, DType


@dataclass(frozen=True)
class Layouts:
    """How values lie in the memory of a device. The defaults are plain: matrices as in the file, keys row by row.

    A device with other layouts has a class over this one. Only its own folder knows what the names mean.

    Attributes:
        matrices: name of the layout of matrices that linears multiply, into which the device's packer brings them.
        matrices_meaning: what that is, for people.
    """

    matrices: str = "blocks"
    matrices_meaning: str = "row by row, as in the file"

    @property
    def matrix_types(self) -> tuple[DType, ...]:
        """The types of the matrices that kernels multiply."""
        return tuple(dtype for dtype in DTYPES.values() if dtype.is_float or dtype.is_quantized)

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        """Bytes of a matrix [n, k] in memory; `ShapeError` if no kernel reads it."""
        return dtype.size((n, k))


@dataclass(frozen=True)
class Capabilities:
    """The answers of one target of a backend. The defaults are those of a CPU with every instruction.

    Costs are floating-point operations plus bytes moved, as `rlx.ir.costs.cost` counts them.

    Attributes:
        bf16_dots: whether it multiplies pairs of bf16 numbers in one instruction.
        bf16_tiles: whether it multiplies whole tiles of bf16 numbers in one instruction.
        bf16_depth: number of inputs of a bf16 product: heads are not shorter, and experts have multiples of it.
        bf16_rows: fewest rows of a call that pay for the conversion to bf16 of what they share: keys, values, weights.
        expert_rows: the same for one expert with quantized weights, whose rows must also be gathered.
        expert_rows_bf16: the same for one expert with bf16 weights.
        own_cost: highest cost of a node that every worker may compute for itself instead of waiting for another one.
        own_cost_rows: the same in programs of several rows, whose rows the workers could share.
        layouts: how values lie in its memory.
    """

    bf16_dots: bool = True
    bf16_tiles: bool = True
    bf16_depth: int = 32
    bf16_rows: int = 16
    expert_rows: int = 32
    expert_rows_bf16: int = 8
    own_cost: int = 1 << 18
    own_cost_rows: int = 1 << 17
    layouts: Layouts = field(default_factory=Layouts)
