"""Capabilities: what passes may ask of the machine that a program is for, so that no pass knows a machine's name."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    bf16_dots: bool = True
    bf16_tiles: bool = True
    bf16_depth: int = 32
    bf16_rows: int = 16
    expert_rows: int = 32
    expert_rows_bf16: int = 8
    own_cost: int = 1 << 18
    own_cost_rows: int = 1 << 17
