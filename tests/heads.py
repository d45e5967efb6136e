"""The golden checkpoint of Qwen 3.5 with a head that predicts further tokens, which it has not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HIDDEN, HEADS, KV_HEADS, SIZE, FFN, TURNED, BASE, EPS = 64, 4, 2, 64, 96, 16, 1e7, 1e-6
LAYER = "mtp.layers.0."
SHAPES = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    f"{LAYER}self_attn.q_proj.weight": (2 * HEADS * SIZE, HIDDEN),
    f"{LAYER}self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    f"{LAYER}self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
    f"{LAYER}mlp.gate_proj.weight": (FFN, HIDDEN),
    f"{LAYER}mlp.up_proj.weight": (FFN, HIDDEN),
    f"{LAYER}mlp.down_proj.weight": (HIDDEN, FFN),
    **dict.fromkeys((f"{LAYER}self_attn.q_norm.weight", f"{LAYER}self_attn.k_norm.weight"), (SIZE,)),
    **dict.fromkeys(("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"), (HIDDEN,)),
    **dict.fromkeys(("mtp.pre_fc_norm_hidden.weight", f"{LAYER}input_layernorm.weight"), (HIDDEN,)),
    f"{LAYER}post_attention_layernorm.weight": (HIDDEN,),
}


def random_head() -> dict[str, Array]:
    rng = np.random.default_rng(4)
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in SHAPES.items()}


def echo(head: Mapping[str, Array]) -> dict[str, Array]:
    """A head that says little else than what a model without layers would after the last token."""
    joined = np.concatenate([np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))], 1).astype(np.float32)
    shares = {"norm.weight": 0.0, "o_proj.weight": 0.05, "down_proj.weight": 0.05}
    made = {n: w * next((by for end, by in shares.items() if n.endswith(end)), 1.0) for n, w in head.items()}
    return {**made, "mtp.fc.weight": joined}


def with_head(goldens: Path, folder: Path, head: Mapping[str, Array], share: float | None = None) -> Path:
    """The checkpoint in a folder of its own; with a share, what each block adds is scaled by it."""
    shutil.copytree(goldens / "qwen35" / "hf", folder)
    file = folder / "model.safetensors"
    stored = file.read_bytes()
    size = int.from_bytes(stored[:8], "little")
    header, data = json.loads(stored[8 : 8 + size]), bytearray(stored[8 + size :])
    for name in [n for n in header if share and n.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))]:
        begin, end = header[name]["data_offsets"]
        data[begin:end] = _scaled(bytes(data[begin:end]), share or 1.0)
    for name, value in head.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += np.ascontiguousarray(value, np.float32).tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def _scaled(numbers: bytes, by: float) -> bytes:
    """Numbers in bf16 times a factor, cut to bf16."""
    wide = (np.frombuffer(numbers, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bytes(((wide * np.float32(by)).view(np.uint32) >> 16).astype(np.uint16).tobytes())
