"""Convert a Hugging Face folder to an OpenVINO model for `versus.py`. Runs in an environment with optimum-intel.

    python benchmarks/make_model.py --shape qwen3-0.6b --type BF16 --out qwen3-0.6b
    python benchmarks/openvino_model.py qwen3-0.6b --type int8 --out qwen3-0.6b-int8

To make that environment: python -m venv openvino && openvino/bin/pip install openvino-genai "optimum-intel[openvino]".

`int8` has one scale for each row of a matrix, `int4` one for 128 weights of a row (all matrices but the head, which is
int8), `bf16` keeps the weights. These are what OpenVINO recommends for its text models.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any] | None] = {
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": False, "group_size": 128, "ratio": 1.0},
    "bf16": None,
}


def convert(folder: Path, kind: str, out: Path) -> None:
    """Writes the converted model and its tokenizer into the folder `out`."""
    from optimum.exporters.openvino import main_export  # type: ignore[import-not-found,unused-ignore]
    from optimum.intel import OVConfig, OVWeightQuantizationConfig  # type: ignore[import-not-found,unused-ignore]

    settings = KINDS[kind]
    options = {"dtype": "bf16"} if settings is None else {"quantization_config": OVWeightQuantizationConfig(**settings)}
    main_export(
        str(folder),
        output=out,
        task="text-generation-with-past",
        ov_config=OVConfig(**options),
        library_name="transformers",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the Hugging Face folder")
    parser.add_argument("--type", required=True, choices=KINDS, dest="kind", help="type of the weights")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the converted model goes")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder}: no Hugging Face folder; make_model.py writes one")
    convert(args.folder, args.kind, args.out)


if __name__ == "__main__":
    main()
