"""What is done with the mutants of each kind: a sound file, a mutator, and the code that must bear the result."""

from __future__ import annotations

import atexit
import io
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.adapter_files import random_pairs, write_gguf, write_peft
from tests.fuzz import mutate
from tests.fuzz.images import make_image, use_image
from tests.golden_folder import unpack
from tests.text.make_renders import CALL, CONVERSATIONS, TEMPLATES, TOOL

TEXT = "Hello world,  don't \n\n 123 \u00e9\u4e2d\U0001f999 <|im_end|><end_of_turn></s> aaaaaaaaaaaaaaaaaaaaaaab"
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "a"},
]
MESSAGES += [{"role": "user", "content": "b"}]
_MODELS = ("llama", "qwen3", "qwen35", "qwen35moe", "gemma3", "gemma3n", "qwen3moe")


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        make: writes a mutant into an empty folder.
        use: does with it what a user would.
    """

    make: Callable[[random.Random, Path], object]
    use: Callable[[Path], object]


@cache
def goldens() -> Path:
    folder = Path(os.environ["FUZZ_GOLDENS"])
    return unpack(folder)


@cache
def gguf_of(model: str) -> Path:
    """The model's GGUF file; made of the safetensors where there is none."""
    from rlx.export.convert import convert

    path = goldens() / model / "model-f16.gguf"
    if not path.exists():  # in a folder of its own: other tests look at all files of the goldens
        path = Path(mkdtemp(prefix="rlx-fuzz-")) / "model-f16.gguf"
        atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
        convert(goldens() / model / "hf", path)
    return path


def prepare(kind: str) -> None:
    """Makes the seeds and imports what the kind needs, before a process is forked for every batch."""
    goldens()
    for model in _MODELS if kind == "gguf" else ():
        gguf_of(model)
    if kind == "template":  # hostile ones take all the time that they get
        from rlx.text import chat
        from rlx.text.confined import Confined

        chat._RENDERER = Confined("dialect.py", memory=512 << 20, cpu_seconds=0.2)
    with TemporaryDirectory() as folder:
        KINDS[kind].make(random.Random(0), Path(folder))
        with suppress(Exception):
            KINDS[kind].use(Path(folder))


# -- what users do ----------------------------------------------------------------------------------------------------


def use_model(path: Path) -> None:
    """Opens a model and does everything that comes before compiling, then reads the tokenizer."""
    from rlx import models
    from rlx.backends import backend
    from rlx.engine.opening.setup import check_types, open_model, tokenizer_of
    from rlx.ir.dtypes import F16
    from rlx.weights.loader import open_weights

    with open_weights(path) as loader:
        config, weights = open_model(loader)
        check_types(models.build(config, weights, F16), weights, backend().target().capabilities.layouts)
        for name in list(loader.tensors)[:4]:
            loader.raw(name)
        use_tokenizer(tokenizer_of(loader))


def use_tokenizer(tokenizer: Any) -> None:
    from rlx.errors import ChatTemplateError
    from rlx.text import chat_ids

    for special in (False, True):
        ids = tokenizer.encode(TEXT, parse_special=special)
        tokenizer.decode(ids, skip_special_tokens=special)
    tokenizer.decode(range(min(tokenizer.vocab_size, 400)))
    assert tokenizer.special_ids is not None and repr(tokenizer)
    with suppress(ChatTemplateError):
        chat_ids(tokenizer, MESSAGES, tools=[TOOL])


def use_folder(folder: Path) -> None:
    use_model(folder)


def use_file(folder: Path) -> None:
    use_model(folder / "model.gguf")


def use_tokenizer_folder(folder: Path) -> None:
    from rlx.text import load_tokenizer

    use_tokenizer(load_tokenizer(folder))


def use_template(folder: Path) -> None:
    from rlx.text import ChatTemplate

    source, conversation = json.loads((folder / "template.json").read_text())
    if isinstance(conversation, dict) and "messages" in conversation:
        ChatTemplate(source, "<bos>", "<eos>").render(**conversation)


def use_adapter(folder: Path) -> None:
    from rlx.weights.adapters import open_adapter

    file = folder / "a.gguf"
    open_adapter(file if file.exists() else folder, "llama")


def use_snapshot(folder: Path) -> None:
    from rlx.engine.kv.snapshot import Snapshot

    found = Snapshot.load(folder / "s")
    assert found.nbytes >= 0 and all(array.nbytes >= 0 for array in found.arrays.values())


