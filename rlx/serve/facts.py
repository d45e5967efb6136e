"""What is known of a model's file: its format, and how many parameters it has. Server stage, for lists of models."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.weights import WeightLoader

_FILE_TYPE = "general.file_type"


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's file.

    Attributes:
        path: of the file.
        format: `gguf` or `safetensors`.
        parameters: number of elements of all tensors.
        nbytes: of all tensors.
        quantization: the type of its weights, such as `Q4_K_M`.
    """

    path: Path
    format: str
    parameters: int
    nbytes: int
    quantization: str

    @staticmethod
    def of(loader: WeightLoader) -> ModelFacts:
        """The facts of an open file."""
        infos = list(loader.tensors.values())
        sizes = (sum(prod(info.shape) for info in infos), sum(info.nbytes for info in infos))
        return ModelFacts(Path(loader.path), loader.format, *sizes, _quantization(loader))


def _quantization(loader: WeightLoader) -> str:
    """The type that a GGUF file says it has, else that of most bytes."""
    number = loader.metadata.get(_FILE_TYPE) if loader.format == "gguf" else None
    if isinstance(number, int):
        from gguf import LlamaFileType

        if number in {each.value for each in LlamaFileType}:
            return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    sizes: Counter[str] = Counter()
    for info in loader.tensors.values():
        sizes[info.dtype.name] += info.nbytes
    return sizes.most_common(1)[0][0].upper() if sizes else "unknown"
