"""Compare `rlx quantize` with llama.cpp's quantizer on a model file: types, errors, logits, speed.

Needs `pip install llama-cpp-python gguf` in the Python that runs it; `rlx` is run as a command and may live elsewhere.
The model is a GGUF file in F32, F16 or BF16 (`make_model.py` writes one with a real model's shapes). For each type

- both tools write a file; their speed is in MB of the model a CPU second, start-up included, best of a few runs;
- every tensor's type must be the same in both files, and its error against the original at most 1.05 times the peer's;
- both files are run by llama.cpp on text that the original writes, or on that of `--text`; their logits are compared
  with the original's, and perplexities are those of that text.

With `--imatrix FILE` both tools quantize by importance, and errors are weighted as the matrix says.

The exit status is 1 if a type or an error is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

TYPES = {
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
    "Q5_K_M": LlamaFileType.MOSTLY_Q5_K_M,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
ROWS = 4096  # rows of a tensor whose values are held at a time
ALLOWED = 1.05
WINDOW = 512  # tokens
Floats = NDArray[np.float32]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file in F32, F16 or BF16")
    parser.add_argument("--types", default=",".join(TYPES), help="which, with commas between")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=int, default=2, help="of each tool; the fastest counts")
    parser.add_argument("--tokens", type=int, default=48, help="for the logits; 0 leaves them out")
    parser.add_argument("--text", type=Path, help="a file whose tokens are run in place of what the model writes")
    parser.add_argument("--imatrix", type=Path, help="an importance matrix of rlx imatrix or llama-imatrix")
    parser.add_argument("--table", action="store_true", help="also print the peer's type of every tensor")
    parser.add_argument("--rlx", default=shutil.which("rlx") or "rlx", help="the command")
    options = parser.parse_args()
    options.ids = []
    if options.tokens:
        options.ids = text_ids(options) if options.text else written(options.model, options.tokens)
    options.means = importance(options.imatrix) if options.imatrix else {}
    original = logits(options.model, options.ids) if options.ids else None
    if original is not None:
        print(f"{len(options.ids)} tokens, perplexity of the original {perplexity(original, options.ids):.4f}")
    print(f"{'type':8}{'tensors':>8}{'types':>7}{'error: worst':>14}{'mean':>8}{'rlx':>10}{'llama.cpp':>11}  logits")
    with tempfile.TemporaryDirectory() as folder:
        wrong = [name for name in options.types.split(",") if not compare(name, options, original, Path(folder))]
    return 1 if wrong else 0


def compare(name: str, options: argparse.Namespace, original: Floats | None, folder: Path) -> bool:
    """One row of the table; whether types and errors are as they should be."""
    ours, theirs = folder / f"rlx-{name}.gguf", folder / f"peer-{name}.gguf"
    rlx = [options.rlx, "quantize", str(options.model), str(ours), name, "--force", "--threads", str(options.threads)]
    rlx += ["--imatrix", str(options.imatrix)] if options.imatrix else []
    our_time = fastest(options.runs, lambda: subprocess.run(rlx, check=True, capture_output=True))
    their_time = fastest(options.runs, lambda: peer_quantize(options, theirs, TYPES[name], folder))
    source, a, b = (tensors(path) for path in (options.model, ours, theirs))
    other = [key for key in b if a[key].tensor_type != b[key].tensor_type]
    rounded = [key for key in b if b[key].tensor_type != source[key].tensor_type]
    ratios = [ratio(source[key], a[key], b[key], options.means.get(key)) for key in rounded]
    worst, mean = max(ratios, default=1.0), float(np.mean(ratios or [1.0]))
    speeds = [f"{options.model.stat().st_size / seconds / 1e6:.0f} MB/s" for seconds in (our_time, their_time)]
    line = f"{name:8}{len(b):8}{'OTHER' if other else 'equal':>7}{worst:14.3f}{mean:8.3f}"
    print(f"{line}{speeds[0]:>10}{speeds[1]:>11}", said(original, ours, theirs, options.ids), flush=True)
    for key in other:
        print(f"  {key}: {a[key].tensor_type.name}, llama.cpp has {b[key].tensor_type.name}")
    if options.table:
        print("\n".join(f"  {key} {tensor.tensor_type.name}" for key, tensor in b.items()))
    ours.unlink()
    theirs.unlink()
    return not other and worst <= ALLOWED


def fastest(runs: int, run: Callable[[], object]) -> float:
    """CPU seconds of the child process that `run` starts, which other work on the machine disturbs little."""
    seconds = []
    for _ in range(runs):
        start = children_seconds()
        run()
        seconds.append(children_seconds() - start)
    return min(seconds)


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peer_quantize(options: argparse.Namespace, out: Path, file_type: LlamaFileType, folder: Path) -> None:
    """In a process of its own: the library writes a line a tensor."""
    code = (
        "import sys, ctypes, numpy as np, llama_cpp as l\n"
        "p = l.llama_model_quantize_default_params(); p.ftype = int(sys.argv[3]); p.nthread = int(sys.argv[4])\n"
        "found = [(n.encode(), v) for n, v in np.load(sys.argv[5]).items()]\n"
        "floats = ctypes.POINTER(ctypes.c_float)\n"
        "entries = [(n, v.ctypes.data_as(floats), v.size) for n, v in found]\n"
        "entries = (l.llama_model_imatrix_data * (len(found) + 1))(*entries)\n"
        "p.imatrix = entries if found else None\n"
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(p)))"
    )
    matrix = folder / "means.npz"
    np.savez(matrix, **options.means)
    arguments = [str(options.model), str(out), str(int(file_type)), str(options.threads), str(matrix)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def importance(path: Path) -> dict[str, Floats]:
    """The mean square of the inputs of each column, [matrices, columns] by the names of weights."""
    found = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    names = [name.removesuffix(".in_sum2") for name in found if name.endswith(".in_sum2")]
    return {n: found[f"{n}.in_sum2"] / np.maximum(found[f"{n}.counts"].reshape(-1, 1), 1) for n in names}


def tensors(path: Path) -> dict[str, ReaderTensor]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def values(tensor: ReaderTensor) -> Iterator[Floats]:
    """A tensor's rows as float32, some at a time."""
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    for start in range(0, len(data), ROWS):
        yield dequantize(data[start : start + ROWS], GGMLQuantizationType(tensor.tensor_type))


