"""Builds a program for a card: the kernels of its regions, as PTX and machine code, and the table of its launches."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from rlx.backends.cuda import ptx
from rlx.backends.cuda.agreed.steps import ADDED
from rlx.backends.cuda.code import Kernel
from rlx.backends.cuda.entry import entry
from rlx.backends.cuda.kernels.cards import meet
from rlx.backends.cuda.kernels.loop import Sequences, advance
from rlx.backends.cuda.launches import COUNTERS, PER_RANGE, SCRATCH, Context, Launch
from rlx.backends.cuda.layouts import matrix_bytes
from rlx.backends.cuda.select import select
from rlx.backends.cuda.target import Target
from rlx.backends.device import Built, Lowered, OnKernel, manifest_of
from rlx.backends.sizes import static
from rlx.ir.dims import SEGMENTS
from rlx.ir.node import Node
from rlx.ir.text import body
from rlx.passes.program import maker, root
from rlx.platform import cpu_count

_KEPT = 512  # compiled modules that later programs of this process find

#: Makes machine code of a module of PTX.
Link = Callable[[str], bytes]

#: Compiled modules, the last ones used: (text, level, driver) -> (PTX, machine code).
_known: OrderedDict[tuple[str, str, int], tuple[str, bytes]] = OrderedDict()


def build_program(program: Lowered, target: Target, on_kernel: OnKernel, link: Link | None) -> Built:
    """Compiles a program.

    Args:
        link: for the card; None where there is none, and code is only looked at.

    Raises:
        CompileError: an op has no kernel for its types.
    """
    start = time.perf_counter()
    symbols = *program.symbols, *ADDED
    context = Context(
        symbols, program.graph.bounds, target.features, program.deterministic, program.exact, target.layouts
    )
    nodes, own = [node for region in program.regions for node in region], dict[Node, Launch]()
    launches: dict[Node, list[Launch]] = {}
    for i, region in enumerate(program.regions):
        inside = _inside(program, i, context)
        for node in region:
            on_kernel(len(launches), len(nodes))
            launches[node] = select(node, inside)
        own |= inside.own
    steps = [step for i, region in enumerate(program.regions) for step in _steps(program, i, region, launches)]
    beside = {"advance": _between_steps(program, context), "meet": _meeting(context)}
    functions = [(name, some) for name, some, _ in steps] + [(name, [each]) for name, each in beside.items() if each]
    modules = {name: entry(name, some, target.features) for name, some in functions}
    selected = time.perf_counter()
    files = _compiled(modules, target, link)
    compiled = time.perf_counter()
    made = [each.kernel for some in launches.values() for each in some]
    kernels = {each.name: each.text for each in chain(made, *(each.own for each in made))}
    kernels |= {_symbol(node, launches, own): str(body(node["body"])) for node in nodes if node.op == "call"}
    files |= {f"kernels/{name}.txt": text for name, text in kernels.items()}
    manifest = manifest_of(program, lambda node: _symbol(node, launches, own))
    manifest["launches"] = [
        {"entry": name, "shared": max(each.shared for each in some), "kernels": table} for name, some, table in steps
    ]
    manifest["overlaps"] = target.features.overlaps
    if beside["advance"]:
        manifest["loop"] = _loop_pointers(program)
    if beside["meet"]:
        manifest["meets"] = _meets(program, launches)
    on_kernel(len(nodes), len(nodes))
    seconds = {"kernels": selected - start, "LLVM": compiled - selected}
    return Built(files, manifest, len(kernels), seconds)


def _symbol(node: Node, launches: dict[Node, list[Launch]], own: dict[Node, Launch]) -> str:
    """The name of a node's kernel; of a `call` that of what the host computes."""
    if node.op == "call":
        return f"host_{hashlib.sha256(node['body'].encode()).hexdigest()[:16]}"
    return (launches[node][0] if node in launches else own[node]).kernel.name


def _inside(program: Lowered, region: int, context: Context) -> Context:
    """What selection knows in a region: what each of its blocks computes for itself, in shared memory."""
    places = {node: program.operand(node, region).offset for node in program.prologues[region] if root(node) is node}
    inner, own = replace(context, places=places, start=program.private if places else 0, inner=True), {}
    for node in program.prologues[region]:
        (own[node],) = select(node, inner)
    start = max((launch.kernel.shared for launch in own.values()), default=0)
    nodes = program.regions[region]
    outputs = sum(inner.part(static(each, -1)).count for each in nodes if each.op == "linear")
    return replace(inner, own=own, start=start, inner=False, weights=_weights(nodes, inner), outputs=outputs)


def _weights(region: Sequence[Node], context: Context) -> int:
    """Bytes of the matrices of linears that a card has."""
    packed = [maker(each) for node in region if node.op in ("linear", "linear_pick") for each in node.inputs]
    sizes = [(each.inputs[0].dtype, static(each, -2), static(each, -1)) for each in packed if each.op == "pack"]
    return sum(matrix_bytes(dtype, context.part(n).count, k) for dtype, n, k in sizes)


