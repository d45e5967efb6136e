"""Compiles a graph and runs it next to the interpreter: what the tests of compiled ops share."""

from __future__ import annotations

from math import prod
from typing import Any

import gguf
import numpy as np
import pytest
from backends.cpu.weight_formats import reference, tame_file_bytes

from rlx.backends.cpu.layouts import PACKED_DTYPES
from rlx.backends.cpu.target import supported_levels
from rlx.compiler.executable import compile
from rlx.ir import dims, interp
from rlx.ir.dtypes import F32, DType
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

# Largest error against float64, as a share of the largest magnitude of the result.
EXACT_CEILING = 2e-6
# The same for linears over int8 activations: both sides round the activations to the same grid.
INT8_CEILING = 4e-6
# Types that are tested on every level; of the others, whose kernels have tests of their own, each third on one.
WEIGHT_DTYPES = ("f32", "q8_0", "q4_k")


def levels() -> list[str]:
    return list(supported_levels())


def weight_cases() -> list[Any]:
    """(level, type, precision): the common types on every level, each other one on one; the precisions in turn."""
    found, precisions = levels(), ("exact", "auto")
    others = [t.name for t in PACKED_DTYPES if t.name not in WEIGHT_DTYPES]
    in_turn = [(found[i % len(found)], t, precisions[i % 2]) for i, t in enumerate(others)]
    common = [(level, t, precisions[(i + j) % 2]) for i, level in enumerate(found) for j, t in enumerate(WEIGHT_DTYPES)]
    slow = [pytest.param(*case, marks=() if i % 3 == 0 else pytest.mark.slow) for i, case in enumerate(in_turn)]
    return [(level, t, "exact" if t == "f32" else p) for level, t, p in common] + slow  # f32 has one precision


def quantized(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """-> (what a file holds, the float64 values it stands for by an independent reader)."""
    if dtype is F32:
        values = rng.standard_normal(shape).astype(np.float32) * 0.5
        return values, values.astype(np.float64)
    n, k = prod(shape[:-1]), shape[-1]
    if dtype.is_quantized:
        raw = tame_file_bytes(dtype, n, k, rng)
    else:
        kind = gguf.GGMLQuantizationType[dtype.name.upper()]
        raw = gguf.quants.quantize(rng.standard_normal((n, k)).astype(np.float32) * 0.5, kind).view(np.uint8)
    return raw, reference(dtype, raw, n, k).astype(np.float64).reshape(shape)


def check(
    graph: Graph,
    arrays: dict[str, np.ndarray],
    level: str,
    cache: CompileCache,
    *,
    exact: dict[str, np.ndarray] | None = None,
    ceiling: float = EXACT_CEILING,
    states: dict[str, np.ndarray] | None = None,
    precision: str = "exact",
    env: dict[str, int] | None = None,
    **bind: Any,
) -> None:
    """Runs the compiled graph and the interpreter and compares every output."""
    bind.setdefault("SEQ", (1, 40))
    with compile(graph, bind, precision=precision, target=level, threads=2, cache=cache) as exe:
        got = exe(**arrays, **(env or {}))
        feeds = {**arrays, **(exact or {}), **(states or {})}
        sizes = {"SEQ": len(next(iter(arrays.values()))), "PAST_SEQ": 0, "CTX": 1024, **(env or {})}
        if precision == "auto":  # the lowered graph says which activations are rounded
            want, _ = interp.run(exe.graph, feeds, sizes, dtype=np.float64)
        else:
            want, _ = interp.run(graph, feeds, sizes, dtype=np.float64)
    for name, value in want.items():
        assert got[name].shape == value.shape
        assert np.abs(got[name] - value).max() <= ceiling * np.abs(value).max() + 1e-30, name


def at_once(graph: Graph, arrays: dict[str, Any]) -> Any:
    """Output "y" in float64 of all rows in one call, through caches that hold them all."""
    length = len(arrays["q"])
    env = {"SEQ": length, "PAST_SEQ": 0, "CTX": length, "WINDOW_CTX": length}
    states = graph.leaves("state").items()
    empty = {name: np.zeros([dims.value(dim, env) for dim in node.shape]) for name, node in states}
    return interp.run(graph, {**arrays, **empty}, env, dtype=np.float64)[0]["y"]


def through(exe: Any, arrays: dict[str, Any], split: list[int]) -> Any:
    """Output "y" of as many calls as `split` says, each with some of the rows, up to the last."""
    rows, at = [], 0
    for count in split:
        rows.append(exe(**{n: a[at : at + count] for n, a in arrays.items()}, PAST_SEQ=at)["y"])
        at += count
    assert at == len(arrays["q"])
    return np.concatenate(rows)
