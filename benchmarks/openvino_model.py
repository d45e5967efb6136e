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

KINDS = ("int8", "int4", "bf16")


def convert(folder: Path, kind: str, out: Path) -> None:
    """Writes the converted model and its tokenizer into the folder `out`."""
    import nncf  # type: ignore[import-not-found,unused-ignore]
    import openvino  # type: ignore[import-not-found,unused-ignore]
    from optimum.exporters.openvino import main_export  # type: ignore[import-not-found,unused-ignore]

    main_export(str(folder), output=out, task="text-generation-with-past", library_name="transformers")
    if kind == "bf16":
        return
    model = openvino.Core().read_model(out / "openvino_model.xml")
    if kind == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=128, ratio=1.0)
    openvino.save_model(model, out / "compressed.xml")
    del model  # it maps the files that are replaced
    for suffix in ("xml", "bin"):
        (out / f"compressed.{suffix}").replace(out / f"openvino_model.{suffix}")


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
