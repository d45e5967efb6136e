#!/usr/bin/env python3
"""Texts a second of embedding models: rlx beside torch, ONNX Runtime, OpenVINO and llama.cpp.

    python benchmarks/embed_versus.py [--only bge-small] [--texts 1000] [--batch 32] [--threads 2] [--rounds 3]

The script writes the models that it measures, with the shapes of bge-small, bge-m3 and Qwen3-Embedding-0.6B and random
weights, into `--folder` (a temporary one by default): a safetensors folder in float32, and a GGUF file in `--type`.
Texts are random ids of 20 to 400 tokens, so tokenizers are not measured. All sides take turns; of the rounds the
fastest counts.

- `rlx f32`: the folder, precision exact. `rlx TYPE`: the GGUF file, precision auto.
- `rlx f32 padded`: the same texts, each made as long as the longest of its batch: what packing saves.
- `torch`: the folder in transformers, batches of texts of similar length, padded, as sentence-transformers computes.
- `onnxruntime f32` and `int8`: torch's export, and that quantized dynamically; `openvino`: the same export.
- `llama.cpp TYPE`: the GGUF file in llama-cpp-python, texts packed into batches of 2048 tokens.

A side whose package is missing is left out and named. `pip install torch transformers onnx onnxruntime openvino
llama-cpp-python` brings all; the export needs torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import save_file

import rlx
from rlx.engine.request import Context
from rlx.platform import cpu_count
from rlx.weights.names import file_names

TYPES = {"f32": GGMLQuantizationType.F32, "f16": GGMLQuantizationType.F16, "q8_0": GGMLQuantizationType.Q8_0}
Ids = list[list[int]]
Run = Callable[[Ids], np.ndarray]


@dataclass(frozen=True)
class Shape:
    """A model: `bert` or `qwen3`, its sizes, and the offset of its first position."""

    arch: str
    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    context: int
    kv_heads: int = 0
    head_dim: int = 0
    first: int = 0


SHAPES = {
    "bge-small": Shape("bert", 384, 12, 12, 1536, 30_522, 512),
    "bge-m3": Shape("bert", 1024, 24, 16, 4096, 250_002, 8192, first=2),
    "qwen3-embedding-0.6b": Shape("qwen3", 1024, 28, 16, 3072, 151_669, 32_768, 8, 128),
    "tiny": Shape("bert", 64, 2, 4, 128, 512, 512),
}


# -- files ------------------------------------------------------------------------------------------------------------


def tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of each tensor."""
    yield "token_embd.weight", (s.vocab, s.hidden)
    if s.arch == "bert":
        yield from (("position_embd.weight", (s.context, s.hidden)), ("token_types.weight", (1, s.hidden)))
        yield from ((f"token_embd_norm.{end}", (s.hidden,)) for end in ("weight", "bias"))
        square, wide = (s.hidden, s.hidden), (s.ffn, s.hidden)
        parts = {**dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)}
        parts |= {"ffn_up": wide, "ffn_down": wide[::-1]}
        for i in range(s.layers):
            for name, shape in parts.items():
                yield from ((f"blk.{i}.{name}.weight", shape), (f"blk.{i}.{name}.bias", shape[:1]))
            for name in ("attn_output_norm", "layer_output_norm"):
                yield from ((f"blk.{i}.{name}.{end}", (s.hidden,)) for end in ("weight", "bias"))
        return
    yield "output_norm.weight", (s.hidden,)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    parts = {"attn_q": (q, s.hidden), "attn_k": (kv, s.hidden), "attn_v": (kv, s.hidden), "attn_output": (s.hidden, q)}
    parts |= {"ffn_gate": (s.ffn, s.hidden), "ffn_up": (s.ffn, s.hidden), "ffn_down": (s.hidden, s.ffn)}
    sizes = {"attn_norm": s.hidden, "ffn_norm": s.hidden, "attn_q_norm": s.head_dim, "attn_k_norm": s.head_dim}
    for i in range(s.layers):
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in parts.items())
        yield from ((f"blk.{i}.{name}.weight", (size,)) for name, size in sizes.items())


