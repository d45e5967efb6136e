"""The golden checkpoints, read without rlx's own readers: by NumPy and the `gguf` package."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.ir import interp
from rlx.ir.dims import value
from rlx.ir.dtypes import BF16, BY_GGML, F32, DType
from rlx.ir.graph import Graph
from rlx.models import ModelConfig

CTX = 80


@dataclass
class Tensor:
    """One tensor: what the file says, and its float32 values."""

    dtype: DType
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class Tensors(dict[str, Tensor]):
    """A file's tensors under canonical names, as the `Weights` of `rlx.models`."""

    def has(self, name: str) -> bool:
        return name in self

    def info(self, name: str) -> Tensor:
        return self[name]

    def array(self, name: str) -> np.ndarray:
        return self[name].values


# Module path in a checkpoint -> canonical name; "post_attention_layernorm" is looked up by family.
HF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

SANDWICHED = ("gemma2", "gemma3")  # norms before and behind attention


def canonical(name: str, family: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name.startswith("lm_head."):
        return name.replace("lm_head", "output")
    path, _, end = name.removeprefix("model.").rpartition(".")
    block = ""
    if path.startswith("layers."):
        _, number, path = path.split(".", 2)
        block = f"blk.{number}."
    if path == "post_attention_layernorm":
        return f"{block}{'post_attention_norm' if family in SANDWICHED else 'ffn_norm'}.{end}"
    return f"{block}{HF_NAMES[path]}.{end}"


def read_safetensors(path: Path, family: str) -> Tensors:
    """A safetensors file by its format: length, JSON header, data."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    tensors = Tensors()
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[canonical(name, family)] = _decoded(entry["dtype"], data[begin:end], entry["shape"])
    return tensors


def _decoded(dtype: str, raw: bytes, shape: list[int]) -> Tensor:
    if dtype == "F32":
        return Tensor(F32, np.frombuffer(raw, "<f4").reshape(shape))
    assert dtype == "BF16"
    return Tensor(BF16, (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape))


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Key-values and dequantized tensors of a GGUF file."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = Tensors()
    for t in reader.tensors:
        values = np.asarray(dequantize(t.data, t.tensor_type), np.float32).reshape(t.shape[::-1].tolist())
        tensors[t.name] = Tensor(BY_GGML[int(t.tensor_type)], values)
    return metadata, tensors


class Session:
    """A graph in the interpreter, float64, with its KV caches: what a runner does, in ten lines."""

    def __init__(self, graph: Graph, config: ModelConfig, tensors: Tensors) -> None:
        self.graph, self.past = graph, 0
        names = graph.leaves("weight").keys() - graph.constants.keys()
        self.weights = {n: tensors.array(n) + config.offset(n) for n in names}
        leaves = graph.leaves("state").items()
        self.states = {n: np.zeros([value(d, {"CTX": CTX}) for d in s.shape], np.float32) for n, s in leaves}

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        """The logits [len(tokens), vocab] of the next tokens."""
        env = {"SEQ": len(tokens), "PAST_SEQ": self.past, "CTX": CTX}
        positions = np.arange(self.past, self.past + len(tokens), dtype=np.int32)
        feeds = {"tokens": tokens, "positions": positions, **self.weights, **self.states}
        outputs, self.states = interp.run(self.graph, feeds, env, dtype=np.float64)
        self.past += len(tokens)
        return outputs["logits"]
