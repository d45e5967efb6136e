"""Which family file has which architecture. A file is imported when a model of it is opened.

Part of the models stage. A new family is a file of this folder and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from rlx.models.architectures import Architecture

if TYPE_CHECKING:
    from rlx.models.encoder import EncoderConfig, EncoderFamily
    from rlx.models.keys import Keys
    from rlx.models.names import Table

T = TypeVar("T")

#: Family file -> (`general.architecture` of its GGUF files, `model_type` of its checkpoints).
FILES: dict[str, tuple[str, str]] = {
    "llama": (
        "llama mistral3 phi3 ernie4_5 ernie4_5-moe seed_oss arcee exaone smollm3",
        "llama mistral mixtral ministral3 mistral3 phi3 ernie4_5 ernie4_5_moe seed_oss arcee exaone smollm3",
    ),
    "qwen3": (
        "qwen2 qwen2moe qwen3 qwen3vl qwen3vlmoe qwen3moe dots1",
        "qwen2 qwen2_moe qwen3 qwen3_vl_text qwen3_vl qwen3_vl_moe_text qwen3_vl_moe qwen3_moe dots1",
    ),
    "qwen35": ("qwen35 qwen35moe qwen3next", "qwen3_5_text qwen3_5 qwen3_5_moe_text qwen3_5_moe qwen3_next"),
    "gemma": ("gemma gemma2 gemma3", "gemma gemma2 gemma3_text gemma3"),
    "gemma3n": ("gemma3n", "gemma3n_text gemma3n"),
    "gemma4": ("gemma4", "gemma4_text gemma4 gemma4_unified_text gemma4_unified"),
    "olmo2": ("olmo2 exaone4", "olmo2 olmo3 exaone4"),
    "olmoe": ("olmoe minimax-m2", "olmoe minimax_m2"),
    "hunyuan": ("hunyuan-dense hunyuan-moe", "hunyuan_v1_dense hunyuan_v1_moe"),
    "glm4": ("glm4 glm4moe", "glm4 glm4_moe"),
    "ling": ("bailingmoe2", "bailing_moe bailing_moe_v2"),
    "lfm2": ("lfm2 lfm2moe", "lfm2 lfm2_moe"),
    "gpt_oss": ("gpt-oss", "gpt_oss"),
    "deepseek": ("deepseek2 mistral4", "deepseek_v3 kimi_k2 glm4_moe_lite deepseek_v2 mistral4"),
    "cohere": ("command-r cohere2", "cohere cohere2"),
    "starcoder2": ("starcoder2 stablelm nemotron", "starcoder2 stablelm nemotron"),
    "granite": (
        "granite minicpm granitemoe granitehybrid",
        "granite minicpm granitemoe granitemoeshared granitemoehybrid",
    ),
    "nemotron_h": ("nemotron_h nemotron_h_moe", "nemotron_h"),
}

#: The same of encoders.
ENCODER_FILES: dict[str, tuple[str, str]] = {
    "bert": ("bert nomic-bert", "bert roberta xlm-roberta camembert nomic_bert"),
    "modernbert": ("modern-bert", "modernbert"),
}
#: The same of heads that draft for models; they have names of tensors only.
HEAD_FILES: dict[str, tuple[str, str]] = {"eagle3": ("eagle3", ""), "gemma4_assistant": ("gemma4_assistant", "")}
#: GGUF architectures of decoders whose attention was opened in both directions -> the decoder.
TWO_WAY = {"gemma-embedding": "gemma3"}


class _Lazy(Mapping[str, T]):
    """Name -> what `find` reads of the family file that has it."""

    def __init__(self, files: Mapping[str, tuple[str, str]], names: int, find: Callable[[str, str], T]) -> None:
        self._files = {name: file for file, row in files.items() for name in row[names].split()}
        self._find = find

    def __getitem__(self, name: str) -> T:
        return self._find(self._files[name], name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._files  # a file may have anything there

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _file(name: str) -> Any:
    return import_module(f"rlx.models.{name}")


@cache
def _rows(file: str) -> dict[str, Architecture]:
    found: dict[str, Architecture] = _file(file).ARCHITECTURES
    return found


def _of_model_type(file: str, name: str) -> tuple[str, Architecture]:
    for arch, row in _rows(file).items():
        if name in row.model_types:
            return arch, row
        if name in row.hf_variants:
            return arch, replace(row, model_types=(name,), **row.hf_variants[name])
    raise KeyError(name)


#: `general.architecture` of a GGUF file -> its row.
ARCHITECTURES: Mapping[str, Architecture] = _Lazy(FILES, 0, lambda file, name: _rows(file)[name])
#: `model_type` of a `config.json` -> the architecture's name and its row, with what differs for that type.
MODEL_TYPES: Mapping[str, tuple[str, Architecture]] = _Lazy(FILES, 1, _of_model_type)
#: `general.architecture` of an encoder -> its family.
ENCODERS: Mapping[str, EncoderFamily] = _Lazy(ENCODER_FILES, 0, lambda file, name: _file(file).FAMILIES[name])
#: Name of a kind of head -> the names of its tensors.
HEADS: Mapping[str, Table] = _Lazy(HEAD_FILES, 0, lambda file, name: _file(file).NAMES[name])
#: `model_type` of an encoder -> the reader of its `config.json`.
ENCODER_TYPES: Mapping[str, Callable[[Keys], EncoderConfig]] = _Lazy(
    ENCODER_FILES, 1, lambda file, name: _file(file).TYPES[name]
)
#: File format -> values of `general.architecture`, of `model_type`.
SUPPORTED = {"gguf": tuple(ARCHITECTURES), "safetensors": tuple(MODEL_TYPES)}

# Known architectures that this version does not support: GGUF names and `model_type`s -> what is missing. The error can
# then say "not supported yet" instead of "unknown".
_MOE = "it is a mixture of experts"
_VISION = "it takes images"
_DRAFTER = 'it only drafts, for a Gemma 4: give it as speculative="model:PATH"'
_OTHER = "its layers differ from those of the supported families"
KNOWN_UNIMPLEMENTED: dict[str, str] = {
    **dict.fromkeys(("glm5", "phimoe", "minimax", "deepseek_v4", "kimi", "llama4"), _MOE),
    **dict.fromkeys(("qwen2vl", "qwen2_vl", "qwen2_5_vl", "mllama"), _VISION),
    **dict.fromkeys(("phi2", "phi", "phi4", "olmo", "chatglm", "llada", "bonsai", "omnicoder"), _OTHER),
    **dict.fromkeys(("falcon-h1", "falcon_h1", "afmoe", "apertus", "exaone-moe", "exaone_moe", "bailingmoe"), _OTHER),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant", "gemma4-assistant"), _DRAFTER),
}
