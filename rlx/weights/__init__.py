"""Weights: maps model files, checks them, and gives tensors canonical names. Knows no models.

`mapped.py` holds the bytes, `gguf.py` and `safetensors.py` read the formats, `checks.py` checks the hyper-parameters,
`locate.py` finds the file of a path or name, `loader.py` opens it, `prediction.py` appends the MTP block to the layers,
`names.py` gives every tensor its canonical name, `composed.py` and `fp8.py` make one tensor of several, and `model.py`
offers the result as `ModelWeights`.
"""

from rlx.weights.loader import TensorInfo, WeightLoader, open_weights
from rlx.weights.locate import resolve_model_path
from rlx.weights.model import ModelWeights

__all__ = ["ModelWeights", "TensorInfo", "WeightLoader", "open_weights", "resolve_model_path"]
