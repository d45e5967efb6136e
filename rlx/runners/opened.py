"""An open file as a model: its configuration, and its weights with everything that its builder asks for.

Runners stage, under the engine and the commands that look at a model without running it.
"""

from __future__ import annotations

from rlx import models
from rlx.weights import ModelWeights, WeightLoader


def open_model(loader: WeightLoader) -> tuple[models.ModelConfig, ModelWeights]:
    """What the file says about the model, and its tensors under the names that `models.build` uses.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: the file cannot be used, and why.
    """
    config = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
    weights = ModelWeights(loader, config.arch)
    for view in models.views(config, weights.has):
        weights.define(*view)
    return config, weights
