"""The name that GGUF has for a byte-level pre-tokenizer of a `tokenizer.json`.

Export stage, under `hf_tokenizer.py`. The patterns behind the names are those of `rlx.text.pretokenizers`: a name is
found only if the tokenizer that it stands for cuts a text as the file's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.errors import TokenizerError
from rlx.text.pretokenizers import PRE_TOKENIZERS

_NFC_LOST = ("qwen35",)  # its checkpoints bring texts to normal form C, readers of its GGUF files do not


def pre_tokenizer_name(fast: Mapping[str, Any], where: Path) -> str:
    """`tokenizer.ggml.pre` for a parsed tokenizer.json; `TokenizerError` if no name stands for what it does."""
    patterns = tuple(_patterns(fast.get("pre_tokenizer") or {}, where))
    nfc, ignore = _nfc(fast.get("normalizer") or {}, where), bool(fast["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        alike = (known.patterns, known.ignore_merges) == (patterns, ignore)
        if alike and (known.nfc == nfc or name in _NFC_LOST):
            return name
    what = f"no pre-tokenizer of GGUF cuts by {list(patterns)}, with NFC {nfc} and ignore_merges {ignore}"
    raise TokenizerError(what, where=where, hint=f"known are {', '.join(PRE_TOKENIZERS)}")


def _patterns(step: Mapping[str, Any], where: Path) -> Iterator[str]:
    """The expressions that a text is cut by, one after the other."""
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
    """Whether texts are brought to normal form C; nothing else may happen to them."""
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if any(step.get("type") != "NFC" for step in steps):
        raise TokenizerError(f"a normalizer {dict(normalizer)} has no form in GGUF", where=where)
    return bool(steps)
