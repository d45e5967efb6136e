"""Golden GGUF files, rewritten with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]


def rewrite(
    source: Path,
    target: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    change: Callable[[Tensors], object] | None = None,
) -> Path:
    """A copy of a GGUF file.

    Args:
        keys: values that replace those of the file, of the same type.
        drop: keys and tensors to leave out.
        change: may edit the tensors in place.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name in drop or name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = (keys or {}).get(name, field.contents())
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    if "general.architecture" in (keys or {}):
        writer.kv_data[0]["general.architecture"].value = (keys or {})["general.architecture"]
    tensors: Tensors = {t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors if t.name not in drop}
    if change:
        change(tensors)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def with_tensor_type(source: Path, target: Path, tensor: str, kind: int) -> Path:
    """A copy whose header says that `tensor` is of the type `kind`."""
    data = bytearray(source.read_bytes())
    name = tensor.encode()
    at = data.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)
    dims = int.from_bytes(data[at : at + 4], "little")
    at += 4 + 8 * dims
    data[at : at + 4] = kind.to_bytes(4, "little")
    target.write_bytes(data)
    return target
