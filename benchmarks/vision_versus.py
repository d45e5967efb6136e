#!/usr/bin/env python3
"""Encoding an image: rlx beside llama.cpp's `llama-mtmd-cli`, on towers of real shapes with random weights.

    python benchmarks/vision_versus.py --mtmd .../bin/llama-mtmd-cli [--only gemma3] [--type F16] [--rounds 3]

The script writes the files that it measures: an mmproj with the shapes of a real tower, and a text model of a few small
layers, into `--folder` (a temporary one by default). The image is noise, of a size that neither side changes.

What is timed is the tower alone, on both sides: `Tower.encode` on ready patches, and what llama-mtmd-cli prints as
"encoding done in". Both sides take turns. A turn of llama-mtmd-cli is one process over several images, once with
flash attention and once without. The faster one counts, and of all times the median. Beside the times stand the
GFLOP/s of linears and attention, as a share of this machine's measured bf16 peak, and rlx's memory beyond weights.

llama-mtmd-cli is a target of the sources inside the sdist of llama-cpp-python; clang builds it for the machine:

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ && cmake --build build --target llama-mtmd-cli
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from make_model import floats, write_model

from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.cpu.machine import arithmetic_peaks
from rlx.backends.cpu.steps import worker_loop
from rlx.backends.cpu.target import Target
from rlx.compiler.compile import Compiler
from rlx.engine.engine import Engine
from rlx.models.shapes import SHAPES
from rlx.platform import cpu_count
from rlx.vision.image import Image, ImageOptions
from rlx.vision.processors import ImageProcessor

ENCODED = re.compile(r"(?:image slice encoded|mtmd batch encoding done) in (\d+) ms")
TYPES = {"F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16, "F32": GGMLQuantizationType.F32}


@dataclass(frozen=True)
class Shape:
    """A tower and the text model that it belongs to.

    Attributes:
        family: the projector, `gemma3` or `qwen3vl_merger`.
        hidden, heads, ffn, layers: of the tower.
        patch, side: pixels along the side of a patch and of the image.
        base: length of the position table.
        text, out: a shape of `make_model.py`, of which the text model has the architecture, and its width.
    """

    family: str
    hidden: int
    heads: int
    ffn: int
    layers: int
    patch: int
    side: int
    base: int
    text: str
    out: int

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def operations(self) -> float:
        """Of the linears and attention of all layers."""
        linears = 2 * (4 * self.hidden**2 + 2 * self.hidden * self.ffn)
        return self.layers * self.patches * (linears + 4.0 * self.patches * self.hidden)


TOWERS = {
    "gemma3": Shape("gemma3", 1152, 16, 4304, 27, 14, 896, 4096, "gemma-3-4b", 2560),
    "qwen3.5-0.8b": Shape("qwen3vl_merger", 768, 12, 3072, 12, 16, 512, 2304, "qwen3.5-0.8b", 1024),
    "qwen3.5-4b": Shape("qwen3vl_merger", 1024, 16, 4096, 24, 16, 512, 2304, "qwen3.5-0.8b", 2560),
    "qwen3.5-9b": Shape("qwen3vl_merger", 1152, 16, 4304, 27, 16, 512, 2304, "qwen3.5-0.8b", 4096),
}


# ---------------------------------------------------------------------------------------------------- files


def tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of an mmproj file."""
    qwen, convolution = s.family != "gemma3", (s.hidden, 3, s.patch, s.patch)
    yield from ((f"v.patch_embd.weight{end}", convolution) for end in ("", ".1")[: 1 + qwen])
    yield from (("v.patch_embd.bias", (s.hidden,)), ("v.position_embd.weight", (s.base, s.hidden)))
    parts = {"attn_qkv": (3 * s.hidden, s.hidden)} if qwen else {f"attn_{n}": (s.hidden, s.hidden) for n in "qkv"}
    parts |= {"attn_out": (s.hidden, s.hidden), "ffn_up": (s.ffn, s.hidden), "ffn_down": (s.hidden, s.ffn)}
    for i in range(s.layers):
        for name, shape in parts.items():
            yield from ((f"v.blk.{i}.{name}.weight", shape), (f"v.blk.{i}.{name}.bias", shape[:1]))
        for norm in ("ln1", "ln2"):
            yield from ((f"v.blk.{i}.{norm}.{end}", (s.hidden,)) for end in ("weight", "bias"))
    yield from ((f"v.post_ln.{end}", (s.hidden,)) for end in ("weight", "bias"))
    if qwen:
        wide = 4 * s.hidden
        for name, rows in (("mm.0", wide), ("mm.2", s.out)):
            yield from ((f"{name}.weight", (rows, wide)), (f"{name}.bias", (rows,)))
    else:
        yield from (("mm.soft_emb_norm.weight", (s.hidden,)), ("mm.input_projection.weight", (s.hidden, s.out)))


