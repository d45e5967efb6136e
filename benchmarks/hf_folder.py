"""Hugging Face checkpoints of `make_model.py`: a folder with BF16 weights, for programs that read no GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from model_vocab import CHATML, byte_alphabet, chains
from numpy.typing import NDArray

from rlx.export.convert import checkpoint_header
from rlx.models.shapes import Shape
from rlx.weights.names import file_names

Bytes = NDArray[np.uint8]

#: Model type -> class of transformers: those whose checkpoints are written.
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_folder(out: Path, s: Shape, draw: Callable[[str, tuple[int, ...]], Iterator[Bytes]]) -> int:
    """Writes the folder; returns the number of parameters.

    Args:
        out: the folder, which is made.
        s: a shape of one of `ARCHITECTURES`.
        draw: name of a tensor in GGUF files, shape -> its BF16 bytes in pieces.
    """
    if s.arch not in ARCHITECTURES:
        raise SystemExit(f"no checkpoint of {s.arch} can be written, only of {', '.join(ARCHITECTURES)}")
    out.mkdir(parents=True, exist_ok=True)
    shapes = {name: info.shape for name, info in checkpoint_header(s.config, out).tensors.items()}
    planned = {file_names(name, s.arch)[1]: (name, shape) for name, shape in shapes.items()}
    header, at = dict[str, Any](), 0
    for name, (_, shape) in planned.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    partial = out / "model.safetensors.partial"
    with open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in planned.values():
            for piece in draw(name, shape):
                file.write(piece.data)
    partial.replace(out / "model.safetensors")
    for name, content in {"config": config(s), "tokenizer": tokenizer(s), **small_files()}.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return sum(prod(shape) for _, shape in planned.values())


def config(s: Shape) -> dict[str, Any]:
    """`config.json`, by the configuration classes of transformers."""
    return {
        "architectures": [ARCHITECTURES[s.arch]],
        **s.config,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": len(byte_alphabet()) + len(chains("Ġ")) + len(_SPECIAL) - 1,
    }


def tokenizer(s: Shape) -> dict[str, Any]:
    """`tokenizer.json`: the byte-level BPE of `model_vocab.add_bpe`, in the form of the tokenizers library."""
    pairs = chains("Ġ")
    tokens = [*byte_alphabet(), *(a + b for a, b in pairs)]
    first = len(tokens)
    tokens += [*_SPECIAL, *(f"[PAD{i}]" for i in range(first + len(_SPECIAL), s.vocab))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": first + i, "content": token, **flags} for i, token in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in pairs],
        },
    }


def small_files() -> dict[str, dict[str, Any]]:
    """The other files that transformers reads."""
    return {
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL[2],
            "pad_token": _SPECIAL[0],
            "chat_template": CHATML,
        },
        "generation_config": {"do_sample": False},
    }
