"""Builds a program for a card: the kernels of its regions, as PTX and machine code, and the table of its launches."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlx.backends.cuda import driver, ptx
from rlx.backends.cuda.code import Kernel, entry
from rlx.backends.cuda.kernels.loop import advance
from rlx.backends.cuda.select import ADDED, RESULT, SCRATCH, SCRATCH_TOO, Blocks, Context, Launch, select
from rlx.backends.cuda.target import Target
from rlx.backends.device import Built, Lowered, OnKernel, manifest_of
from rlx.ir.dims import DimLike
from rlx.ir.node import Node
from rlx.passes.program import Buffer
from rlx.platform import cpu_count

_KEPT = 512  # compiled modules that later programs of this process find

#: Compiled modules, the last ones used: (text, level, driver) -> (PTX, machine code).
_known: OrderedDict[tuple[str, str, int], tuple[str, bytes]] = OrderedDict()


def build_program(program: Lowered, target: Target, on_kernel: OnKernel) -> Built:
    """Compiles a program.

    Raises:
        CompileError: an op has no kernel for its types.
    """
    start = time.perf_counter()
    context = Context((*program.symbols, *ADDED), program.graph.bounds, target.overlaps)
    nodes = [node for region in program.regions for node in region]
    launches: dict[Node, list[Launch]] = {}
    for i, node in enumerate(nodes):
        on_kernel(i, len(nodes))
        launches[node] = select(node, context)
    steps = [step for i, region in enumerate(program.regions) for step in _steps(program, i, region, launches)]
    between = _between_steps(program, context)
    functions = [(name, kernels) for name, kernels, _ in steps] + ([("advance", [between])] if between else [])
    modules = {name: entry(name, kernels, target.overlaps) for name, kernels in functions}
    selected = time.perf_counter()
    files = _compiled(modules, target)
    compiled = time.perf_counter()
    for some in launches.values():
        files |= {f"kernels/{each.kernel.name}.txt": each.kernel.text for each in some}
    manifest = manifest_of(program, lambda node: launches[node][0].kernel.name)
    manifest["launches"] = [
        {"entry": name, "shared": max(k.shared for k in kernels), "kernels": table} for name, kernels, table in steps
    ]
    if between:
        manifest["loop"] = _loop_pointers(program)
    on_kernel(len(nodes), len(nodes))
    distinct = {each.kernel.name for some in launches.values() for each in some}
    seconds = {"kernels": selected - start, "LLVM": compiled - selected}
    return Built(files, manifest, len(distinct), seconds)


def _between_steps(program: Lowered, context: Context) -> Kernel | None:
    """The kernel that takes the token of a step of one row to the next step; None for other programs."""
    leaves = program.graph.leaves("input")
    if program.graph.phase != "decode" or "token" not in program.graph.outputs or "tokens" not in leaves:
        return None
    names = ["loop", *(name for name, _ in _loop_pointers(program))]
    return context.kernel("advance", names, lambda k: advance(k, "PAST_SEQ" in program.symbols))


def _loop_pointers(program: Lowered) -> list[list[Any]]:
    """Name and place in the arena of what the loop passes on."""
    leaves, outputs = program.graph.leaves("input"), program.graph.outputs
    found = {"token": outputs["token"], "tokens": leaves["tokens"]}
    found |= {name: node for name, node in leaves.items() if name == "positions" and len(node.shape) == 1}
    return [[name, program.buffer(node).offset] for name, node in found.items()]


def _steps(
    program: Lowered, number: int, region: Sequence[Node], launches: dict[Node, list[Launch]]
) -> Iterator[tuple[str, list[Kernel], list[dict[str, Any]]]]:
    """The launches of a region: name of the function, its kernels, and the row of each in the manifest."""
    for stage in range(max((len(launches[node]) for node in region), default=0)):
        own = [(node, launches[node][stage]) for node in region if stage < len(launches[node])]
        kernels = [launch.kernel for _, launch in own]
        digest = hashlib.sha256(" ".join(k.name for k in kernels).encode()).hexdigest()[:16]
        yield f"region_{digest}", kernels, [_row(program, number, node, launch) for node, launch in own]


def _row(program: Lowered, number: int, node: Node, launch: Launch) -> dict[str, Any]:
    """A kernel of a launch: plain JSON data."""
    pointers: list[list[Any]] = []
    for arg in launch.args:
        if arg in (SCRATCH, SCRATCH_TOO):
            pointers.append(["scratch", 2 * program.graph.nodes().index(node) + (arg == SCRATCH_TOO)])
            continue
        place = program.buffer(node) if arg == RESULT else program.operand(node.inputs[arg], number)
        pointers.append(_placed(place))
    return {"pointers": pointers, "blocks": _blocks(launch.blocks), "scratch": str(launch.scratch)}


def _placed(place: Buffer) -> list[Any]:
    return [place.kind, place.name or place.offset]


def _blocks(blocks: Blocks) -> list[Any]:
    count: DimLike = blocks.count
    return [str(count), blocks.per, blocks.times, blocks.split, blocks.only]


def _compiled(modules: dict[str, str], target: Target) -> dict[str, bytes | str]:
    """The files of modules: PTX, and machine code where there is a card."""
    keys = {name: (text, target.level, target.driver) for name, text in modules.items()}
    new = {name: key for name, key in keys.items() if key not in _known}
    texts = ptx.compiled([key[0] for key in new.values()], target.level, target.ptx) if new else []
    if target.driver:
        with ThreadPoolExecutor(cpu_count()) as pool:
            codes = list(pool.map(_linked, texts))
    else:
        codes = [b""] * len(texts)
    for key, text, code in zip(new.values(), texts, codes, strict=True):
        _known[key] = text, code
    files: dict[str, bytes | str] = {}
    for name, key in keys.items():
        text, code = _known[key]
        _known.move_to_end(key)
        files |= {f"{name}.ll": key[0], f"{name}.ptx": text}
        if code:
            files[f"{name}.cubin"] = code
    while len(_known) > _KEPT:
        _known.popitem(last=False)
    return files


def _linked(text: str) -> bytes:
    from rlx.backends.cuda.backend import BACKEND  # it builds programs

    BACKEND.card().use()
    return driver.link(text)