def use_profile(folder: Path) -> None:
    from rlx import CompileProfile

    CompileProfile.load(folder / "p.rlx.toml")


# -- mutants ----------------------------------------------------------------------------------------------------------


def make_gguf(rng: random.Random, folder: Path) -> None:
    data = _read(gguf_of(rng.choice(_MODELS)))
    (folder / "model.gguf").write_bytes(mutate.mutated_gguf(rng, data))


def make_safetensors(rng: random.Random, folder: Path) -> None:
    source = goldens() / rng.choice([model for model in _MODELS if model != "qwen35moe"]) / "hf"  # which has shards
    copy_folder(source, folder)
    data = _read(source / "model.safetensors")
    length = int(struct.unpack_from("<Q", data)[0])
    header, rest = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(4):
        case 0:
            (folder / "model.safetensors").write_bytes(mutate.mutated_bytes(rng, data, within=8 + length))
        case 1 | 2:
            raw = mutate.mutated_json(rng, json.loads(header))
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + rest)
        case 3:
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
            names = dict.fromkeys(json.loads(header).keys() - {"__metadata__"}, "model-00001-of-00001.safetensors")
            index = mutate.mutated_json(rng, {"metadata": {"total_size": 1}, "weight_map": names})
            (folder / "model.safetensors.index.json").write_bytes(index)


def make_tokenizer(rng: random.Random, folder: Path) -> None:
    source = goldens() / rng.choice(_MODELS) / "hf"
    copy_folder(source, folder, weights=False)
    name = "tokenizer.json" if rng.random() < 0.8 else rng.choice(sorted(p.name for p in folder.glob("*.json")))
    raw = (folder / name).read_bytes()
    document = json.loads(raw)
    if name == "tokenizer.json" and rng.random() < 0.5:
        document[rng.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder"))] = component(rng)
    new = mutate.mutated_json(rng, document) if rng.random() < 0.85 else mutate.mutated_bytes(rng, raw)
    (folder / name).write_bytes(new)


_PATTERNS = [
    "a",
    "",
    "(a+)+$",
    "(a|a)*b",
    "\\p{L}+",
    "(",
    "(?<!a*)b",
    "(.*)*\\1",
    "[",
    "a{1,9999}",
    " ",
    "(?:a?){99}a{99}",
]


def component(rng: random.Random, depth: int = 0) -> Any:
    """A normalizer, pre-tokenizer, post-processor or decoder, or something like one."""
    pattern = {rng.choice(("Regex", "String")): rng.choice(_PATTERNS)}
    if depth < 3 and rng.random() < 0.4:
        inner = component(rng, depth + 1)
        name = rng.choice(("normalizers", "pretokenizers", "processors", "decoders"))
        return {"type": "Sequence", name: [inner] * rng.choice((0, 1, 2, 26, 500) if depth == 0 else (1, 2))}
    return rng.choice([
        {"type": "Replace", "pattern": pattern, "content": rng.choice(("", "a", "aa", "a" * 5000))},
        {"type": "Prepend", "prepend": rng.choice(("", "a", "a" * 5000))},
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": rng.random() < 0.2},
        {"type": "Precompiled", "precompiled_charsmap": rng.choice(("", "AAAA", "/////w==", "AAEAAAAA" * 40))},
        {"type": "Metaspace", "replacement": rng.choice(("\u2581", "", "ab")), "prepend_scheme": "always"},
        {"type": "Strip", "content": " ", "start": rng.choice(mutate.NUMBERS), "stop": 0},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": rng.choice(("NFC", "NFKD", "Lowercase", "Fuse", "ByteFallback", "Digits", "Punctuation", "Magic"))},
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * rng.choice((0, 1, 2)),
         "pair": [], "special_tokens": {}},
    ])  # fmt: skip


def make_template(rng: random.Random, folder: Path) -> None:
    source = mutate.mutated_template(rng, rng.choice(list(TEMPLATES.values())))
    conversation = rng.choice(list(CONVERSATIONS.values()))
    if rng.random() < 0.2:
        with suppress(ValueError, RecursionError):  # no JSON
            mutant = mutate.mutated_json(rng, {"messages": [*MESSAGES, CALL]}).decode(errors="replace")
            conversation = json.loads(mutant)
    (folder / "template.json").write_text(json.dumps([source, conversation]))


