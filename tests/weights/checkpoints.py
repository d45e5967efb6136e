"""Small checkpoints and GGUF files, written by the `safetensors` and `gguf` packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

Array = np.ndarray[Any, Any]


def checkpoint(
    directory: Path, tensors: Mapping[str, tuple[str, Array]], config: Mapping[str, Any] | None = None
) -> Path:
    """`model.safetensors` with (dtype, bytes) by name, and a `config.json`."""
    specs = {
        name: safetensors.TensorSpec(dtype=dtype, shape=each.shape, data_ptr=each.ctypes.data, data_len=each.nbytes)
        for name, (dtype, each) in tensors.items()
    }
    safetensors.serialize_file(specs, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config or {}))
    return directory


def gguf_file(path: Path, tensors: Mapping[str, Array], arch: str = "llama", **options: Any) -> Path:
    """A GGUF file of float tensors; `options` are the writer's (`split_max_tensors`)."""
    writer = gguf.GGUFWriter(path, arch, **options)
    writer.add_block_count(1)
    for name, each in tensors.items():
        writer.add_tensor(name, each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bf16(values: Array) -> Array:
    """float32 -> the upper halves; exact for numbers on the bf16 grid."""
    return np.asarray(values.view(np.uint32) >> 16, np.uint16)
