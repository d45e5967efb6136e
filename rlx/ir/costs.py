"""The cost of a node: floating-point operations from the op table, and the bytes that it must access."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from rlx.ir.dims import Dim, value
from rlx.ir.dtypes import BF16, Q8A
from rlx.ir.node import LEAVES, Node
from rlx.ir.op_table import OPS, of_segment
from rlx.ir.segments import is_segmented
from rlx.ir.text import body


def cost(node: Node, env: Mapping[str, int]) -> tuple[int, int]:
    """(floating-point operations, bytes read and written) of one node when the symbols have these values.

    In a batch, the rows are counted as evenly divided into segments, each after PAST_SEQ tokens. Page tables are not
    counted.
    """
    operations, read, written = _work(node, env)
    return operations, sum(read) + written


def stored_bytes(node: Node, env: Mapping[str, int]) -> int:
    """Of the bytes that `cost` counts those of weights and states, which a step reads from memory.

    The other values of a step go from one kernel to the next through caches.
    """
    _, read, written = _work(node, env)
    stored = sum(size for operand, size in zip(node.inputs, read, strict=False) if _is_stored(operand))
    if read and OPS[node.op].effect:
        return stored + read[0]  # the state is written, too
    return stored + (written if _is_stored(node) else 0)


def _is_stored(node: Node) -> bool:
    """Whether the node is a weight or state, a view of one, or an update of one in place."""
    while node.op in ("reshape", "pack") or (node.op not in LEAVES and OPS[node.op].writes):
        node = node.inputs[0]
    return node.op in ("weight", "state")


def _work(node: Node, env: Mapping[str, int]) -> tuple[int, list[int], int]:
    """Operations, bytes read of each operand, and bytes written."""
    if node.op in LEAVES or node.op in ("reshape", "pack"):
        return 0, [], 0
    if is_segmented(node):
        return _of_segments(node, env)
    if node.op == "call":
        return _of_body(node, env)
    attrs = {k: value(v, env) if isinstance(v, Dim) else v for k, v in node.attrs}
    operands = node.inputs[:-1] if attrs.get("page") else node.inputs
    sizes, result = [_size(i, env) for i in operands], _size(node, env)
    read, written = _touched(node, sizes, result, attrs)
    moved = [i.dtype.size(s) for i, s in zip(operands, read, strict=True)]
    return OPS[node.op].flops(sizes, result, attrs), moved, node.dtype.size(written)


def arithmetic(node: Node) -> str:
    """The arithmetic of a node: by the activation type for linears, possibly bf16 for attention, otherwise f32."""
    if OPS[node.op].multiplies:
        return {Q8A: "int8", BF16: "bf16"}.get(node.inputs[0].dtype, "f32")
    return "bf16" if node.op == "attention" and node["bf16"] else "f32"


def peak(kind: str, peaks: Mapping[str, float]) -> float:
    """Peak rate of a kind of arithmetic; a machine without it computes in f32.

    Args:
        peaks: rates by kind, "f32" among them.
    """
    return peaks.get(kind, peaks["f32"])


def filled(env: Mapping[str, int]) -> dict[str, int]:
    """The symbol values of a step, with cache capacities set to the positions that it sees."""
    length = env.get("PAST_SEQ", 0) + env.get("SEQ", 1)
    return dict(env) | {"CTX": length, "WINDOW_CTX": length}


def _of_segments(node: Node, env: Mapping[str, int]) -> tuple[int, list[int], int]:
    count = value(node.inputs[-1].shape[0], env)
    rows, more = divmod(env["SEQ"], count)
    parts = [(rows, count - more), (rows + 1, more)]
    found = [(times, _work(of_segment(node, size), env)) for size, times in parts if size and times]
    read = [sum(column) for column in zip(*([times * each for each in work[1]] for times, work in found), strict=True)]
    return sum(times * work[0] for times, work in found), read, sum(times * work[2] for times, work in found)


def _of_body(node: Node, env: Mapping[str, int]) -> tuple[int, list[int], int]:
    """A `call` counts what the nodes of its body compute, and what they read of its operands."""
    rows = {"SEQ": value(node.shape[0], env)}
    read, operations = dict[str, int](), 0
    for inner in body(node["body"]).nodes():
        work = _work(inner, rows)
        operations += work[0]
        for operand, size in zip(inner.inputs, work[1], strict=False):
            read[operand.name] = max(read.get(operand.name, 0), size)
    return operations, [read[f"in{i}"] for i in range(len(node.inputs))], node.dtype.size(_size(node, env))


def _size(node: Node, env: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(value(d, env) for d in node.shape)


def _touched(
    node: Node, sizes: list[tuple[int, ...]], result: tuple[int, ...], attrs: Mapping[str, Any]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The elements of each operand that are read, and of the result that are written."""
    if node.op == "embedding":
        return [result, sizes[1]], result
    if node.op == "expert_linear":
        experts = min(prod(sizes[1]), sizes[2][0])  # upper bound: all chosen experts differ
        return [*sizes[:2], *((experts, *s[1:]) for s in sizes[2:])], result
    if node.op in ("last_row", "take_rows"):
        return [result, *sizes[1:]], result
    if node.op in ("kv_write", "rope_kv_write"):
        rows, heads, head_dim = sizes[1]
        return [(0, 0), *sizes[1:]], (heads, rows, head_dim)
    if OPS[node.op].effect:
        return [*sizes[:-1], (0,)] if attrs["aside"] else sizes, (prod(result) + prod(sizes[0]),)
    if node.op == "attention":
        oldest = (attrs["window"] or attrs["length"]) + result[0] - 1
        caches = [(s[0], min(attrs["length"], oldest), s[2]) for s in sizes[1:3]]
        return [sizes[0], *caches, *sizes[3:]], result
    return sizes, result


def kind_of(node: Node) -> str:
    """The kind of work of a node: its op, for linears with the type of the weight and what is fused."""
    if node.op != "linear":
        return node.op
    extras = [name for name in ("gated", "bias", "residual") if node[name]]
    return "-".join(["linear", node.inputs[1].dtype.name, *extras])
