"""Attention of few rows of the device "cuda", run on paper (`simt.py`) and compared with NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import simt

from rlx.backends.cuda.agreed.steps import POSITIONS, RANGES
from rlx.backends.cuda.code import Code, kernel_of
from rlx.backends.cuda.features import Features
from rlx.backends.cuda.kernels import row_attention as few
from rlx.backends.cuda.kernels import row_chunks as chunks
from rlx.backends.cuda.kernels.attention import Attention
from rlx.backends.cuda.kernels.cache import Cache, Rope, segment_of
from rlx.backends.cuda.target import named
from rlx.ir.dims import PAST_SEQ, SEQ
from rlx.ir.dtypes import DTYPES
from rlx.ir.segments import FIRST_ROW, PAST, ROWS, SLOT
from rlx.ir.stored import BLOCKS, round_blocks

Array = np.ndarray[Any, Any]
PAGE, COLUMNS = 64, 4
#: Of the largest result. Keys and values of 8 bits are sums of two bf16.
LIMITS = {"f16": 3e-6, "bf16": 3e-6, "f32": 3e-6, "q8_0": 2e-5}
SYMBOLS = ["SEQ", "PAST_SEQ", "SPLITS", "SHARING", "EACH"]
POINTERS = [
    "q",
    "keys",
    "values",
    "pages",
    "sinks",
    "operand",
    "segments",
    "out",
    "scratch",
    "k",
    "v",
    "angles",
]
CAUSAL = Attention(
    heads=2, kv_heads=1, width=32, scale=0.3, window=None, cap=None, mask="causal", length=PAST_SEQ + SEQ, rows=SEQ,
    bias_heads=1, sinks=False, out="f32",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An attention, the type of the cache, rows, and positions before them."""

    changes: dict[str, Any]
    dtype: str
    rows: int
    past: int


CASES = {
    "f16": Case({}, "f16", 2, 150),
    "one row of several key heads": Case({"heads": 4, "kv_heads": 2}, "f16", 1, 200),
    "bf16, window": Case({"window": 100}, "bf16", 2, 300),
    "f32, odd groups, cap, sinks": Case({"heads": 3, "width": 48, "cap": 5.0, "sinks": True}, "f32", 2, 130),
    "q8_0, more heads than a block has": Case({"heads": 9, "width": 64}, "q8_0", 1, 140),
    "odd heads": Case({"width": 13}, "f16", 1, 70),
    "heads of eights": Case({"width": 40, "sinks": True}, "bf16", 1, 129),
    "wide heads": Case({"width": 272}, "f16", 1, 130),
    "heads of 512": Case({"heads": 8, "width": 512}, "f16", 1, 70),
    "all positions": Case({"mask": "none", "heads": 1}, "f16", 3, 100),
    "visible positions": Case({"mask": "visible"}, "f32", 3, 100),
    "a bias of heads": Case({"mask": "bias", "bias_heads": 2}, "f16", 2, 90),
    "ranges of several chunks": Case({"width": 16}, "f16", 1, 2500),
    "results in bf16": Case({"out": "bf16"}, "f16", 1, 100),
}


def stored(values: Array, dtype: str) -> tuple[Array, Array]:
    """Values as a cache has them, and what they are then."""
    if dtype == "f16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = simt.to_bf16(values)
        return bits, simt.from_bf16(bits)
    if dtype == "f32":
        return values, values
    scales, codes = BLOCKS[dtype][1](values.reshape(*values.shape[:-1], -1, 32))
    raw = np.concatenate([scales.astype(np.float16).view(np.uint8), codes.astype(np.int8).view(np.uint8)], -1)
    return raw.reshape(*values.shape[:-1], -1), round_blocks(values, dtype)


def expected_of(a: Attention, q: Array, k: Array, v: Array, given: dict[str, Array]) -> Array:
    rows, length, group = len(q), k.shape[1], a.heads // a.kv_heads
    own, positions = length - rows + np.arange(rows), np.arange(length)
    scores = np.einsum("rhd,htd->hrt", q.astype(np.float64), np.repeat(k, group, 0)) * a.scale
    if a.cap is not None:
        scores = a.cap * np.tanh(scores / a.cap)
    if a.mask == "bias":
        scores = scores + given["operand"].reshape(rows, a.bias_heads, length).swapaxes(0, 1)
    last = own if a.mask == "causal" else given["operand"] if a.mask == "visible" else np.full(rows, length)
    hidden = positions > last[:, None]
    if a.window is not None:
        hidden |= own[:, None] - positions >= a.window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    sinks = np.exp(given["sinks"].astype(np.float64)[:, None] - scores.max(-1)) if a.sinks else 0
    return np.einsum("hrt,htd->rhd", weights / (weights.sum(-1) + sinks)[..., None], np.repeat(v, group, 0))


