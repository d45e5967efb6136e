#!/usr/bin/env python3
"""A model of a step: how long it takes on a machine, by rows, depth, cores, bandwidth and barriers.

    python benchmarks/scaling.py            # measured steps beside predicted ones, then machines that nobody measured

A step reads the weights once and the caches of its rows, multiplies, does some work a sequence in one thread (inputs,
choice of tokens), and joins all workers after each region. The parts are added, because a region has one limit or the
other:

    ms = 1.19 * weights / bandwidth + 1.46 * caches / bandwidth + k * operations / peak + 0.095 * sequences
         + 1.1e-3 * regions * log2(cores)                            # k is 0 for one row, 1.56 up to 8 rows, else 1.09

The factors were fitted by least squares to steps of `rlx bench --rows` and two prompts. Bandwidth and peak are those
that it measures, of the machines in `MEASURED`, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

READ, CACHES, SERIAL, BARRIER = 1.19, 1.46, 0.095, 1.1e-3
NARROW, WIDE = 1.56, 1.09  # k for 2 to 8 rows, and for more, in tiles
REGIONS = 6  # of a layer


@dataclass(frozen=True)
class Model:
    """What of a model a step depends on.

    Attributes:
        layers: their number.
        dense: bytes of weights that every step reads.
        experts: bytes of all experts; `routed` of `count` belong to a row.
        operations: of a row, in GOP.
        position: bytes of the caches at a position.
    """

    layers: int
    dense: float
    operations: float
    position: int
    experts: float = 0.0
    count: int = 1
    routed: int = 1

    def weights(self, rows: int) -> float:
        """Bytes of weights that a step of so many rows reads, on average."""
        return self.dense + self.experts * (1 - (1 - self.routed / self.count) ** rows)


@dataclass(frozen=True)
class Machine:
    """Cores, GB/s of reads and GOP/s of int8 products of all of them; `hops` multiplies the cost of a barrier."""

    cores: int
    bandwidth: float
    peak: float
    hops: float = 1.0


QWEN3_06B = Model(28, 390.8e6, 1.19, 28 * 4096)
QWEN3_8B = Model(36, 5.03e9, 15.1, 36 * 4096)
QWEN3_30B = Model(48, 1.05e9, 6.6, 48 * 2048, 17.5e9, 128, 8)
MODELS = {"0.6B": QWEN3_06B, "8B": QWEN3_8B, "30B-A3B": QWEN3_30B}


def step_ms(model: Model, machine: Machine, rows: int, depth: float) -> float:
    """Milliseconds of a step of one token each of `rows` sequences, after `depth` tokens each."""
    return _rows_ms(model, machine, rows, rows * depth, rows)


def prompt_ms(model: Model, machine: Machine, rows: int, depth: float) -> float:
    """Milliseconds of a chunk of a prompt, of `rows` tokens after `depth`."""
    return _rows_ms(model, machine, rows, depth, 1)


def _rows_ms(model: Model, machine: Machine, rows: int, positions: float, sequences: int) -> float:
    products = 0.0 if rows == 1 else NARROW if rows <= 8 else WIDE
    read = (READ * model.weights(rows) + CACHES * positions * model.position) / machine.bandwidth / 1e6
    multiplied = products * rows * model.operations / machine.peak * 1e3
    joined = BARRIER * REGIONS * model.layers * log2(machine.cores) * machine.hops
    return read + multiplied + SERIAL * sequences + joined


#: Steps of Qwen3-0.6B Q4_K_M: machine -> (rows, depth, ms).
MEASURED = {
    Machine(16, 135, 8200): [
        (1, 70, 4.5), (8, 70, 7.4), (32, 70, 14.5), (64, 70, 25.6), (8, 517, 12.3), (64, 517, 58.1),
    ],
    Machine(4, 52, 2330): [(1, 70, 9.3), (8, 70, 18.2), (32, 70, 42.6), (64, 70, 74.4)],
}  # fmt: skip

#: Prompts: machine -> (rows, ms).
PROMPTS = {Machine(16, 135, 8200): [(300, 50.0), (512, 83.0)]}

#: Assumed: 8 channels of DDR5-5600 for 64 cores and 12 of DDR5-6400 for 128, of which reads get 80%; peaks a core as
#: measured. Two sockets: weights and workers by node; a barrier crosses the link between them.
ASSUMED = {
    "64 cores": Machine(64, 287, 39_600),
    "128 cores": Machine(128, 491, 79_200),
    "2 x 64 cores, one model": Machine(128, 574, 79_200, 2.0),
}


def predictions() -> Iterator[tuple[Machine, int | str, int | str, float, float]]:
    """(machine, rows, depth, measured ms, predicted ms)."""
    for machine, steps in MEASURED.items():
        for rows, depth, measured in steps:
            yield machine, rows, depth, measured, step_ms(QWEN3_06B, machine, rows, depth)
    for machine, prompts in PROMPTS.items():
        for rows, measured in prompts:
            yield machine, f"{rows} of a prompt", "", measured, prompt_ms(QWEN3_06B, machine, rows, rows / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=lambda text: [int(n) for n in text.split(",")], default=[512, 4096])
    depths = parser.parse_args().depths
    print("| cores | GB/s | rows | depth | measured ms | predicted ms | difference |\n|---|---|---|---|---|---|---|")
    for machine, rows, depth, measured, found in predictions():
        cells = f"{machine.cores} | {machine.bandwidth:g} | {rows} | {depth} | {measured} | {found:.1f}"
        print(f"| {cells} | {found / measured - 1:+.0%} |")
    print(
        "\n| model | machine | depth | tokens/s of 1 row | 8 rows | 32 rows | 64 rows |\n|---|---|---|---|---|---|---|"
    )
    for name in ("8B", "30B-A3B"):
        machines = [*ASSUMED.items(), ("2 x 64 cores, two replicas", ASSUMED["64 cores"])]
        for label, machine in machines:
            copies = 2 if "replicas" in label else 1
            for depth in depths:
                rates = [_rate(MODELS[name], machine, rows, depth, copies) for rows in (1, 8, 32, 64)]
                print(f"| {name} | {label} | {depth} | {' | '.join(f'{rate:.0f}' for rate in rates)} |")


def _rate(model: Model, machine: Machine, rows: int, depth: int, copies: int) -> float:
    """Tokens a second of so many rows, shared by so many replicas."""
    own = -(-rows // copies)
    return 1e3 * rows / step_ms(model, machine, own, depth)


if __name__ == "__main__":
    main()