def make_snapshot(rng: random.Random, folder: Path) -> None:
    from rlx.engine.kv.snapshot import Snapshot

    arrays = {"k.0": np.zeros((2, 3, 8), np.float16), "net.1": np.ones((4, 4), np.float32)}
    Snapshot((5, 0, 7), arrays, {"k.0": "full f16", "net.1": "recurrent"}, "a model").save(folder / "s")
    data = (folder / "s").read_bytes()
    match rng.randrange(4):
        case 0:
            data = mutate.mutated_bytes(rng, data)
        case 1:
            out = io.BytesIO()
            np.savez_compressed(out, zeros=np.zeros(1 << 20), ids=np.arange(3))
            data = mutate.mutated_bytes(rng, out.getvalue())
        case _:
            length = int(struct.unpack_from("<I", data, 12)[0])
            header, rest = data[48 : 48 + length], data[48 + length :]
            header = mutate.mutated_json(rng, json.loads(header))
            rest = mutate.mutated_bytes(rng, rest) if rng.random() < 0.2 else rest
            digest = blake2b(header + rest, digest_size=32).digest()
            data = data[:12] + struct.pack("<I", len(header)) + digest + header + rest
    (folder / "s").write_bytes(data)


def make_json(rng: random.Random, folder: Path) -> None:
    """A checkpoint with its config.json, or another of its small files, mutated."""
    source = goldens() / rng.choice(_MODELS) / "hf"
    copy_folder(source, folder)
    name = "config.json" if rng.random() < 0.8 else rng.choice(("generation_config.json", "tokenizer_config.json"))
    path = folder / name
    document = json.loads(path.read_bytes()) if path.exists() else {}
    path.unlink(missing_ok=True)
    path.write_bytes(mutate.mutated_json(rng, document))


@cache
def adapters() -> tuple[Path, bytes]:
    """A folder as PEFT saves it, and a GGUF file."""
    folder = Path(mkdtemp(prefix="rlx-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pairs = random_pairs(goldens() / "llama" / "hf", ["q_proj", "down_proj"])
    file = write_gguf(folder / "a.gguf", "llama", {"blk.0.attn_q": next(iter(pairs.values()))})
    return write_peft(folder / "peft", pairs), file.read_bytes()


def make_adapter(rng: random.Random, folder: Path) -> None:
    """A LoRA adapter: the settings or the header of a folder's tensors, or a GGUF file."""
    peft, data = adapters()
    if rng.random() < 0.4:
        (folder / "a.gguf").write_bytes(mutate.mutated_gguf(rng, data))
        return
    shutil.copytree(peft, folder, dirs_exist_ok=True)
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if rng.random() < 0.6:
        config.write_bytes(mutate.mutated_json(rng, json.loads(config.read_bytes())))
    else:
        tensors.write_bytes(mutate.mutated_bytes(rng, tensors.read_bytes(), within=800))


PROFILE = """family = "qwen3"
model = "m.gguf"
[precision]
mode = "auto"
bf16_dots = true
kv_dtype = "f16"
[fusion]
skip = false
[buckets]
seq = [1, 32, 128]
[backend.cpu]
level = "native"
threads = 2
[cache]
policy = "on"
capacity = 64
[prefill.precision]
mode = "exact"
[decode.precision]
bf16_tiles = false
"""


def make_profile(rng: random.Random, folder: Path) -> None:
    snippets = [
        "[", "]", "=", '"', "a.b.c = 1\n", "[[x]]\n", "inf", "nan", "-1", "1e999", "9" * 5000, "[" * 2000, "{" * 2000,
        "2024-01-01", "true", "'\\x00'", "\ud800", "[precision]\n", "[prefill.threads]\n", "x" * 70_000, "a=[" * 900,
    ]  # fmt: skip
    text = mutate.mutated_text(rng, PROFILE, snippets).encode("utf-8", "surrogatepass")
    (folder / "p.rlx.toml").write_bytes(mutate.mutated_bytes(rng, text) if rng.random() < 0.2 else text)


def copy_folder(source: Path, folder: Path, weights: bool = True) -> None:
    for path in source.iterdir():
        if weights or path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)


@cache
def _read(path: Path) -> bytes:
    return path.read_bytes()


KINDS = {
    "gguf": Kind(make_gguf, use_file),
    "safetensors": Kind(make_safetensors, use_folder),
    "tokenizer": Kind(make_tokenizer, use_tokenizer_folder),
    "template": Kind(make_template, use_template),
    "adapter": Kind(make_adapter, use_adapter),
    "snapshot": Kind(make_snapshot, use_snapshot),
    "json": Kind(make_json, use_folder),
    "profile": Kind(make_profile, use_profile),
    "image": Kind(make_image, use_image),
}