def values(s: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """Random weights; norms are around 1."""
    rng = np.random.default_rng(0)
    for name, shape in tensors(s):
        drawn = 0.02 * rng.standard_normal(shape, np.float32)
        yield name, drawn + np.float32("norm" in name and name.endswith("weight"))


def write_folder(out: Path, s: Shape) -> Path:
    """A checkpoint in float32."""
    out.mkdir(parents=True, exist_ok=True)
    found = dict(values(s))
    if s.first:  # GGUF cuts the rows before the first position
        table = found["position_embd.weight"]
        found["position_embd.weight"] = np.concatenate([np.zeros((s.first, s.hidden), np.float32), table])
    save_file({file_names(name, s.arch)[-1]: array for name, array in found.items()}, out / "model.safetensors")
    config = {"hidden_size": s.hidden, "num_hidden_layers": s.layers, "num_attention_heads": s.heads}
    config |= {"intermediate_size": s.ffn, "vocab_size": s.vocab, "max_position_embeddings": s.context + s.first}
    if s.arch == "bert":
        kind = "xlm-roberta" if s.first else "bert"
        config |= {
            "model_type": kind,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-12,
            "pad_token_id": max(s.first - 1, 0),
        }
    else:
        config |= {"model_type": "qwen3", "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim}
        config |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu"}
    (out / "config.json").write_text(json.dumps(config))
    (out / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "models.Pooling"}]))
    (out / "1_Pooling").mkdir(exist_ok=True)
    pooling = "cls" if s.arch == "bert" else "lasttoken"
    (out / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return out


def write_gguf(path: Path, s: Shape, kind: str) -> Path:
    """The same weights in a GGUF file without a vocabulary."""
    writer = GGUFWriter(path, s.arch)
    writer.add_vocab_size(s.vocab)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_uint32(f"{s.arch}.pooling_type", 2 if s.arch == "bert" else 3)
    if s.arch == "bert":
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        writer.add_uint32("tokenizer.ggml.token_type_count", 1)
    else:
        writer.add_head_count_kv(s.kv_heads)
        writer.add_key_length(s.head_dim)
        writer.add_value_length(s.head_dim)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
    for name, array in values(s):
        matrix = array.ndim > 1 and not name.startswith(("position", "token_types"))
        stored = quants.quantize(array, TYPES[kind]) if matrix else array
        writer.add_tensor(name, stored, raw_dtype=TYPES[kind] if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- sides ------------------------------------------------------------------------------------------------------------


def ours(path: Path, precision: str, threads: int) -> Run:
    runner: Any = rlx.auto_runner(path, precision=precision, threads=threads)
    return lambda texts: runner.embed([Context(ids) for ids in texts])


def batches(texts: Ids, size: int) -> Iterator[list[int]]:
    """Numbers of texts of similar length, `size` at a time, the longest first."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    yield from (order[at : at + size] for at in range(0, len(order), size))


def padded(texts: Ids, size: int) -> Ids:
    """Each text as long as the longest of its batch, in the order of a caller who does not sort."""
    found = []
    for at in range(0, len(texts), size):
        part = texts[at : at + size]
        most = max(map(len, part))
        found += [[*ids, *[0] * (most - len(ids))] for ids in part]
    return found


def filled(texts: Ids, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and attention mask of a padded batch, int64 [texts, longest]."""
    most = max(len(texts[number]) for number in numbers)
    ids, mask = np.zeros((2, len(numbers), most), np.int64)
    for row, number in enumerate(numbers):
        size = len(texts[number])
        ids[row, :size], mask[row, :size] = texts[number], 1
    return ids, mask


def over_batches(
    texts: Ids, hidden: Callable[[np.ndarray, np.ndarray], np.ndarray], last: bool, size: int
) -> np.ndarray:
    """Vectors of length 1 by a function from a padded batch to its hidden states."""
    found: list[Any] = [None] * len(texts)
    for numbers in batches(texts, size):
        ids, mask = filled(texts, numbers)
        rows = hidden(ids, mask)
        at = mask.sum(1) - 1 if last else np.zeros(len(numbers), int)
        for row, number in enumerate(numbers):
            found[number] = rows[row, at[row]]
    stacked = np.stack(found)
    return stacked / np.linalg.norm(stacked, axis=1, keepdims=True)


def with_torch(folder: Path, s: Shape, threads: int, size: int) -> tuple[Run, Any]:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            found = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        return np.asarray(found.last_hidden_state.numpy())

    return (lambda texts: over_batches(texts, hidden, s.arch != "bert", size)), model


def exported(model: Any, out: Path) -> Path:
    """Torch's export to ONNX."""
    import torch

    class Hidden(torch.nn.Module):  # tracing passes arguments by position, and transformers takes them by name
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    example = torch.ones((2, 8), dtype=torch.int64)
    axes = {0: "batch", 1: "tokens"}
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(
        Hidden().eval(), (example, example), str(out), input_names=names, output_names=["hidden"], dynamo=False,
        dynamic_axes=dict.fromkeys((*names, "hidden"), axes), opset_version=17,
    )  # fmt: skip
    return out


def with_onnx(path: Path, s: Shape, threads: int, size: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def hidden(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(["hidden"], {"input_ids": ids, "attention_mask": mask})[0])

    return lambda texts: over_batches(texts, hidden, s.arch != "bert", size)


def in_int8(path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    out = path.with_name("int8.onnx")
    quantize_dynamic(path, out, weight_type=QuantType.QInt8, use_external_data_format=True)
    return out


def with_openvino(path: Path, s: Shape, threads: int, size: int) -> Run:
    import openvino

    hint = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", hint)

    def hidden(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.asarray(compiled({"input_ids": ids, "attention_mask": mask})["hidden"])

    return lambda texts: over_batches(texts, hidden, s.arch != "bert", size)


def with_llama(path: Path, s: Shape, threads: int, rows: int = 2048, most: int = 64) -> Run:
    import llama_cpp as peer

    params = peer.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = rows, rows, rows, most
    params.n_threads = params.n_threads_batch = threads
    params.embeddings = True
    params.kv_unified = True  # else each sequence has a part of the cells only
    model = peer.llama_model_load_from_file(str(path).encode(), peer.llama_model_default_params())
    context, batch = peer.llama_init_from_model(model, params), peer.llama_batch_init(rows, 0, 1)

    def compute(texts: Ids, numbers: list[int], found: np.ndarray) -> None:
        at = 0
        for sequence, number in enumerate(numbers):
            for position, token in enumerate(texts[number]):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, 1
                at += 1
        batch.n_tokens = at
        peer.llama_memory_clear(peer.llama_get_memory(context), True) if s.arch != "bert" else None
        assert (peer.llama_encode if s.arch == "bert" else peer.llama_decode)(context, batch) == 0
        for sequence, number in enumerate(numbers):
            found[number] = np.ctypeslib.as_array(peer.llama_get_embeddings_seq(context, sequence), (s.hidden,))

    def run(texts: Ids) -> np.ndarray:
        found, numbers, used = np.empty((len(texts), s.hidden), np.float32), list[int](), 0
        for number, ids in enumerate(texts):
            if used + len(ids) > rows or len(numbers) == most:
                compute(texts, numbers, found)
                numbers, used = [], 0
            numbers.append(number)
            used += len(ids)
        compute(texts, numbers, found)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    return run


def sides(folder: Path, s: Shape, args: argparse.Namespace) -> tuple[dict[str, Run], list[str]]:
    """Name -> what computes vectors of texts, and the names of those whose packages are missing."""
    checkpoint, gguf = write_folder(folder / "hf", s), write_gguf(folder / f"{args.type}.gguf", s, args.type)
    exact = ours(checkpoint, "exact", args.threads)
    found: dict[str, Run] = {"rlx f32": exact, f"rlx {args.type}": ours(gguf, "auto", args.threads)}
    missing, onnx = list[str](), folder / "model.onnx"
    model: list[Any] = []

    def torch_side() -> Run:
        run, loaded = with_torch(checkpoint, s, args.threads, args.batch)
        model.append(exported(loaded, onnx))
        return run

    peers: dict[str, Callable[[], Run]] = {
        "torch": torch_side,
        "onnxruntime f32": lambda: with_onnx(model[0], s, args.threads, args.batch),
        "onnxruntime int8": lambda: with_onnx(in_int8(model[0]), s, args.threads, args.batch),
        "openvino": lambda: with_openvino(model[0], s, args.threads, args.batch),
        f"llama.cpp {args.type}": lambda: with_llama(gguf, s, args.threads),
    }
    for name, make in peers.items():
        try:
            found[name] = make()
        except (ImportError, OSError, IndexError) as error:
            missing.append(f"{name} ({'no export' if isinstance(error, IndexError) else error})")
    return found, missing


def measure(name: str, s: Shape, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, min(400, s.context) + 1, args.texts)
    texts = [rng.integers(5, s.vocab, length).tolist() for length in lengths]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs, missing = sides(Path(folder), s, args)
        inputs = dict.fromkeys(runs, texts)
        runs["rlx f32 padded"], inputs["rlx f32 padded"] = runs["rlx f32"], padded(texts, args.batch)
        first = {side: run(texts[:4]) for side, run in runs.items()}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(args.rounds):
            for side, run in runs.items():
                start = time.perf_counter()
                run(inputs[side])
                best[side] = min(best[side], time.perf_counter() - start)
    total, more = int(lengths.sum()), sum(map(len, padded(texts, args.batch)))
    print(f"\n{name}: {args.texts} texts, {total} tokens ({more} padded), {args.threads} threads")
    for side, seconds in best.items():
        cosine = float(np.einsum("ij,ij->i", first[side], first["rlx f32"]).min())
        ratio = seconds / best["rlx f32"]
        rate = f"{args.texts / seconds:9.1f} texts/s"
        print(f"  {side:18s} {rate}   rlx f32 is {ratio:5.2f} times as fast   cosine {cosine:.5f}")
    for side in missing:
        print(f"  {side}: missing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"one of {', '.join(SHAPES)}; by default all but tiny")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="texts of a padded batch")
    parser.add_argument("--type", choices=TYPES, default="q8_0")
    parser.add_argument("--folder", help="where models are written for a while")
    args = parser.parse_args()
    chosen = [args.only] if args.only else [name for name in SHAPES if name != "tiny"]
    if unknown := [name for name in chosen if name not in SHAPES]:
        sys.exit(f"no model is called {unknown[0]}; there is {', '.join(SHAPES)}")
    for name in chosen:
        measure(name, SHAPES[name], args)


if __name__ == "__main__":
    main()