def _between_steps(program: Lowered, context: Context) -> Kernel | None:
    """The kernel that takes the tokens of a step with a row for each sequence to the next step; None if it cannot."""
    leaves, outputs = program.graph.leaves("input"), program.graph.outputs
    if any(node.op == "call" for node in program.graph.nodes()):  # the host comes in between
        return None
    if program.graph.phase == "prefill" or not {"token", "logits"} & outputs.keys() or "tokens" not in leaves:
        return None
    names = [
        "loop", "found", *([] if "token" in outputs else ["token", "number"]), *(n for n, _ in _loop_pointers(program))
    ]  # fmt: skip
    sequences = Sequences(has_past="PAST_SEQ" in program.symbols)
    if (segments := leaves.get("segments")) is not None:
        sequences = Sequences(SEGMENTS, static(segments, 1))
    return context.kernel("advance", dict.fromkeys(names), lambda k: advance(k, sequences))


def _meeting(context: Context) -> Kernel | None:
    """The kernel in which cards meet; None for one card."""
    cards = context.layouts.cards
    return context.kernel("meet", dict.fromkeys(["lines", "places"]), lambda k: meet(k, cards)) if cards > 1 else None


def _meets(program: Lowered, launches: dict[Node, list[Launch]]) -> list[int]:
    """The regions after which cards meet; -1 is before the first one.

    Results that cards write on each other need a meeting after the region, before somebody reads them, and one before
    it: others may still read what had its memory before.
    """
    regions = [i for i, region in enumerate(program.regions) if any(launches[node] for node in region)]
    split = {i: any(each.split for node in program.regions[i] for each in launches[node]) for i in regions}
    pairs = pairwise([-1, *regions, len(program.regions)])
    return [i for i, following in pairs if split.get(i) or split.get(following)]


def _loop_pointers(program: Lowered) -> list[list[Any]]:
    """Name and place in the arena of what steps pass on; tokens chosen from logits lie elsewhere."""
    leaves, outputs = program.graph.leaves("input"), program.graph.outputs
    found = {name: outputs[name] for name in ("token",) if name in outputs} | {"tokens": leaves["tokens"]}
    found |= {name: node for name, node in leaves.items() if name == "positions" and len(node.shape) == 1}
    found |= {name: node for name, node in leaves.items() if name == "segments"}
    return [[name, program.buffer(node).offset] for name, node in found.items()]


def _steps(
    program: Lowered, number: int, region: Sequence[Node], launches: dict[Node, list[Launch]]
) -> Iterator[tuple[str, list[Kernel], list[dict[str, Any]]]]:
    """The launches of a region: name of the function, its kernels, and the row of each in the manifest."""
    for stage in range(max((len(launches[node]) for node in region), default=0)):
        own = [(at, node, launches[node][stage]) for at, node in enumerate(region) if stage < len(launches[node])]
        kernels = [launch.kernel for _, _, launch in own]
        digest = hashlib.sha256(" ".join(k.name for k in kernels).encode()).hexdigest()[:16]
        yield f"region_{digest}", kernels, [_row(program, number, *each) for each in own]


def _row(program: Lowered, number: int, at: int, node: Node, launch: Launch) -> dict[str, Any]:
    """A kernel of a launch: plain JSON data.

    Args:
        at: place of the node in its region. What kernels pass on is read in the same region, so all regions share it.
    """
    passed: dict[int, list[Any]] = {
        SCRATCH: ["scratch", at], PER_RANGE: ["per_range", at], COUNTERS: ["counters", at],
    }  # fmt: skip
    pointers: list[list[Any]] = []
    for arg in launch.args:
        if isinstance(arg, int) and arg in passed:
            pointers.append(passed[arg])
            continue
        place = program.operand(arg, number) if isinstance(arg, Node) else program.buffer(node)
        pointers.append([place.kind, place.name or place.offset])
    blocks = launch.blocks
    counts = [str(blocks.count), blocks.per, blocks.times, blocks.split, blocks.least, blocks.most]
    sizes = {"scratch": str(launch.scratch), "counters": str(launch.counters)}
    return {"pointers": pointers, "blocks": counts, "sizes": sizes, "region": number}


def _compiled(modules: dict[str, str], target: Target, link: Link | None) -> dict[str, bytes | str]:
    """The files of modules: PTX, and machine code where there is a card."""
    keys = {name: (text, target.level, target.driver) for name, text in modules.items()}
    new = {name: key for name, key in keys.items() if key not in _known}
    texts = ptx.compiled([key[0] for key in new.values()], target.level, target.ptx) if new else []
    with ThreadPoolExecutor(cpu_count()) as pool:
        codes = list(pool.map(link, texts)) if link else [b""] * len(texts)
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
