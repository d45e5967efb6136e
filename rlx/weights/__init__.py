"""Weights: maps model files, checks them, and gives tensors canonical names. Knows no models.

`mapped.py` holds the bytes, `gguf.py` and `safetensors.py` read the formats, `gguf_values.py` checks the
hyper-parameters, `locate.py` finds the file of a path or name, `loader.py` opens it, `names.py` gives every tensor its
canonical name, `composed.py` makes one tensor of several or of a part, `scaled_codes.py` joins codes and scales, and
`model.py` offers the result as `ModelWeights`.
"""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of
from rlx.weights.loader import TensorInfo, WeightLoader, open_weights
from rlx.weights.locate import resolve_model_path
from rlx.weights.model import ModelWeights

if TYPE_CHECKING:
    from rlx.weights import hub, packed, quantization, recommended, safetensors, scaled_codes, sentence_modules

__all__ = [
    "ModelWeights",
    "TensorInfo",
    "WeightLoader",
    "hub",
    "open_weights",
    "packed",
    "quantization",
    "recommended",
    "resolve_model_path",
    "safetensors",
    "scaled_codes",
    "sentence_modules",
]

# What a GGUF file does not need, imported when it is first used.
__getattr__ = modules_of(__name__, (name for name in __all__ if name.islower() and name not in globals()))