def write_mmproj(path: Path, s: Shape, kind: str) -> None:
    """The file of a tower, with random weights."""
    writer, rng = GGUFWriter(path, "clip"), np.random.default_rng(0)
    writer.add_type("mmproj")
    for key, value in {"has_vision_encoder": True, "use_gelu": True}.items():
        writer.add_bool(f"clip.{key}", value)
    writer.add_string("clip.projector_type", s.family)
    sizes = {
        "embedding_length": s.hidden,
        "feed_forward_length": s.ffn,
        "block_count": s.layers,
        "projection_dim": s.out,
        "patch_size": s.patch,
        "image_size": round(s.base**0.5) * s.patch,
        "attention.head_count": s.heads,
        **({"spatial_merge_size": 2} if s.family != "gemma3" else {}),
    }
    for key, number in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    for name, shape in tensors(s):
        values = floats(rng, prod(shape)).reshape(shape)
        if "ln" in name or "norm" in name:
            values = values + np.float32(name.endswith("weight"))
        plain = len(shape) == 1 or "position" in name or kind == "F32" or (kind == "BF16" and len(shape) == 4)
        if plain:
            writer.add_tensor(name, values)
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(name, bits.view(np.uint8), raw_shape=(*shape[:-1], 2 * shape[-1]), raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_text(path: Path, s: Shape) -> None:
    """A text model of a few small layers, as wide as the tower's result."""
    write_model(path, "text", replace(SHAPES[s.text], hidden=s.out, ffn=256, layers=4, vocab=2048), "F16")


def write_image(path: Path, pixels: np.ndarray) -> None:
    """uint8 [H, W, 3] as a PPM file, which both sides read."""
    height, width = pixels.shape[:2]
    path.write_bytes(b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes())


# ---------------------------------------------------------------------------------------------------- sides


class Ours:
    """The tower in rlx."""

    def __init__(self, text: Path, mmproj: Path, pixels: np.ndarray, args: argparse.Namespace) -> None:
        self.engine = Engine.open(text, mmproj=str(mmproj), threads=args.threads, load=False)
        self.tower = self.engine.vision.required()
        processor = ImageProcessor.of(self.tower.config, ImageOptions())
        self.patches = processor.preprocess(Image.of(pixels))
        self.tower.encode(self.patches)  # loads and compiles
        before = resident()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        self.tower.encode(self.patches)
        programs = sum(program.arena_bytes for program in self.tower._instances.values())
        self.beyond = programs + resident(peak=True) - before

    def times(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            start = time.perf_counter()
            rows = self.tower.encode(self.patches)
            found.append(time.perf_counter() - start)
        assert np.isfinite(rows).all()
        return found


def resident(*, peak: bool = False) -> int:
    """Bytes that are, or at most were, resident in this process."""
    name = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def theirs(args: argparse.Namespace, text: Path, mmproj: Path, image: Path, flash: str) -> list[float]:
    """Seconds of each image in one process of llama-mtmd-cli."""
    command = [args.mtmd, "-m", str(text), "--mmproj", str(mmproj), "-p", "x", "-n", "1", "-t", str(args.threads)]
    command += ["-c", "8192", "-fa", flash, "-ngl", "0", "--jinja"]
    command += [part for _ in range(args.images) for part in ("--image", str(image))]
    options: dict[str, Any] = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    done = subprocess.run(command, check=False, **options)
    found = [int(number) / 1000 for number in ENCODED.findall(done.stdout + done.stderr)]
    if not found:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SystemExit(f"llama-mtmd-cli encoded nothing (exit status {done.returncode}):\n{tail}")
    return found


def compare(name: str, s: Shape, peak: float, folder: Path, args: argparse.Namespace) -> None:
    """One line of the table."""
    text, mmproj, image = folder / f"{name}-text.gguf", folder / f"{name}-mmproj-{args.type}.gguf", folder / "image.ppm"
    if not text.exists():
        write_text(text, s)
    if not mmproj.exists():
        write_mmproj(mmproj, s, args.type)
    pixels = np.random.default_rng(0).integers(0, 256, (s.side, s.side, 3), dtype=np.uint8)
    write_image(image, pixels)
    ours = Ours(text, mmproj, pixels, args)
    assert len(ours.patches.patches) == s.patches
    found: dict[str, list[float]] = {"rlx": [], "on": [], "off": []}
    for _ in range(args.rounds):
        found["rlx"] += ours.times(args.images)
        for flash in ("on", "off") if args.mtmd else ():
            found[flash] += theirs(args, text, mmproj, image, flash)
    ours.engine.close()
    print(line(name, s, peak, found, ours.beyond), flush=True)


def line(name: str, s: Shape, peak: float, found: dict[str, list[float]], beyond: int) -> str:
    own = statistics.median(found["rlx"])
    rate = s.operations / own / 1e9
    text = f"{name:14}{s.patches:>8}{own:10.3f} s{rate:9.0f}{rate / peak:7.0%}{beyond / 2**20:9.0f} MiB"
    if not found["on"]:
        return text
    other = min(statistics.median(found[flash]) for flash in ("on", "off"))
    return f"{text}{other:10.3f} s{s.operations / other / 1e9:9.0f}{other / own:8.2f}"


def bf16_peak(threads: int) -> float:
    """The best measured rate of bf16 products, in GFLOP/s; of f32 where there are none of bf16."""
    compiler = Compiler(Target.host())
    with WorkerPool(threads, worker_loop(compiler)) as pool:
        peaks: dict[str, Any] = arithmetic_peaks(compiler, pool)
    print(f"{Target.host().level}, {threads} threads; peaks: {', '.join(f'{k} {v:.0f}' for k, v in peaks.items())}")
    return float(peaks.get("amx-bf16", peaks.get("bf16", peaks["f32"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtmd", default=shutil.which("llama-mtmd-cli"), help="llama.cpp's program")
    parser.add_argument("--only", help="towers, with commas between: " + ", ".join(TOWERS))
    parser.add_argument("--type", choices=TYPES, default="F16", help="of the tower's matrices")
    parser.add_argument("--threads", type=int, default=cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=2, help="images of a turn")
    parser.add_argument("--folder", type=Path, help="where the files are kept for another run")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else [*TOWERS]
    if unknown := set(chosen) - set(TOWERS):
        parser.error(f"no tower is called {', '.join(unknown)}; there are {', '.join(TOWERS)}")
    if not args.mtmd:
        print("llama-mtmd-cli was not found (--mtmd): rlx alone", file=sys.stderr)
    peak = bf16_peak(args.threads)
    peer = f"{'llama.cpp':>12}{'GFLOP/s':>9}{'ratio':>8}" if args.mtmd else ""
    print(f"{'tower, ' + args.type:14}{'patches':>8}{'rlx':>12}{'GFLOP/s':>9}{'peak':>7}{'memory':>13}{peer}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            compare(name, TOWERS[name], peak, folder, args)


if __name__ == "__main__":
    main()