def squares(original: ReaderTensor, tensor: ReaderTensor, weights: Floats | None) -> float:
    """The sum of squared errors, each times the weight of its column."""
    pairs, total, row = zip(values(original), values(tensor), strict=True), 0.0, 0
    rows = original.data.size // original.data.shape[-1]
    for x, y in pairs:
        errors = np.square((x - y).astype(np.float64))
        if weights is not None:
            errors *= weights[np.arange(row, row + len(x)) * len(weights) // rows]
        total, row = total + float(errors.sum()), row + len(x)
    return total


def ratio(original: ReaderTensor, ours: ReaderTensor, theirs: ReaderTensor, weights: Floats | None) -> float:
    """Our root of the mean squared error over theirs."""
    a, b = squares(original, ours, weights), squares(original, theirs, weights)
    return float(np.sqrt(a / b)) if b else (1.0 if not a else float("inf"))


def said(original: Floats | None, ours: Path, theirs: Path, ids: list[int]) -> str:
    """How far the logits are from the original's, and how often the likeliest token is another."""
    if original is None:
        return ""
    return ", ".join(
        f"{who}: {distance(original, logits(path, ids), ids)}" for who, path in (("rlx", ours), ("peer", theirs))
    )


def distance(original: Floats, found: Floats, ids: list[int]) -> str:
    error = np.sqrt(np.mean((original - found) ** 2, dtype=np.float64)) / original.std()
    p, q = log_softmax(original), log_softmax(found)
    divergence = np.mean(np.sum(np.exp(p) * (p - q), axis=-1))
    same = np.mean(original.argmax(-1) == found.argmax(-1))
    return f"error {error:.4f} KL {divergence:.2e} same top {same:.2f} ppl {perplexity(found, ids):.4f}"


def perplexity(found: Floats, ids: list[int]) -> float:
    chosen = log_softmax(found)[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp(-chosen.mean()))


def log_softmax(x: Floats) -> NDArray[np.float64]:
    wide = x.astype(np.float64) - x.max(-1, keepdims=True)
    logs: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return logs


def opened(path: Path, tokens: int) -> Any:
    from llama_cpp import Llama

    return Llama(str(path), n_ctx=max(64, tokens), logits_all=True, verbose=False, n_gpu_layers=0)


def written(path: Path, tokens: int) -> list[int]:
    """Tokens that the model itself writes, drawn with a fixed seed: what it is at home in, if it is trained."""
    llama, rng = opened(path, tokens), np.random.default_rng(0)
    bos = int(llama.token_bos())
    ids = [bos if bos >= 0 else 0]
    while len(ids) < tokens:
        llama.eval(ids[-1:])
        p = np.exp(log_softmax(np.array(llama.scores[len(ids) - 1], np.float32)))
        ids.append(int(rng.choice(p.size, p=p / p.sum())))
    llama.close()
    return ids


def text_ids(options: argparse.Namespace) -> list[int]:
    """The first tokens of a text."""
    llama = opened(options.model, 64)
    found: list[int] = llama.tokenize(options.text.read_bytes(), add_bos=False)
    llama.close()
    return found[: options.tokens]


def logits(path: Path, ids: list[int]) -> Floats:
    """llama.cpp's logits after each token, in windows that see nothing of one another."""
    llama, found = opened(path, WINDOW), []
    for start in range(0, len(ids), WINDOW):
        part = ids[start : start + WINDOW]
        llama.reset()
        llama.eval(part)
        found.append(np.array(llama.scores[: len(part)], np.float32))
    llama.close()
    return np.concatenate(found)


if __name__ == "__main__":
    sys.exit(main())
