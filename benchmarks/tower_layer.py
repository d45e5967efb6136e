#!/usr/bin/env python3
"""One layer of an image tower, region by region: time, GFLOP/s, and the share of the machine's measured peak.

    python benchmarks/tower_layer.py [--tower siglip] [--patches 4096] [--rows 512] [--weights F16] [--seconds 3]

The layer has random weights. It runs as towers do: one program writes the keys and values of a chunk of rows, another
one computes queries, attention over all patches, output and feed-forward for a chunk. Only one chunk of each is timed.
A region is what workers compute between two barriers. The fastest run of all counts, because other programs only ever
slow one down. The peak is that of bf16 products whose operands stay in registers.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlx.backends.cpu.machine import arithmetic_peaks
from rlx.backends.cpu.target import Target
from rlx.ir import ops
from rlx.ir.costs import cost
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import DTYPES, F32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.runtime.compile import Compiler
from rlx.runtime.executable import Executable, compile
from rlx.runtime.profiling import region_seconds

EPS = 1e-6


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer; `gated` feed-forward as in Gemma 4, plain with biases elsewhere."""

    hidden: int
    heads: int
    ffn: int
    gated: bool = False
    rope: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LAYERS = {
    "qwen-small": Layer(768, 12, 3072),
    "qwen": Layer(1024, 16, 4096),
    "qwen-large": Layer(1152, 16, 4304),
    "siglip": Layer(1152, 16, 4304, rope=False),
    "gemma4": Layer(768, 12, 3072, gated=True),
    "gemma4-large": Layer(1152, 16, 4304, gated=True),
}


class Build:
    """Graphs of one layer: `keys` writes keys and values of a chunk, `rest` computes the layer's output."""

    def __init__(self, layer: Layer, dtype: DType, patches: int) -> None:
        self.layer, self.dtype, self.patches = layer, dtype, patches

    def linear(self, g: Graph, x: Node, name: str, n: int) -> Node:
        weight = g.weight(f"{name}.weight", [n, x.shape[-1]], self.dtype)
        bias = None if self.layer.gated else g.weight(f"{name}.bias", [n], F32)
        return ops.linear(x, weight, bias, bf16=True)

    def norm(self, g: Graph, x: Node, name: str) -> Node:
        weight = g.weight(f"{name}.weight", [self.layer.hidden], F32)
        if self.layer.gated:
            return ops.rms_norm(x, weight, eps=EPS)
        return ops.layer_norm(x, weight, g.weight(f"{name}.bias", [self.layer.hidden], F32), eps=EPS)

    def heads(self, g: Graph, x: Node, name: str) -> Node:
        """The heads of a projection, rotated where the layer has rope."""
        layer = self.layer
        y = ops.reshape(self.linear(g, x, name, layer.hidden), [SEQ, layer.heads, layer.head_dim])
        if not layer.rope or name == "v":
            return y
        return ops.rope(y, g.input("angles", [SEQ, layer.head_dim], F32), style="neox")

    def caches(self, g: Graph) -> tuple[Node, Node]:
        shape, dtype = [self.layer.heads, CTX, self.layer.head_dim], DTYPES["bf16"]
        return g.state("keys", shape, dtype), g.state("values", shape, dtype)

    def keys(self) -> Graph:
        g = Graph("tower_keys")
        h = self.norm(g, g.input("x", [SEQ, self.layer.hidden], F32), "ln1")
        for cache, name in zip(self.caches(g), ("k", "v"), strict=True):
            g.output(f"{name}_written", ops.kv_write(cache, self.heads(g, h, name)))
        return g

    def rest(self) -> Graph:
        layer, g = self.layer, Graph("tower_rest")
        x = g.input("x", [SEQ, layer.hidden], F32)
        q = self.heads(g, self.norm(g, x, "ln1"), "q")
        scale = 1.0 if layer.gated else layer.head_dim**-0.5
        seen = ops.attention(q, *self.caches(g), scale=scale, causal=False, length=self.patches)
        x = x + self.linear(g, seen, "out", layer.hidden)
        h = self.norm(g, x, "ln2")
        up = self.linear(g, h, "up", layer.ffn)
        act = ops.gelu_tanh(self.linear(g, h, "gate", layer.ffn)) * up if layer.gated else ops.gelu_tanh(up)
        g.output("y", x + self.linear(g, act, "down", layer.hidden))
        return g


