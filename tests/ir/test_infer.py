"""Shape rules: a misfit names the op, what it found and what it expects; nothing crashes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ir.cases import (
    ANGLES,
    BETA,
    BIAS,
    BLOCKS,
    CACHES,
    CHOICE,
    COLUMN,
    DELTA,
    EXPERTS,
    HEAD_COLUMN,
    HEADS,
    IDS,
    NORM,
    PAIR,
    ROW,
    WHOLE,
    B,
    G,
    W,
    X,
)
from rlx.errors import ShapeError
from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ
from rlx.ir.dtypes import I32, Q4_K
from rlx.ir.node import LEAVES, Node
from rlx.ir.op_table import REQUIRED

THREE = [G.state("three", [3, CTX, 16])] * 2
TAPS = G.weight("taps", [8, 4])
ROWS_BEFORE = G.state("rows before", [3, 8])
MISFITS = [
    (lambda: ops.silu(IDS), "silu: found operands i32[SEQ]. Expected one f32 operand"),
    (lambda: ops.add(X, W), "add: found operands f32[SEQ, 64], f32[8, 64]. Expected two f32 operands of one shape, or"),
    (lambda: ops.mul(X, B), "mul: found operands f32[SEQ, 64], f32[8]. Expected"),
    (lambda: ops.mul(X, IDS), "mul: found operands f32[SEQ, 64], i32[SEQ]"),
    (lambda: ops.linear(X, B), "linear: found operands f32[SEQ, 64], f32[8]. Expected x [rows, k], weight [n, k]"),
    (lambda: ops.linear(X, G.weight("t", [64, 8])), "linear: found operands f32[SEQ, 64], f32[64, 8]"),
    (lambda: ops.make("linear", X, W, gated="silu"), "Expected x [rows, k], weight [n, k], up [n, k]"),
    (lambda: ops.make("linear", X, W, X, residual=True), "f32[SEQ, 64]. Expected x [rows, k], weight [n, k], residual"),
    (lambda: ops.make("linear", X, W, G.weight("i", [8], I32), bias=True), "i32[8]. Expected x [rows, k], weight"),
    (lambda: ops.make("linear", IDS, W), "linear: found operands i32[SEQ], f32[8, 64]"),
    (lambda: ops.embedding(ROW, IDS), "embedding: found operands f32[64], i32[SEQ]. Expected table [vocab, width]"),
    (lambda: ops.embedding(W, X), "embedding: found operands f32[8, 64], f32[SEQ, 64]"),
    (lambda: ops.rms_norm(X, NORM, eps=1e-6), "rms_norm: found operands f32[SEQ, 64], f32[16]. Expected f32 x"),
    (lambda: ops.rms_norm(G.input("v", [SEQ]), eps=1e-6), "rms_norm: found operands f32[SEQ]"),
    (lambda: ops.make("rms_norm", X, eps=1e-6, out="i8"), "rms_norm: out must be one of f32, q8a, bf16, found 'i8'"),
    (lambda: ops.quantize(X, "f32"), "quantize: out must be one of q8a, bf16, found 'f32'"),
    (lambda: ops.make("rms_norm", HEADS, eps=1e-6, out="q8a"), "quantize: found operands f32[SEQ, 4, 16]"),
    (lambda: ops.quantize(WHOLE), "quantize: found operands f32[SEQ, 16]. Expected f32 x [rows, ..., k] with k a"),
    (lambda: ops.rope_angles(X, ROW), "rope_angles: found operands f32[SEQ, 64], f32[64]. Expected positions i32["),
    (lambda: ops.rope(HEADS, X, style="neox"), "rope: found operands f32[SEQ, 4, 16], f32[SEQ, 64]. Expected f32 x ["),
    (lambda: ops.rope(HEADS, ANGLES, style="gptj"), "rope: style must be interleaved or neox, found 'gptj'"),
    (lambda: ops.make("rope", HEADS, ANGLES, style="neox", norm_eps=1e-6), "weight [head_dim] if norm_eps is given"),
    (lambda: ops.kv_write(PAIR, PAIR), "kv_write: found operands f32[SEQ, 2, 16], f32[SEQ, 2, 16]. Expected a state"),
    (lambda: ops.kv_write(CACHES["f16"], HEADS), "kv_write: found operands f16[2, CTX, 16], f32[SEQ, 4, 16]"),
    (lambda: ops.make("kv_write", CACHES["f16"], PAIR), "Expected a cache of dtype f32"),
    (lambda: ops.make("rope_kv_write", CACHES["f16"], style="neox", dtype="f16"), "rope: found operands none"),
    (lambda: ops.attention(HEADS, *THREE, scale=1), "attention: found operands f32[SEQ, 4, 16], f32[3, CTX, 16]"),
    (lambda: ops.attention(HEADS, CACHES["f32"], G.state("d", [2, CTX, 8]), scale=1), "heads a multiple of kv_heads"),
    (lambda: ops.attention(X, CACHES["f32"], CACHES["f32"], scale=1), "attention: found operands f32[SEQ, 64]"),
    (lambda: ops.attention(HEADS, *[CACHES["f32"]] * 2, scale=1, window=0), "window must be at least 1, found 0"),
    (
        lambda: ops.attention(HEADS, *[CACHES["f32"]] * 2, BIAS, scale=1, length=CTX),
        "f32[SEQ, 1, PAST_SEQ+SEQ]. Expected a bias f32 [SEQ, 1 or 4, CTX]",
    ),
    (lambda: ops.attention(HEADS, *[CACHES["f32"]] * 2, visible=X, scale=1), "Expected visible i32[SEQ]"),
    (lambda: ops.attention(HEADS, *[CACHES["f32"]] * 2, BIAS, causal=False, scale=1), "more than one mask is given"),
    (lambda: ops.attention(HEADS, PAIR, PAIR, scale=1, length=CTX), "length is CTX, but there are SEQ keys"),
    (lambda: ops.make("attention", HEADS, PAIR, PAIR, scale=1, mask="all"), "mask must be one of causal, none"),
    (lambda: ops.as_cache(X), "as_cache: found operands f32[SEQ, 64]. Expected f32 x [positions, heads, head_dim]"),
    (lambda: ops.attention(PAIR, PAIR, PAIR, scale=1.0, around=True), "attention: the mask around needs a window"),
    (lambda: ops.as_cache(PAIR, order="columns"), "as_cache: order must be one of rows, heads, found 'columns'"),
    (lambda: ops.overlay_rows(X, WHOLE, IDS), "overlay_rows: found operands f32[SEQ, 64], f32[SEQ, 16], i32[SEQ]"),
    (lambda: ops.layer_norm(X, NORM), "layer_norm: found operands f32[SEQ, 64], f32[16]. Expected f32 x"),
    (lambda: ops.rope_angles(IDS, ROW, sections=(60, 4)), "Expected positions i32[rows, 2] and inv_freq f32[n/2]"),
    (lambda: ops.rope_angles(CHOICE, ROW, sections=(60, 3)), "sections (60, 3) do not divide 64 frequencies"),
    (lambda: ops.reduce_mean(HEADS, axis=2), "Expected axis -1, or axis 1 of f32 x [rows, n, width]"),
    (lambda: ops.softmax(ROW), "softmax: found operands f32[64]. Expected x f32[..., width]"),
    (lambda: ops.argmax(HEADS), "argmax: found operands f32[SEQ, 4, 16]. Expected x f32[rows, width]"),
    (lambda: ops.argmax(ops.quantize(X)), "argmax: found operands q8a[SEQ, 64]"),
    (lambda: ops.top_k(X, 65), "top_k: k must lie in 1..64, found 65"),
    (lambda: ops.top_k(X, 9, groups=8, kept=1), "top_k: 1 of 8 groups of 64 elements, of which 9 are chosen"),
    (lambda: ops.top_k(X, 0), "top_k: k must lie in 1..64, found 0"),
    (lambda: ops.last_row(G.input("scalar", [])), "last_row: found operands f32[]. Expected x [rows, ...]"),
    (lambda: ops.reshape(X, [SEQ, 65]), "reshape: found operands f32[SEQ, 64]. Expected the shape [SEQ, 65] to"),
    (lambda: ops.reshape(X, [CTX, 64]), "reshape: found operands f32[SEQ, 64]. Expected the shape [CTX, 64]"),
    (lambda: ops.make("pack", X, layout="r16k4"), "pack: found operands f32[SEQ, 64]. Expected a weight [n, k]"),
    (lambda: ops.add(X, HEAD_COLUMN), "the second a row [width], a column [..., 1] or a scalar [1]"),
    (lambda: ops.make("add", COLUMN, X), "add: found operands f32[SEQ, 1], f32[SEQ, 64]"),
    (lambda: ops.sub(HEADS, COLUMN), "sub: found operands f32[SEQ, 4, 16], f32[SEQ, 1]"),
    (lambda: ops.sqrt(IDS), "sqrt: found operands i32[SEQ]"),
    (lambda: ops.make("clamp", X), "clamp: neither low nor high is given"),
    (lambda: ops.clamp(X, 1.0, 0.5), "clamp: low is 1.0, above high, which is 0.5"),
    (lambda: ops.quantize(HEADS), "quantize: found operands f32[SEQ, 4, 16]"),
    (lambda: ops.expert_linear(X, IDS, EXPERTS[0]), "Expected x [rows, k] or [rows, slots, k], ids i32[rows, slots], "),
    (lambda: ops.expert_linear(X, X, EXPERTS[0]), "expert_linear: found operands f32[SEQ, 64], f32[SEQ, 64]"),
    (lambda: ops.expert_linear(X, CHOICE, W), "expert_linear: found operands f32[SEQ, 64], i32[SEQ, 2], f32[8, 64]"),
    (lambda: ops.expert_linear(WHOLE, CHOICE, EXPERTS[0]), "expert_linear: found operands f32[SEQ, 16]"),
    (lambda: ops.expert_linear(HEADS, CHOICE, EXPERTS[0]), "expert_linear: found operands f32[SEQ, 4, 16]"),
    (lambda: ops.expert_linear(X, CHOICE, *EXPERTS), "expert_linear: found operands"),
    (lambda: ops.expert_linear(BLOCKS, CHOICE, EXPERTS[0], gated="silu"), "weight [experts, n, k], up [experts, n, k]"),
    (lambda: ops.causal_conv(ANGLES, ANGLES, TAPS), "causal_conv: found operands f32[SEQ, 8], f32[SEQ, 8], f32[8, 4]"),
    (lambda: ops.causal_conv(ROWS_BEFORE, WHOLE, TAPS), "Expected state f32[taps - 1, channels], x f32"),
    (lambda: ops.causal_conv(ROWS_BEFORE, ANGLES, G.weight("t", [8, 3])), "causal_conv: found operands f32[3, 8]"),
    (lambda: ops.gated_delta(*DELTA[:5], BETA, scale=1, heads="alternating"), "heads must be tiled or grouped, found"),
    (lambda: ops.gated_delta(HEADS, *DELTA[1:], scale=1), "gated_delta: found operands f32[SEQ, 4, 16]"),
    (lambda: ops.gated_delta(DELTA[0], *[G.input("q3", [SEQ, 3, 8])] * 2, *DELTA[3:], scale=1), "of key_heads"),
    (lambda: ops.gated_delta(*DELTA[:3], PAIR, *DELTA[4:], scale=1), "gated_delta: found operands f32[4, 8, 16]"),
    (lambda: ops.gated_delta(*DELTA[:5], X, scale=1), "v f32[rows, heads, value_dim], g f32[rows, heads], beta"),
    (lambda: ops.gated_delta(*DELTA[:2], HEADS, *DELTA[3:], scale=1), "gated_delta: found operands f32[4, 8, 16]"),
    (lambda: ops.mix(HEADS, PAIR), "mix: found operands f32[SEQ, 4, 16], f32[SEQ, 2, 16]. Expected values f32"),
    (lambda: ops.mix(X, X), "mix: found operands f32[SEQ, 64], f32[SEQ, 64]"),
    (lambda: ops.take(X, IDS), "take: found operands f32[SEQ, 64], i32[SEQ]. Expected f32 x [rows, n] or [n], and ids"),
    (lambda: ops.take(HEADS, CHOICE), "take: found operands f32[SEQ, 4, 16], i32[SEQ, 2]"),
    (lambda: ops.take(W, CHOICE), "take: found operands f32[8, 64], i32[SEQ, 2]"),
    (lambda: ops.take(X, X), "take: found operands f32[SEQ, 64], f32[SEQ, 64]"),
    (lambda: ops.reduce_mean(ROW), "reduce_mean: found operands f32[64]. Expected f32 x [rows, ..., width]"),
    (lambda: ops.reduce_sum(IDS), "reduce_sum: found operands i32[SEQ]"),
    (lambda: ops.slice(X, 3, 65), "slice: found operands f32[SEQ, 64]. Expected 3:65 within 64"),
    (lambda: ops.slice(X, 3, 3), "slice: found operands f32[SEQ, 64]. Expected 3:3 within 64"),
    (lambda: ops.slice(X, -1, 3), "Expected -1:3 within 64"),
    (lambda: ops.slice(X, 0, 1, axis=0), "slice: found operands f32[SEQ, 64]. Expected f32 x with an axis 0"),
    (lambda: ops.make("slice", X, axis=2, start=0, stop=1), "Expected f32 x with an axis 2"),
    (lambda: ops.concat(X, HEADS), "concat: found operands f32[SEQ, 64], f32[SEQ, 4, 16]. Expected f32 operands that"),
    (lambda: ops.concat(X, IDS), "concat: found operands f32[SEQ, 64], i32[SEQ]"),
    (lambda: ops.concat(HEADS, PAIR, axis=2), "differ in axis 2 only"),
    (lambda: ops.concat(X, X, axis=0), "differ in axis 0 only, which is not that of the rows"),
    (lambda: ops.make("concat"), "concat: found operands none"),
    (lambda: ops.make("elementwise", expr=0), "elementwise: found operands none"),
    (lambda: ops.make("elementwise", X, B, expr=0), "elementwise: found operands f32[SEQ, 64], f32[8]"),
    (lambda: ops.make("elementwise", X, expr=("neg", 1)), "elementwise: 1 is no expression over 1 operands"),
    (lambda: ops.make("elementwise", X, expr=("cos", 0)), "elementwise: ('cos', 0) is no expression"),
    (lambda: ops.make("elementwise", X, expr=("add", 0)), "elementwise: ('add', 0) is no expression"),
    (lambda: ops.make("convolution", X), "no op is called 'convolution'. A custom op is known once"),
    (lambda: ops.make("scale", X), "scale: attribute by is missing. Its attributes: by"),
    (lambda: ops.make("neg", X, by=1), "neg: unknown attribute by. Its attributes: none"),
    (lambda: ops.make("input", name="x"), "leaves are made by Graph.input"),
    (lambda: G.input("x", [SEQ, 0]), "input 'x': dims must be positive, found [SEQ, 0]"),
    (lambda: G.weight("w", [4, 100], Q4_K), "a row of 100 elements is no multiple of the 256-element blocks of q4_k"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), MISFITS, ids=[m.split(".")[0] for _, m in MISFITS])
def test_a_misfit_names_the_op_the_shapes_and_the_way_out(make: Callable[[], Node], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("op", [op for op in ops.OPS if op not in LEAVES])
@pytest.mark.parametrize("operands", [(), (X,) * 9, (IDS, IDS), (CACHES["f32"],), (ops.quantize(X), X)])
def test_no_operands_make_an_op_crash(op: str, operands: tuple[Node, ...]) -> None:
    """Any operands: a node or a ShapeError, never anything else."""
    examples = {"eps": 1e-6, "style": "neox", "scale": 1.0, "k": 1, "shape": (SEQ, 64), "layout": "r16k4", "expr": 0}
    examples |= {"start": 0, "stop": 1}
    required = {name: examples.get(name, 1.0) for name, v in ops.OPS[op].attrs.items() if v is REQUIRED}
    try:
        node = ops.make(op, *operands, **required)
    except ShapeError as error:
        assert str(error)
    else:
        assert node.op == op
