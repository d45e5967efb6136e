#!/usr/bin/env python3
"""Two ops of our own: the cosine of two rows, which rlx computes in seven steps, and the gated norm of Qwen 3.5.

    python examples/custom_op.py                             # prints the time of cosines before and after
    python examples/custom_op.py --rows 512 --width 4096
    RLX_IMPORT=examples/custom_op.py rlx compile MODEL --explain      # a model that has gated norms takes the op

docs/custom-ops.md explains each part.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import rlx
from rlx import SEQ, ops
from rlx.scalars import exp, f32, sqrt


def cosine_kernel(x: Any, y: Any, out: Any, begin: int, end: int, n: int) -> None:
    """All three sums in one pass over memory; no product is stored."""
    for row in range(begin, end):
        first = row * n
        xy, xx, yy = f32(0), f32(0), f32(0)
        for i in range(first, first + n):
            xy += x[i] * y[i]
            xx += x[i] * x[i]
            yy += y[i] * y[i]
        out[row] = xy / sqrt(xx * yy)


def cosine_formula(x: Any, y: Any) -> Any:
    """The same in ops of rlx: three products and three sums, each a step of its own, then the quotient."""
    xy, xx, yy = (ops.sum(product, keepdims=True) for product in (x * y, x * x, y * y))
    return xy / ops.sqrt(xx * yy)


@rlx.custom_op(shape="x[..., n], y[..., n] -> [..., 1]", kernel=cosine_kernel, fuses=cosine_formula)
def cosine(x: Any, y: Any) -> Any:
    """The meaning: the cosine of the angle between each row of x and that of y."""
    xy, xx, yy = ((a * b).sum(-1, keepdims=True) for a, b in ((x, y), (x, x), (y, y)))
    return xy / np.sqrt(xx * yy)


def kernel(x: Any, weight: Any, gate: Any, out: Any, begin: int, end: int, n: int, eps: float) -> None:
    """Rows begin .. end; buffers are flat."""
    for row in range(begin, end):
        first = row * n
        total = f32(0)
        for i in range(first, first + n):
            total += x[i] * x[i]
        factor = 1.0 / sqrt(total / f32(n) + eps)
        for i in range(n):
            g = gate[first + i]
            out[first + i] = x[first + i] * factor * weight[i] * (g / (1.0 + exp(-g)))


def formula(x: Any, weight: Any, gate: Any, *, eps: float) -> Any:
    """What models write."""
    return ops.rms_norm(x, weight, eps=eps) * ops.silu(gate)


@rlx.custom_op(shape="x[..., n], weight[n], gate[..., n] -> [..., n]", kernel=kernel, fuses=formula)
def gated_norm(x: Any, weight: Any, gate: Any, *, eps: float) -> Any:
    """The meaning: x / sqrt(mean(x^2) + eps) * weight * gate * sigmoid(gate)."""
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return norm * weight * gate / (1 + np.exp(-gate))


def graph(width: int) -> rlx.Graph:
    """The cosines of the rows of two matrices."""
    result = rlx.Graph("cosines")
    x, y = result.input("x", [SEQ, width]), result.input("y", [SEQ, width])
    result.output("cosines", cosine_formula(x, y))
    return result


def seconds(executable: rlx.Executable, repeats: int, **inputs: Any) -> float:
    """The shortest of some calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        executable(**inputs)
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((args.rows, args.width)).astype(np.float32) for name in ("x", "y")}
    bind = {"SEQ": (1, args.rows)}
    with (
        rlx.compile(graph(args.width), bind=bind, profile={"fusion": {"custom": False}}) as before,
        rlx.compile(graph(args.width), bind=bind) as after,
    ):
        error = np.abs(before(**inputs)["cosines"] - after(**inputs)["cosines"]).max()
        for name, executable in (("before", before), ("after", after)):
            steps = [node.op for node in executable.graph.nodes() if node.op != "input"]
            took = seconds(executable, args.repeats, **inputs)
            print(f"{name:6}  {took * 1e3:8.3f} ms  {len(steps)} nodes: {', '.join(steps)}")
        print(f"largest difference: {error:.1e}")


if __name__ == "__main__":
    main()
