"""Write the templates of rlx's own loop kernels, which the package brings: `rlx/backends/cpu/templates.xz`.

    python tools/lower_loops.py            # after a change of a loop kernel, of the front end, or of Numba's version
    python tools/lower_loops.py --check    # lower everything again and compare: 0 if the archive is what it would be

A template that is missing costs time, never correctness: it is lowered where it is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlx.backends.cpu import loops
from rlx.backends.cpu.kernels.cache import kv
from rlx.backends.cpu.kernels.delta import plain as delta_plain
from rlx.backends.cpu.kernels.packing import pack
from rlx.backends.cpu.kernels.rows import (
    choose,
    copy,
    embedding,
    gather,
    lookup,
    norm,
    quantize,
    reduce,
    rope,
    softmax,
)
from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cpu.templates import ARCHIVE, Template, installed_versions
from rlx.backends.cuda import layouts as card_layouts
from rlx.backends.cuda.kernels import pack as card_pack
from rlx.errors import RlxError
from rlx.export import quantizers
from rlx.ir.dtypes import KV_DTYPES, Q8_0

#: Sizes in kernels whose memory on the stack is part of their type: the heads of common models.
HEADS = (64, 80, 96, 128, 192, 256)


def templates() -> list[Template]:
    """Every template, once."""
    found: dict[str, Template] = {}
    usual = loops.Template

    def keeping(*args: Any) -> Template:
        template = usual(*args)
        found[template.digest] = template
        return template

    loops.Template = keeping  # type: ignore[assignment,misc]
    try:
        loops._lowered.cache_clear()
        for make in kernels():
            try:
                make()
            except RlxError:  # not every type has every kernel
                continue
    finally:
        loops.Template = usual  # type: ignore[misc]
    return list(found.values())


def kernels() -> Iterator[Callable[[], object]]:
    """Calls that make every kind of loop kernel; their numbers do not matter, but where they decide about the kind."""
    outs, both, width = ("f32", "q8a", "bf16"), (False, True), 5120  # whole superblocks of every type
    for make, dtype in itertools.product((embedding.embedding, lookup.lookup), PACKINGS):
        yield partial(make, dtype, width)
    yield from (partial(pack.pack, dtype, signed=signed) for dtype, signed in itertools.product(PACKINGS, both))
    yield from (partial(card_pack.pack, dtype) for dtype in card_layouts.TYPES)
    yield partial(embedding.embedding, Q8_0, width, signed=True)
    yield from (partial(norm.rms_norm, width, 1e-6, out=o, weighted=w) for o, w in itertools.product(outs, both))
    yield from (partial(quantize.quantize, width, out) for out in outs)
    yield from (partial(norm.layer_norm, width, 1e-6, out=o, weights=n) for o, n in itertools.product(outs, range(3)))
    yield partial(rope.rope_angles, 64)
    yield from (partial(rope.rope_angles, 64, sections=(24, 20, 20), interleaved=turns) for turns in both)
    for head, eps in itertools.product(HEADS, (None, 1e-6)):
        turn = partial(rope.rope, 8, head, head, "neox", norm_eps=eps)
        yield turn
        for dtype, wrap in itertools.product(KV_DTYPES, both):
            yield partial(turn, store="k_tiles", kv_dtype=dtype, wrap=wrap)
    for dtype, layout, wrap in itertools.product(KV_DTYPES, ("rows", "k_tiles"), both):
        yield from (partial(kv.kv_write, 8, head, dtype, layout, wrap=wrap) for head in HEADS)
    yield from (partial(reduce.row_reduce, width, kind) for kind in ("sum", "mean"))
    yield from (partial(reduce.column_reduce, 4, width, kind) for kind in ("sum", "mean"))
    yield partial(gather.overlay_rows, width)
    yield gather.relabel
    yield from (partial(make, width) for make in (reduce.argmax, reduce.pick))
    yield from (partial(make, width) for make in (copy.last_row, copy.take_rows))
    yield choose.choose
    yield from (partial(reduce.top_k, 128, 8), partial(reduce.top_k, 256, 8, 8, 4), partial(softmax.softmax, width))
    yield from (partial(gather.take, width, 8, shared=shared) for shared in both)
    for (order, corrects), aside in itertools.product((("tiled", True), ("grouped", True), ("grouped", False)), both):
        rule = partial(delta_plain.plain, 32, 16, 128, 128, scale=0.1, order=order)
        yield partial(rule, corrects=corrects, aside=aside)
    for dtype, encoder in quantizers.ENCODERS.items():
        for by_importance in both if encoder.by_importance is not None else (False,):
            yield partial(loops.kernel_of, quantizers.encoder(dtype, by_importance))


def write_archive(templates: Iterable[Template], path: Path = ARCHIVE) -> int:
    """Lowers templates and writes them to an archive. Returns their number. Equal templates give equal bytes."""
    texts = {digest: text.encode() for digest, text in sorted((t.digest, t.lower()) for t in templates)}
    starts = itertools.accumulate(map(len, texts.values()), initial=0)
    index = {digest: [start, len(text)] for (digest, text), start in zip(texts.items(), starts, strict=False)}
    head = {"versions": installed_versions(), "templates": index}
    whole = json.dumps(head).encode() + b"\n" + b"".join(texts.values())
    path.write_bytes(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))
    return len(texts)


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # Numba writes phi nodes in the order of a set of strings
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the archive would differ")
    if not parser.parse_args().check:
        print(f"{write_archive(templates())} templates, {ARCHIVE.stat().st_size / 1e6:.2f} MB: {ARCHIVE}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / ARCHIVE.name
        count = write_archive(templates(), made)
        same = ARCHIVE.exists() and made.read_bytes() == ARCHIVE.read_bytes()
    print(f"{count} templates: {'as in' if same else 'not those of'} {ARCHIVE}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
