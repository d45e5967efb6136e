"""Weights in memory: stacks packed matrix by matrix against the NumPy layout, tables left in their file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from rlx.backends.cpu import layouts
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.layouts import packed_bytes
from rlx.backends.cpu.steps import worker_loop
from rlx.backends.host import address
from rlx.compiler.compile import Compiler
from rlx.compiler.tensors import Tensors
from rlx.ir.dtypes import DTYPES, F16, F32, Q4_0, Q8_0, DType
from rlx.weights import ModelWeights, open_weights

EXPERTS, ROWS, WIDTH = 3, 21, 64  # rows: no multiple of 16


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[Compiler, WorkerPool]]:
    compiler = Compiler()
    pool = WorkerPool(2, worker_loop(compiler))
    yield compiler, pool
    pool.close()


@pytest.fixture
def tensors(pool: tuple[Compiler, WorkerPool]) -> Iterator[Tensors]:
    found = Tensors(*pool)
    yield found
    found.close()


def blocks(seed: int, dtype: DType, *shape: int) -> np.ndarray:
    """The bytes of random values, by the reference quantizer."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return gguf.quantize(values, gguf.GGMLQuantizationType(dtype.ggml)).view(np.uint8).reshape(-1)


def values(raw: np.ndarray, dtype: DType, *shape: int) -> np.ndarray:
    by_row = raw.reshape(*shape[:-1], -1)
    return gguf.dequantize(by_row, gguf.GGMLQuantizationType(dtype.ggml)).reshape(shape)


def pack(tensors: Tensors, dtype: DType, raw: np.ndarray) -> np.ndarray:
    """A matrix [ROWS, WIDTH] as the kernels of the target take it."""
    return layouts.pack(dtype, raw, ROWS, WIDTH, signed=tensors.compiler.target.isa.signed_codes)


def memory(tensors: Tensors, name: str, at: int, nbytes: int) -> np.ndarray:
    return tensors.buffers[name].part(at, nbytes).read()


@pytest.mark.parametrize("dtype", [F32, F16, Q8_0, Q4_0], ids=str)
def test_a_stack_is_its_matrices_packed_one_after_the_other(tensors: Tensors, dtype: DType) -> None:
    raw = blocks(0, dtype, EXPERTS, ROWS, WIDTH)
    tensors.add_matrix("exps", raw, dtype, EXPERTS, ROWS, WIDTH)
    expected = values(raw, dtype, EXPERTS, ROWS, WIDTH)
    size = packed_bytes(dtype, ROWS, WIDTH)
    assert tensors.nbytes == EXPERTS * size == tensors.buffers["exps"].nbytes
    for expert, matrix in enumerate(raw.reshape(EXPERTS, -1)):
        found = memory(tensors, "exps", expert * size, size)
        np.testing.assert_array_equal(found, pack(tensors, dtype, matrix))
        signed = tensors.compiler.target.isa.signed_codes
        unpacked = layouts.unpack(dtype, found, ROWS, WIDTH, signed=signed)
        np.testing.assert_array_equal(unpacked, expected[expert])


def model(directory: Path) -> dict[str, Any]:
    """A file with a table, experts, and a fused q, k and v; -> the blocks of each."""
    writer = gguf.GGUFWriter(directory / "m.gguf", "qwen3moe")
    found = {}
    for seed, (name, shape, dtype) in enumerate(
        [
            ("token_embd.weight", (40, WIDTH), Q8_0),
            ("blk.0.ffn_gate_up_exps.weight", (EXPERTS, 2 * ROWS, WIDTH), Q8_0),
            ("blk.0.attn_qkv.weight", (3 * ROWS, WIDTH), Q4_0),
            ("output_norm.weight", (WIDTH,), F32),
        ]
    ):
        found[name] = blocks(seed, dtype, *shape).reshape(*shape[:-1], -1)
        if dtype is F32:
            found[name] = found[name].view(np.float32)
        writer.add_tensor(name, found[name], raw_dtype=gguf.GGMLQuantizationType(dtype.ggml))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def row(layout: str, dtype: str, *shape: int) -> dict[str, Any]:
    return {"layout": layout, "dtype": dtype, "shape": [str(dim) for dim in shape]}


