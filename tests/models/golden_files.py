"""The golden checkpoints, read without rlx's own readers: by NumPy and the `gguf` package. Only the safetensors of the
families that have many names, and models with Mamba-2, are read by the weights stage, as GGUF files of such families
check what they compute.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.ir import interp
from rlx.ir.dims import value
from rlx.ir.dtypes import BF16, BY_GGML, F32, DType
from rlx.ir.graph import Graph
from rlx.ir.stored import dequantize
from rlx.models import ModelConfig, Weights, build, config_from, from_gguf, from_hf, views
from rlx.weights import ModelWeights, WeightLoader, open_weights

FILES = {  # folder -> its models
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "qwen35"), ("hf", "model-f16.gguf")),
    **dict.fromkeys(("granite-hybrid", "nemotron-h"), ("hf", "model-f16.gguf")),
    **dict.fromkeys(("qwen3moe", "gemma3n", "gemma4-moe"), ("hf",)),
    **dict.fromkeys(("smollm3", "granite", "granitemoe-shared", "olmo3", "exaone4-swa", "glm4"), ("hf",)),
    **dict.fromkeys(("glm4-moe", "ernie4.5", "ministral3", "phi3", "lfm2"), ("hf",)),
    **dict.fromkeys(("gpt-oss", "deepseek-v3", "deepseek-v2", "qwen3next"), ("hf",)),
    **dict.fromkeys(("qwen2moe", "olmoe", "minimax-m2", "dots1", "ernie4.5-moe"), ("hf",)),
    **dict.fromkeys(
        ("seed-oss", "arcee", "hunyuan", "hunyuan-moe", "starcoder2", "stablelm", "nemotron", "exaone3.5"), ("hf",)
    ),
    **dict.fromkeys(("command-r", "cohere2", "ling2", "mistral4"), ("hf",)),
    **dict.fromkeys(("qwen35moe", "gemma4-e2b"), ("model-f16.gguf",)),
}
QUANTIZED = {"llama-k256": ("Q4_K_M",), "qwen35-k256": ("Q4_K_M",), "gemma4-k256": ("Q4_K_M",)}
CASES = [(family, file) for family, files in FILES.items() for file in files]
ROOM = {"CTX": 80, "WINDOW_CTX": 64}


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


MAMBA = ("granitehybrid", "nemotron_h")

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


def read(path: Path) -> tuple[ModelConfig, Tensors]:
    """The configuration and the tensors of a checkpoint, as a builder wants them."""
    if path.suffix == ".gguf":
        metadata, tensors = read_gguf(path)
        config = from_gguf(metadata, tensors.has)
        return config, by_the_weights_stage(path) if config.arch in MAMBA else apart(metadata, tensors)
    config = from_hf(json.loads((path / "config.json").read_text()))
    if config.arch in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"):
        return config, read_safetensors(path / "model.safetensors", config.arch)
    return config, by_the_weights_stage(path, config)


def by_the_weights_stage(path: Path, config: ModelConfig | None = None) -> Tensors:
    """The tensors and their parts; not those that were cut into parts."""
    with open_weights(path) as loader:
        config = config or configured(loader)
        weights = ModelWeights(loader, config.arch)
        assert not weights.unused
        cut = list(views(config, weights.has))
        for view in cut:
            weights.define(*view)
        names = set(weights.names) - {view.source for view in cut}
        infos = {name: weights.info(name) for name in names}
        return Tensors({n: Tensor(i.dtype, dequantize(weights.raw(n), i.dtype, i.shape)) for n, i in infos.items()})


def configured(loader: WeightLoader) -> ModelConfig:
    return config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)


def logits_of(path: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits [len(tokens), vocab] of a model whose files rlx reads from end to end."""
    with open_weights(path) as loader:
        config = configured(loader)
        weights = ModelWeights(loader, config.arch)
        for view in views(config, weights.has):
            weights.define(*view)
        return Session(build(config, weights, F32, place=weights.place), config, weights).feed(tokens)


Edited = dict[str, np.ndarray]


def rewrite(source: Path, target: Path, change: Callable[[Edited], object], **keys: Any) -> Path:
    """A copy of a float GGUF file after `change` edited its tensors; `keys` replace values, `__` stands for a dot."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    values = {name.replace("__", "."): value for name, value in keys.items()}
    metadata = {n: (values.get(n, f.contents()), list(f.types)) for n, f in reader.fields.items()}
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    change(tensors)
    return write_gguf(target, {n: v for n, v in metadata.items() if not n.startswith("GGUF.")}, tensors)


def write_gguf(target: Path, metadata: Mapping[str, tuple[Any, list[Any]]], tensors: Edited) -> Path:
    """A GGUF file with (value, its type and that of its elements) by key."""
    from gguf import GGUFWriter

    writer = GGUFWriter(target, metadata["general.architecture"][0])
    for name, (content, types) in metadata.items():
        if name != "general.architecture":
            writer.add_key_value(name, content, types[0], types[-1] if len(types) > 1 else None)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


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


def apart(metadata: dict[str, Any], tensors: Tensors) -> Tensors:
    """What GGUF files of Qwen 3.5 keep in one tensor, in several: of the recurrent layers q, k and v, of the others the
    query and the gate of each head.
    """
    arch = metadata["general.architecture"]
    if not arch.startswith("qwen35"):
        return tensors
    keys = metadata[f"{arch}.ssm.state_size"] * metadata[f"{arch}.ssm.group_count"]
    size = metadata[f"{arch}.attention.key_length"]
    found = Tensors()
    for name, (dtype, values) in ((name, (t.dtype, t.values)) for name, t in tensors.items()):
        rest = name.split(".", 2)[-1]
        parts = {rest: values}
        if rest in ("attn_qkv.weight", "ssm_conv1d.weight"):
            stem = "ssm_conv" if "conv" in rest else "ssm"
            rows = np.split(values, [keys, 2 * keys])
            parts = {f"{stem}_{part}.weight": piece for part, piece in zip("qkv", rows, strict=True)}
        elif rest == "attn_q.weight":
            heads = values.reshape(-1, 2, size, values.shape[1])
            halves = (heads[:, i].reshape(-1, values.shape[1]) for i in range(2))
            parts = dict(zip(("attn_query.weight", "attn_query_gate.weight"), halves, strict=True))
        found |= {name.replace(rest, part): Tensor(dtype, piece) for part, piece in parts.items()}
    return found


class Session:
    """A graph in the interpreter, float64, with its KV caches: what a runner does, in ten lines."""

    def __init__(self, graph: Graph, config: ModelConfig, tensors: Weights) -> None:
        self.graph, self.past = graph, 0
        names = graph.leaves("weight").keys() - graph.constants.keys()
        self.weights = {n: config.value(n, tensors.array(n)) for n in names}
        leaves = graph.leaves("state").items()
        self.states = {n: np.zeros([value(d, ROOM) for d in s.shape], np.float32) for n, s in leaves}

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        """The logits [len(tokens), vocab] of the next tokens."""
        env = {"SEQ": len(tokens), "PAST_SEQ": self.past, **ROOM}
        positions = np.arange(self.past, self.past + len(tokens), dtype=np.int32)
        feeds = {"tokens": tokens, "positions": positions, **self.weights, **self.states}
        outputs, self.states = interp.run(self.graph, feeds, env, dtype=np.float64)
        self.past += len(tokens)
        return outputs["logits"]
