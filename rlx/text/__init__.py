"""Text stage: tokenizers, streaming detokenization and chat templates.

`from_gguf.py` and `from_hf.py` read the pieces, `pretokenizers.py` and `spm.py` encode, `tokenizer.py` is what they
become, and streams text; `chat.py` and `dialect.py` render conversations; `confined.py` runs what is not trusted in a
process with limits. Importing this package imports neither `tokenizers` nor `jinja2`.
"""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.text import from_hf, image_parts, spm
    from rlx.text.chat import ChatTemplate, chat_ids, template_of
    from rlx.text.from_gguf import tokenizer_from_gguf
    from rlx.text.from_hf import templates_from_hf, tokenizer_from_hf
    from rlx.text.load import load_tokenizer
    from rlx.text.tokenizer import StreamDetokenizer, Tokenizer

__all__ = [
    "ChatTemplate",
    "StreamDetokenizer",
    "Tokenizer",
    "chat_ids",
    "from_hf",
    "image_parts",
    "load_tokenizer",
    "spm",
    "template_of",
    "templates_from_hf",
    "tokenizer_from_gguf",
    "tokenizer_from_hf",
]

#: Public names -> the module that has them.
_HOMES = {
    **dict.fromkeys(("ChatTemplate", "chat_ids", "template_of"), "rlx.text.chat"),
    "tokenizer_from_gguf": "rlx.text.from_gguf",
    **dict.fromkeys(("templates_from_hf", "tokenizer_from_hf"), "rlx.text.from_hf"),
    "load_tokenizer": "rlx.text.load",
    **{name: f"rlx.text.{name}" for name in ("from_hf", "image_parts", "spm")},
    **dict.fromkeys(("StreamDetokenizer", "Tokenizer"), "rlx.text.tokenizer"),
}

__getattr__ = names_of("rlx.text", _HOMES)
