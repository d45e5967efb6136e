"""Vocabularies and texts that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rlx.text.tokenizer import BYTE_ALPHABET

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SNIPPETS = [
    "Hello", " world", " the", "ing", "don't", "'S", "'\u017f", " 1234", "3.14", "  ", "     ", "\n", "\n\n", "\r\n",
    "\t", "\u00a0", "\u2028", "\u2581", "e\u0301", "é", "\u1e9b\u0323", "Å", "中文", "は", "🦙", "\U000e0041", "\x00",
    "<0x41>", "a", "aa", "aaa", "b", "<", "|", ">", "<unk>", "<bos>", "<eos>", "<pad>", "<start_of_turn>",
    "<end_of_turn>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<|end",
]  # fmt: skip
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(_SNIPPETS), max_size=15).map("".join))


def byte_level(words: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, then `words` made by merging from the left, then two controls.

    `keys` replaces keys of `tokenizer.ggml.`; None removes one.
    """
    tokens, merges = list(BYTE_ALPHABET), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    tokens += ["<|endoftext|>", "<|im_end|>"]
    types = np.full(len(tokens), NORMAL, np.int32)
    types[-2:] = CONTROL
    base = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types, "merges": merges}
    return named(base | {"eos_token_id": len(tokens) - 1} | keys)


def sentencepiece(pieces: dict[str, float] | None = None, user: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: unknown, BOS, EOS, 256 bytes, `pieces` with scores, `user` tokens."""
    pieces = {"a": -9.0, "b": -9.5, "\u2581": -10.0, "ab": -1.0, "\u2581a": -2.0} if pieces is None else pieces
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *user]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *[USER] * len(user)]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0] * len(user)
    base = {"model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32)}
    return named(base | {"scores": np.array(scores, np.float32)} | keys)


def named(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file without tensors, written by the `gguf` package."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
