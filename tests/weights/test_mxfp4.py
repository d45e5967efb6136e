"""MXFP4 checkpoints: codes and scales joined, against the table of the format and the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from gguf import GGMLQuantizationType, quants

from rlx.errors import WeightError
from rlx.ir.dtypes import MXFP4
from rlx.weights import ModelWeights, open_weights

CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}
STEM, NAME = "model.layers.0.mlp.experts.down_proj", "blk.0.ffn_down_exps.weight"
FP4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
Array = np.ndarray[Any, Any]


def parts(experts: int = 3, n: int = 5, k: int = 64) -> dict[str, tuple[str, Array]]:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
    return {
        f"{STEM}_blocks": ("uint8", codes),
        f"{STEM}_scales": ("uint8", rng.integers(120, 134, (experts, n, k // 32), np.uint8)),
    }


def test_blocks_of_the_format(tmp_path: Path) -> None:
    tensors = parts()
    with ModelWeights(open_weights(checkpoint(tmp_path, tensors, CONFIG)), "gpt-oss") as weights:
        info, pieces = weights.info(NAME), list(weights.pieces(NAME))
        assert (info.dtype, info.shape, len(pieces)) == (MXFP4, (3, 5, 64), 3) and not weights.unused
        found = quants.dequantize(np.stack(pieces).reshape(3, 5, -1), GGMLQuantizationType.MXFP4)
    codes, scales = tensors[f"{STEM}_blocks"][1], tensors[f"{STEM}_scales"][1]
    values = np.stack([FP4[codes & 15], FP4[codes >> 4]], -1).reshape(3, 5, 2, 32)
    expected = values * np.exp2(scales[..., None].astype(np.float32) - 127)
    np.testing.assert_array_equal(found, expected.reshape(3, 5, 64))


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("scales", None, r"'.*down_proj_scales', the scales of '.*', is missing, expected u8\[3, 5, 2\]"),
        ("scales", (3, 5, 1), r"'.*down_proj_scales', .*, is u8\[3, 5, 1\], expected u8\[3, 5, 2\]"),
        (
            "blocks",
            (3, 5, 32),
            r"MXFP4 tensor '.*down_proj_blocks' is u8\[3, 5, 32\], expected u8 \[experts, n, k / 32",
        ),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, part: str, shape: tuple[int, ...] | None, message: str) -> None:
    tensors = parts()
    del tensors[f"{STEM}_{part}"]
    if shape is not None:
        tensors[f"{STEM}_{part}"] = "uint8", np.zeros(shape, np.uint8)
    with open_weights(checkpoint(tmp_path, tensors, CONFIG)) as loader, pytest.raises(WeightError, match=message):
        ModelWeights(loader, "gpt-oss")