MANIFEST = {
    "output_norm.weight": row("rows", "f32", WIDTH),
    "token_embd.weight": row("file", "q8_0", 40, WIDTH),
    "blk.0.ffn_gate_exps.weight": row("r16k4", "q8_0", EXPERTS, ROWS, WIDTH),
    "blk.0.ffn_up_exps.weight": row("r16k4", "q8_0", EXPERTS, ROWS, WIDTH),
    "blk.0.attn_v.weight": row("r16k4", "q4_0", ROWS, WIDTH),
    "blk.0.attn_k.weight": row("file", "q4_0", ROWS, WIDTH),
}


def test_a_model_is_loaded_as_its_manifest_says(tensors: Tensors, tmp_path: Path) -> None:
    file, seen = model(tmp_path), []
    with ModelWeights(open_weights(tmp_path), "qwen3moe") as weights:
        for name, start in (("gate", 0), ("up", ROWS)):
            weights.define(f"blk.0.ffn_{name}_exps.weight", "blk.0.ffn_gate_up_exps.weight", start, ROWS)
        weights.define("blk.0.attn_v.weight", "blk.0.attn_qkv.weight", 2 * ROWS, ROWS)
        weights.define("blk.0.attn_k.weight", "blk.0.attn_qkv.weight", 1, 1, 3)  # every third row: a copy
        tensors.load(MANIFEST, weights, lambda *progress: seen.append(progress))
    size = packed_bytes(Q8_0, ROWS, WIDTH)
    experts = file["blk.0.ffn_gate_up_exps.weight"]
    for name, start in (("gate", 0), ("up", ROWS)):
        for expert in range(EXPERTS):
            matrix = np.ascontiguousarray(experts[expert, start : start + ROWS])
            found = memory(tensors, f"blk.0.ffn_{name}_exps.weight", expert * size, size)
            np.testing.assert_array_equal(found, pack(tensors, Q8_0, matrix.reshape(-1)))
    v = np.ascontiguousarray(file["blk.0.attn_qkv.weight"][2 * ROWS :])
    found = memory(tensors, "blk.0.attn_v.weight", 0, packed_bytes(Q4_0, ROWS, WIDTH))
    np.testing.assert_array_equal(found, pack(tensors, Q4_0, v.reshape(-1)))
    assert [each[0] for each in seen] == ["packing weights"] * len(MANIFEST)
    done, total = [each[1] for each in seen], {each[2] for each in seen}
    read = {n: DTYPES[r["dtype"]].size([int(d) for d in r["shape"]]) for n, r in MANIFEST.items()}
    assert total == {sum(read[n] for n, r in MANIFEST.items() if r["layout"] != "file")} == {done[-1]}


def test_a_table_stays_in_the_file_and_takes_no_memory(tensors: Tensors, tmp_path: Path) -> None:
    file = model(tmp_path)
    weights = ModelWeights(open_weights(tmp_path), "qwen3moe")
    weights.define("blk.0.attn_k.weight", "blk.0.attn_qkv.weight", 1, 1, 3)
    tensors.load({"token_embd.weight": MANIFEST["token_embd.weight"]}, weights)
    raw = weights.raw("token_embd.weight")
    assert tensors.nbytes == 0 and address(tensors.buffers["token_embd.weight"]) == raw.ctypes.data
    weights.close()  # the mapping lives as long as the table does
    np.testing.assert_array_equal(tensors.buffers["token_embd.weight"].read(), file["token_embd.weight"].reshape(-1))

    weights = ModelWeights(open_weights(tmp_path), "qwen3moe")
    weights.define("blk.0.attn_k.weight", "blk.0.attn_qkv.weight", 1, 1, 3)
    tensors.load({"blk.0.attn_k.weight": MANIFEST["blk.0.attn_k.weight"]}, weights)
    expected = np.ascontiguousarray(file["blk.0.attn_qkv.weight"][1::3]).reshape(-1)
    assert tensors.nbytes == expected.size
    np.testing.assert_array_equal(memory(tensors, "blk.0.attn_k.weight", 0, expected.size), expected)
    weights.close()
