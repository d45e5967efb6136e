"""How a checkpoint wants its images: the files of its image processor, beside the weights.

Part of the weights stage; `rlx.models.vision_hf_config` reads what is found here.
"""

from __future__ import annotations

from pathlib import Path

from rlx.errors import ConfigError
from rlx.json_file import JsonObject, read_object

_OWN, _JOINT = "preprocessor_config.json", "processor_config.json"


def image_processor(folder: Path) -> JsonObject:
    """The configuration of a checkpoint's image processor: `preprocessor_config.json` or, as transformers 5 saves it,
    the key `image_processor` of `processor_config.json`, which counts more; {} without both.

    Raises:
        ConfigError: a file is malformed.
    """
    found = read_object(folder / _OWN, ConfigError) if (folder / _OWN).exists() else {}
    joint = read_object(folder / _JOINT, ConfigError).get("image_processor") if (folder / _JOINT).exists() else None
    return {**found, **joint} if isinstance(joint, dict) else found
