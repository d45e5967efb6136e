"""Byte-level BPE from a GGUF vocabulary: the named pre-tokenizers and the `tokenizers` model they drive.

Text stage, used by `from_gguf.py`. A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`); the patterns are those
of the models' own `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.errors import TokenizerError
from rlx.text.fast import no_panic, plain_ids
from rlx.text.tokenizer import BYTE_ALPHABET, SPACE, Vocabulary

if TYPE_CHECKING:
    import tokenizers

Encode = Callable[[str], list[int]]

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _modern(digits: str, letter: str = r"\p{L}", mark: str = "") -> str:
    """The pattern of the models after GPT-4's tokenizer: `digits` a number, words of `letter`."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{letter}+"
    other = rf" ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*"
    return "|".join((_CONTRACTION, words, digits, other, _BREAKS))


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
    r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _BREAKS,
))  # fmt: skip
_O200K = "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _BREAKS,
))  # fmt: skip
_NOT_HAN = "&&[^\\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
_KIMI = "|".join((
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", _BREAKS,
))  # fmt: skip
_SEED = "|".join((
    _CONTRACTION, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _BREAKS,
))  # fmt: skip
_BAILING = "|".join((
    r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
))  # fmt: skip
_DEEPSEEK = "|".join((
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*", _BREAKS,
))  # fmt: skip
# Letters with a case as the first models of DeepSeek list them; those that Unicode has since count as others.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_END = r"\s+$"
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut before merging.

    Attributes:
        patterns: Oniguruma expressions, each applied to the stretches that the one before left.
        ignore_merges: a whole word that is a token is taken as it is.
        add_bos: whether BOS is added where the file does not say.
        nfc: the text is first brought to Unicode normal form C.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((_modern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_modern(r"\p{N}{1,3}"),)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_modern(r"\p{N}{1,3}"),), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((_modern(r"\p{N}"),), nfc=True), "qwen2"),
    (PreTokenizer((_modern(r"\p{N}"),)), "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (PreTokenizer((_modern(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),)), "qwen35"),  # marks stay apart, unlike in qwen2
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais "
        "trillion granite-docling exaone4",
    ),
    (PreTokenizer((r"\p{N}", _GPT2)), "starcoder refact command-r smollm codeshell exaone minerva-7b"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_O200K,)), "gpt-4o llama4 kanana2 minimax-m2"),
    (PreTokenizer((_KIMI,)), "kimi-k2"),
    (PreTokenizer((_SEED,)), "seed-coder"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (
        PreTokenizer(("[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", _END, _CJK, r"\p{N}")),
        "deepseek-llm",
    ),
    (PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")), "deepseek-coder"),
    (PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK)), "deepseek-v3 hunyuan-dense"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _FAMILIES for name in names.split()}
#: Published expressions that take quadratic time over spaces -> what takes linear time and finds the same.
LINEAR = {_END: rf"(?<!\s){_END}"}
#: Expressions that take linear time.
KNOWN_EXPRESSIONS = frozenset(pattern for pre, _ in _FAMILIES for pattern in pre.patterns) - LINEAR.keys()


def _package() -> Any:
    """The package `tokenizers`, which takes long to import."""
    import tokenizers

    return tokenizers


def byte_level_bpe(vocabulary: Vocabulary, hidden: Sequence[int], merges: Sequence[str], pre: PreTokenizer) -> Encode:
    """The encoder of byte-level BPE.

    Args:
        hidden: ids that merging must never produce (control tokens and the like).
        merges: `left right`, best first.

    Raises:
        TokenizerError: a merge makes a text that is no token.
    """
    package = _package()
    pre_tokenizers, index = package.pre_tokenizers, _index(vocabulary, hidden)
    backend = _backend(package.models.BPE, index, merges, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = package.normalizers.NFC()
    cuts = [pre_tokenizers.Split(package.Regex(LINEAR.get(pattern, pattern)), "isolated") for pattern in pre.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    return _refusing(_encoder(backend), index)


def gemma4_bpe(vocabulary: Vocabulary, hidden: Sequence[int], merges: Sequence[str], unknown: int | None) -> Encode:
    """The encoder of Gemma 4: ranked merges over UTF-8 characters, spaces as U+2581, bytes for what is no piece."""
    package = _package()
    index = _index(vocabulary, [token for token in hidden if token != unknown])
    unk_token = None if unknown is None else vocabulary.tokens[unknown]
    backend = _backend(package.models.BPE, index, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    backend.normalizer = package.normalizers.Replace(" ", SPACE)
    return _encoder(backend)


def _backend(
    model: Callable[..., tokenizers.models.Model], index: dict[str, int], merges: Sequence[str], **options: object
) -> tokenizers.Tokenizer:
    try:
        with no_panic():
            found: tokenizers.Tokenizer = _package().Tokenizer(model(vocab=index, merges=_pairs(merges), **options))
            return found
    except Exception as error:  # the package raises bare exceptions
        raise TokenizerError(f"the merges do not fit the tokens ({error})", where="tokenizer.ggml.merges") from error


def _encoder(backend: tokenizers.Tokenizer) -> Encode:
    def encode(text: str) -> list[int]:
        try:
            return plain_ids(backend, text)
        except Exception as error:  # the package raises bare exceptions
            raise TokenizerError(f"the text cannot be encoded ({error})", where="tokenizer.ggml.merges") from error

    return encode


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Cut each merge at its first space that is not its first character."""
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        wrong = next(merge for merge in merges if merge.find(" ", 1) <= 0)
        raise TokenizerError(f"{wrong!r} is not two pieces with a space between", where="tokenizer.ggml.merges")
    return pairs


def _index(vocabulary: Vocabulary, hidden: Sequence[int]) -> dict[str, int]:
    """Text -> id for the BPE model, with the hidden tokens under names that no text can spell."""
    index = dict(vocabulary.ids)
    for token in (*hidden, *_not_unicode(vocabulary)):
        index.pop(vocabulary.tokens[token], None)
        index[f"\0{token}"] = token
    return index


def _not_unicode(vocabulary: Vocabulary) -> list[int]:
    """Tokens whose text was not UTF-8 in the file; the BPE package takes Unicode only."""
    try:
        "".join(vocabulary.tokens).encode()
        return []
    except UnicodeEncodeError:
        return [i for i, text in enumerate(vocabulary.tokens) if any("\ud800" <= char <= "\udfff" for char in text)]


def _refusing(encode: Encode, index: dict[str, int]) -> Encode:
    """`encode` for texts whose bytes all have tokens; the BPE model would drop the others silently.

    Published vocabularies lack bytes that occur in no assigned character, so this is no error of the file.
    """
    missing = bytes(byte for byte in range(256) if BYTE_ALPHABET[byte] not in index)

    def checked(text: str) -> list[int]:
        lost = set(text.encode()).intersection(missing)
        if lost:
            raise TokenizerError(f"the vocabulary has no token for byte 0x{min(lost):02X} of the text", where="text")
        return encode(text)

    return checked if missing else encode
