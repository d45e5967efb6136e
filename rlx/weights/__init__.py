"""Weights: model files mapped, checked and named. Between the file and the packers; imports only `ir` and `errors`.

`mapped.py` holds the bytes, `gguf.py` and `safetensors.py` read the formats, `checks.py` bounds the hyper-parameters,
`locate.py` finds the file that a name means, `loader.py` opens it, `prediction.py` puts a block that predicts further
tokens behind the layers, `names.py` gives every tensor its canonical name, `composed.py` and `fp8.py` make one tensor
of several, `model.py` puts it all together.
"""

from rlx.weights.loader import TensorInfo, WeightLoader, open_weights
from rlx.weights.locate import resolve_model_path
from rlx.weights.model import ModelWeights

__all__ = ["ModelWeights", "TensorInfo", "WeightLoader", "open_weights", "resolve_model_path"]