@pytest.fixture(params=["sm_120", "sm_75"])
def features(request: pytest.FixtureRequest) -> Features:
    """What a card has: one whose tensor cores multiply bf16, and one where lanes do."""
    return named(request.param).features


def kernel_for(
    a: Attention, dtype: str, features: Features, *, shared: bool, capacity: int, before: bool = False
) -> Any:
    """The kernel of calls of one sequence. With `before` it rotates the queries, and writes the newest position."""
    code = Code("kernel", dict.fromkeys(POINTERS), SYMBOLS, features)
    of, type_ = code.pointers, DTYPES[dtype]
    keys, values = (
        Cache(of[name], type_, a.kv_heads, a.width, capacity, page=PAGE, pages=of["pages"], table=capacity // PAGE)
        for name in ("keys", "values")
    )
    tiles = chunks.tiles_of(a, type_, type_, features.shared)
    number, share = code.block, None
    if shared:
        sharing = code.dim_named("SHARING")
        own = code.block & ((code.number(1) << sharing) - 1)
        number = code.block >> sharing
        share = chunks.Share(own, code.dim_named("EACH"), code.dim_named("SPLITS"), number // a.parts)
    rope = Rope(of["angles"], a.width // 2, False)
    first = few.Before(rope, (few.Written(of["k"], PAST_SEQ, rope), few.Written(of["v"], PAST_SEQ, None)))
    segment = segment_of(code, number // a.parts, None, 0, 0)
    few.attention(
        code, a, tiles, keys, values, segment, number // a.parts, number % a.parts, share,
        first if before else few.Before(), early=before,
    )  # fmt: skip
    return kernel_of(code)


def paged(values: Array, pages: Array) -> Array:
    found = np.empty_like(values).reshape(len(values), -1, PAGE, *values.shape[2:])
    found[:, pages] = values.reshape(found.shape)
    return found


def bits(count: int) -> int:
    """The logarithm of the smallest power of two that is not smaller."""
    return (count - 1).bit_length()


def run(kernel: Any, given: dict[str, Array], blocks: int, extents: list[int]) -> tuple[simt.Memory, dict[str, int]]:
    memory = simt.Memory()
    given = {name: given.get(name, np.zeros(4, np.float32)) for name in POINTERS}
    places = {name: memory.put(each) for name, each in given.items()}
    simt.Program(kernel.text)(memory, blocks, places, extents, kernel.shared)
    return memory, places


@pytest.mark.parametrize("name", CASES)
def test_few_rows(name: str, features: Features) -> None:
    """The result is that of NumPy, and has the same bits however many ranges of positions a block has."""
    case, rng = CASES[name], np.random.default_rng(len(name))
    a, length = replace(CAUSAL, **case.changes), case.rows + case.past
    capacity = -(-length // PAGE) * PAGE
    q = rng.standard_normal((case.rows, a.heads, a.width)).astype(np.float32)
    pages = rng.permutation(capacity // PAGE).astype(np.int32)
    (keys, k), (values, v) = (
        stored(rng.standard_normal((a.kv_heads, capacity, a.width)).astype(np.float32), case.dtype) for _ in range(2)
    )
    operand = rng.standard_normal(case.rows * a.bias_heads * length).astype(np.float32)
    if a.mask == "visible":
        operand = rng.integers(0, length, case.rows).astype(np.int32)
    empty = np.full(q.shape, np.nan, np.float32) if a.out == "f32" else np.full(q.shape, 0x7FC0, np.int16)
    given = {
        "q": q, "keys": paged(keys, pages), "values": paged(values, pages), "pages": pages, "operand": operand,
        "sinks": rng.standard_normal(a.heads).astype(np.float32), "out": empty,
    }  # fmt: skip
    expected = expected_of(a, q, k[:, :length], v[:, :length], given)
    found = []
    for each in (None, 64, 128, 256, 4096):
        most = bits(min(RANGES, -(-length // (each or length))))
        room = 1 << (min(-(-length // POSITIONS), RANGES) - 1).bit_length()
        kernel = kernel_for(a, case.dtype, features, shared=each is not None, capacity=capacity)
        assert kernel.shared <= features.shared
        blocks = case.rows * a.parts << most
        given["scratch"] = np.zeros(case.rows * a.heads * room * a.partial, np.float32)
        memory, places = run(kernel, given, blocks, [case.rows, case.past, room, most, each or 0])
        found.append(memory.get(places["out"], q.shape, empty.dtype).copy())
        assert not memory.get(places["scratch"], given["scratch"].shape, np.int32).any()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    result, limit = (found[0], LIMITS[case.dtype]) if a.out == "f32" else (simt.from_bf16(found[0]), 2**-8)
    assert np.abs(result - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("past", [0, 63, 64, 150, 700])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_a_row_writes_the_newest_position(dtype: str, past: int, features: Features) -> None:
    """The cache gets the rotated key and the value, and the row sees them as the cache has them."""
    a, rng = replace(CAUSAL, heads=4, kv_heads=2, rows=1, length=PAST_SEQ + 1), np.random.default_rng(past)
    capacity, half = -(-(past + 1) // PAGE) * PAGE, a.width // 2
    q, k, v = (rng.standard_normal((1, heads, a.width)).astype(np.float32) for heads in (4, 2, 2))
    angle = rng.standard_normal(half)
    angles = np.concatenate([np.cos(angle), np.sin(angle)]).astype(np.float32)

    def rotated(x: Array) -> Array:
        low, high, cos, sin = x[..., :half], x[..., half:], angles[:half], angles[half:]
        return np.concatenate([low * cos - high * sin, low * sin + high * cos], -1).astype(np.float32)

    history = rng.standard_normal((2, a.kv_heads, capacity, a.width)).astype(np.float32)
    (keys, _), (values, _) = (stored(each, dtype) for each in history)
    history[0, :, past], history[1, :, past] = rotated(k)[0], v[0]
    new = [stored(each, dtype) for each in history]
    pages = rng.permutation(capacity // PAGE).astype(np.int32)
    room = 1 << (-(-(past + 1) // POSITIONS) - 1).bit_length()
    given = {
        "q": q, "k": k, "v": v, "angles": angles, "keys": paged(keys, pages), "values": paged(values, pages),
        "pages": pages, "out": np.full_like(q, np.nan),
        "scratch": np.zeros(a.heads * room * a.partial, np.float32),
    }  # fmt: skip
    kernel = kernel_for(a, dtype, features, shared=True, capacity=capacity, before=True)
    for each in (64, 128, 4096):
        most = bits(-(-(past + 1) // each))
        memory, places = run(kernel, given, a.parts << most, [1, past, room, most, each])
        for name, (kept, _) in zip(("keys", "values"), new, strict=True):
            after = memory.get(places[name], given[name].shape, kept.dtype)
            np.testing.assert_array_equal(after, paged(kept, pages))
        seen = [each[:, : past + 1] for _, each in new]
        expected = expected_of(a, rotated(q), *seen, given)
        found = memory.get(places["out"], q.shape)
        assert np.abs(found - expected).max() <= LIMITS[dtype] * np.abs(expected).max()


def test_rows_of_several_sequences() -> None:
    """Each row sees its own sequence, whatever the lengths; blocks without ranges do nothing."""
    rng, lengths = np.random.default_rng(3), (5, 700, 64, 0, 129)
    a, rows, capacity, room = CAUSAL, sum(n > 0 for n in (5, 700, 64, 0, 129)), 704, 16
    table = np.zeros((len(lengths), COLUMNS), np.int32)
    table[:, ROWS] = [n > 0 for n in lengths]
    table[:, PAST], table[:, SLOT] = np.maximum(np.array(lengths) - 1, 0), [3, 1, 0, 4, 2]
    table[:, FIRST_ROW] = np.cumsum([0, *table[:-1, ROWS]])
    cache = rng.standard_normal((2, len(lengths), 1, capacity, a.width)).astype(np.float16)
    q = rng.standard_normal((rows + 1, a.heads, a.width)).astype(np.float32)
    found = []
    for blocks, each in ((16, 64), (4, 256), (1, 1024)):
        code = Code("kernel", dict.fromkeys(POINTERS), SYMBOLS)
        of = code.pointers
        keys, values = (
            Cache(of[name], DTYPES["f16"], 1, a.width, capacity, slotted=True) for name in ("keys", "values")
        )
        row = code.block // blocks
        segment = segment_of(code, row, of["segments"], COLUMNS, len(lengths))
        share = chunks.Share(code.block % blocks, code.number(each), code.number(room), row)
        tiles = chunks.tiles_of(a, DTYPES["f16"], DTYPES["f16"], 99 << 10)
        few.attention(code, a, tiles, keys, values, segment, row, code.number(0), share)
        given = {
            "q": q, "keys": cache[0], "values": cache[1], "segments": table, "out": np.full_like(q, np.nan),
            "scratch": np.zeros(len(q) * a.heads * room * a.partial, np.float32),
        }  # fmt: skip
        memory, places = run(kernel_of(code), given, len(q) * blocks, [rows, 0, room, blocks, each])
        found.append(memory.get(places["out"], q.shape).copy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert np.isnan(found[0][rows]).all(), "a row of no sequence"
    for first, length, slot in zip(table[:, FIRST_ROW], lengths, table[:, SLOT], strict=True):
        if length:
            k, v = cache[:, slot, :, :length].astype(np.float32)
            expected = expected_of(a, q[first : first + 1], k, v, {"operand": np.zeros(1)})
            assert np.abs(found[0][first] - expected[0]).max() <= 3e-6 * np.abs(expected).max()
