"""Finds GGUF's name for the byte-level pre-tokenizer of a `tokenizer.json`.

Export stage, under `hf_tokenizer.py`. `rlx.text.pretokenizers` has the patterns of each name. A name matches only if
its tokenizer splits text exactly as the file's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.errors import TokenizerError
from rlx.text.pretokenizers import PRE_TOKENIZERS

_NFC_LOST = ("qwen35",)  # its checkpoints normalize text to form C, readers of its GGUF files do not


def pre_tokenizer_name(fast: Mapping[str, Any], where: Path) -> str:
    """`tokenizer.ggml.pre` for a parsed tokenizer.json; `TokenizerError` if no name matches."""
    patterns = tuple(_patterns(fast.get("pre_tokenizer") or {}, where))
    nfc, ignore = _nfc(fast.get("normalizer") or {}, where), bool(fast["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        alike = (known.patterns, known.ignore_merges) == (patterns, ignore)
        if alike and (known.nfc == nfc or name in _NFC_LOST):
            return name
    what = f"no pre-tokenizer of GGUF cuts by {list(patterns)}, with NFC {nfc} and ignore_merges {ignore}"
    raise TokenizerError(what, where=where, hint=f"known are {', '.join(PRE_TOKENIZERS)}")


def _patterns(step: Mapping[str, Any], where: Path) -> Iterator[str]:
    """The regular expressions that split a text, in order."""
    kind = step.get("type")
    if kind == "Sequence":
        for part in step.get("pretokenizers", []):
            yield from _patterns(part, where)
    elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step.get("pattern") or {}
        yield pattern["Regex"] if "Regex" in pattern else re.escape(str(pattern.get("String")))
    elif kind == "Digits":
        yield r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    elif kind == "ByteLevel" and not step.get("add_prefix_space"):
        if step.get("use_regex", True):
            yield from PRE_TOKENIZERS["gpt-2"].patterns
    else:
        raise TokenizerError(f"a pre-tokenizer {dict(step)} has no form in GGUF", where=where)


def _nfc(normalizer: Mapping[str, Any], where: Path) -> bool:
    """Whether text is normalized to form C; any other normalizer is an error."""
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if any(step.get("type") != "NFC" for step in steps):
        raise TokenizerError(f"a normalizer {dict(normalizer)} has no form in GGUF", where=where)
    return bool(steps)