def bound(graph: Graph) -> dict[str, np.ndarray]:
    """Random weights of every leaf, as files hold them."""
    rng, found = np.random.default_rng(0), {}
    for name, node in graph.leaves("weight").items():
        values = (0.02 * rng.standard_normal(node.shape)).astype(np.float32)
        dtype = node.dtype.name
        if dtype == "f16":
            found[name] = values.astype(np.float16)
        elif dtype == "bf16":
            found[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            found[name] = values
    return found


def regions(exe: Executable) -> Iterator[tuple[str, Counter[str], list[Node]]]:
    """Per region: what it computes, as text."""
    nodes, names = exe.graph.nodes(), exe.graph.names()
    for row in exe._compiled.manifest["regions"]:
        work = [nodes[i] for i, _ in row]
        yield " ".join(_described(n, names[n]) for n in work), Counter(), work


def _described(node: Node, name: str) -> str:
    if node.op == "linear":
        x, w = node.inputs[:2]
        return f"linear {x.dtype.name} x {w.dtype.name} [{w.shape[0]}, {w.shape[1]}]"
    return f"{node.op}{' bf16' if node.op == 'attention' and node['bf16'] else ''}"


def measure(exe: Executable, arrays: dict[str, np.ndarray], seconds: float) -> np.ndarray:
    """Seconds of each region in the fastest run."""
    exe(**arrays)
    fastest, spent, end = float("inf"), np.zeros(0), time.perf_counter() + seconds
    sizes = {"SEQ": len(arrays["x"]), **({"PAST_SEQ": 0} if "PAST_SEQ" in exe._compiled.manifest["symbols"] else {})}
    env = {s: sizes.get(s, exe._states.extents.get(s)) for s in exe._compiled.manifest["symbols"]}
    while time.perf_counter() < end:
        start = time.perf_counter()
        exe._program.run(**env)
        took = time.perf_counter() - start
        if took < fastest:
            fastest, spent = took, region_seconds(exe._program, took)
    return spent


def report(title: str, exe: Executable, spent: np.ndarray, rows: int, patches: int, peak: float) -> None:
    env = {"SEQ": rows, "PAST_SEQ": 0, "CTX": patches}
    print(f"{title}: {1e3 * spent.sum():.1f} ms, arena {exe.stats['arena_bytes'] / 2**20:.1f} MiB")
    for (label, _, nodes), took in zip(regions(exe), spent.tolist(), strict=True):
        work = sum(cost(n, env)[0] for n in nodes if n.op in ("linear", "attention"))
        rate = work / took / 1e9
        share = f"{rate:7.0f} GFLOP/s  {rate / peak:4.0%} of the peak" if work else ""
        print(f"  {1e3 * took:8.3f} ms  {share:37}  {label}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=[*LAYERS], default="siglip")
    parser.add_argument("--patches", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=512, help="rows of a chunk")
    parser.add_argument("--weights", choices=["F16", "BF16", "F32"], default="F16")
    parser.add_argument("--precision", choices=["auto", "exact"], default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3, help="of each program")
    parser.add_argument("--target", help="a level; the machine's best by default")
    args = parser.parse_args()
    target, rng = Target.host(args.target), np.random.default_rng(1)
    build = Build(LAYERS[args.tower], DTYPES[args.weights.lower()], args.patches)
    bind = {"SEQ": (16, args.rows), "CTX": -(-args.patches // 64) * 64, "PAST_SEQ": (0, args.patches)}
    peak = 0.0
    for title, graph in (("keys and values of a chunk", build.keys()), ("the rest of the layer", build.rest())):
        options = {"precision": args.precision, "target": target, "threads": args.threads}
        with compile(graph, bind, **options) as exe:
            if not peak:
                peaks = arithmetic_peaks(Compiler(target), exe._pool)
                print(f"{target.level}, {exe._pool.n} workers, " + ", ".join(f"{k} {v:.0f}" for k, v in peaks.items()))
                peak = peaks.get("amx-bf16", peaks.get("bf16", peaks["f32"]))
            exe.bind(**bound(graph))
            shapes = {name: (args.rows, node.shape[-1]) for name, node in graph.leaves("input").items()}
            arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            spent = measure(exe, arrays, args.seconds)
            report(title, exe, spent, args.rows, args.patches, peak)


if __name__ == "__main__":
    main()
