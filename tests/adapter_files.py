"""LoRA adapters for tests: files of random pairs, and checkpoints whose matrices were changed by them in NumPy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file

from rlx.ir.stored import dequantize
from rlx.weights import open_weights

Array = np.ndarray[Any, Any]
Pairs = dict[str, tuple[Array, Array]]
"""Name of a matrix in a checkpoint, without `.weight` -> A [rank, k] and B [n, rank]."""


def random_pairs(checkpoint: Path, targets: Sequence[str], rank: int = 4, seed: int = 0) -> Pairs:
    """A pair for each matrix of a checkpoint whose module has one of these names."""
    rng, found = np.random.default_rng(seed), {}
    with open_weights(checkpoint) as loader:
        for name, info in loader.tensors.items():
            module = name.removesuffix(".weight")
            if len(info.shape) == 2 and module.split(".")[-1] in targets:
                (n, k), spread = info.shape, 0.05
                a, b = rng.standard_normal((rank, k)) * spread, rng.standard_normal((n, rank)) * spread
                found[module] = a.astype(np.float32), b.astype(np.float32)
    return found


def write_peft(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """A folder as PEFT saves it; `config` has further settings."""
    folder.mkdir(parents=True, exist_ok=True)
    halves = {
        f"base_model.model.{module}.lora_{'AB'[i]}.weight": half
        for module, pair in pairs.items()
        for i, half in enumerate(pair)
    }
    save_file(halves, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_gguf(path: Path, arch: str, pairs: Pairs, alpha: float = 8.0, kind: str = "adapter") -> Path:
    """A GGUF adapter; the names of its pairs are those of GGUF, without `.weight`."""
    writer = GGUFWriter(path, arch)
    writer.add_string("general.type", kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.weight.lora_a", a)
        writer.add_tensor(f"{name}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(folder: Path, checkpoint: Path, pairs: Pairs, scale: float) -> Path:
    """The checkpoint with W + scale B A in place of each W, computed in float64 and stored as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_weights(checkpoint) as loader:
        found = {}
        for name, info in loader.tensors.items():
            values = dequantize(loader.raw(name), info.dtype, info.shape).reshape(info.shape)
            if (pair := pairs.get(name.removesuffix(".weight"))) is not None:
                a, b = (half.astype(np.float64) for half in pair)
                values = (values + scale * b @ a).astype(np.float32)
            found[name] = np.ascontiguousarray(values)
    save_file(found, folder / "model.safetensors")
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".model", ".jinja"):
            shutil.copy(file, folder / file.name)
    return folder
