"""Small tokenizers that work, for the model files of `make_model.py`: every text can be encoded, the rest is filler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf import GGUFWriter, TokenType

if TYPE_CHECKING:
    from rlx.models.shapes import Shape

WORDS = "the and was that with have this from they one there what about which when time story fox said".split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def add_tokenizer(writer: GGUFWriter, s: Shape) -> None:
    """The kind that the architecture uses."""
    if s.arch == "gemma3":
        add_spm(writer, s)
    elif s.arch == "gemma4":
        add_gemma4(writer, s)
    else:
        add_bpe(writer, s)


def chains(space: str) -> list[tuple[str, str]]:
    """Merges that build each of WORDS, with the space before it, from the left: ('_', 't'), ('_t', 'h'), ..."""
    pairs = [(space + word[:i], word[i]) for word in WORDS for i in range(len(word))]
    return list(dict.fromkeys(pairs))


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE: printable Latin-1 as itself, the rest from U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = (chr(256 + i) for i, _ in enumerate(b for b in range(256) if b not in plain))
    return [chr(b) for b in plain] + list(moved)


def pad(tokens: list[str], types: list[TokenType], size: int) -> None:
    """Fill the vocabulary up with unused tokens, in place."""
    if size < len(tokens):
        raise SystemExit(f"a vocabulary needs at least {len(tokens)} tokens, not {size}")
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    types += [TokenType.UNUSED] * (size - len(types))


def add_bpe(writer: GGUFWriter, s: Shape) -> None:
    llama = s.arch == "llama"
    pairs = chains("Ġ")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if llama:
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokens = byte_alphabet() + [a + b for a, b in pairs]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(special)
    tokens += special
    pad(tokens, types, s.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "llama-bpe", "qwen35": "qwen35"}.get(s.arch, "qwen2"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(tokens.index(special[0]))
    writer.add_eos_token_id(tokens.index(special[-1]))
    writer.add_pad_token_id(tokens.index(special[1] if llama else special[0]))
    writer.add_add_bos_token(llama)
    writer.add_chat_template(LLAMA_CHAT if llama else CHATML)


def gemma_tokens(s: Shape, special: list[str]) -> tuple[list[str], list[TokenType], list[float]]:
    """Tokens, their types and scores: specials, bytes, then pieces, of which the earlier ones are joined first."""
    pieces = [a + b for a, b in chains("▁")] + ["▁", "\n", *(chr(c) for c in range(33, 127))]
    tokens = special + [f"<0x{b:02X}>" for b in range(256)] + pieces
    types = [TokenType.CONTROL] * len(special) + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
    scores = [-1000.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    pad(tokens, types, s.vocab)
    return tokens, types, scores + [-1000.0] * (s.vocab - len(scores))


def add_gemma4(writer: GGUFWriter, s: Shape) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    add_gemma(writer, "gemma4", *gemma_tokens(s, special))
    writer.add_token_merges([f"{a} {b}" for a, b in chains("▁")])
    writer.add_chat_template(GEMMA_CHAT.replace("<start_of_turn>", "<|turn>").replace("<end_of_turn>", "<turn|>"))


def add_spm(writer: GGUFWriter, s: Shape) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    add_gemma(writer, "llama", *gemma_tokens(s, special))
    writer.add_tokenizer_pre("default")
    writer.add_chat_template(GEMMA_CHAT)


def add_gemma(writer: GGUFWriter, model: str, tokens: list[str], types: list[TokenType], scores: list[float]) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(6)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
