"""The plain data of a report: what the page shows of each program, and the large texts beside it.

Report stage, over `drawing.py` and `work.py`. Everything is JSON data. A name with `*` stands for the equal values of
several layers, whose numbers are beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

from rlx.ir import dims, text
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import pipeline
from rlx.passes.options import BACKEND
from rlx.passes.program import Program
from rlx.passes.report import PassReport, ranges
from rlx.report import drawing, work
from rlx.report.source import Source, StepTimes, Subject
from rlx.report.work import (
    RegionWork,
    budget,
    changes,
    kernel_rows,
    mean_wait,
    memory_rows,
    region_rows,
    region_work,
    step_extents,
)

#: Characters of a line in a box of the drawing; pixels of a character, of one of the first line, of a line down.
_LINE, _CHAR, _TITLE, _ROW = 34, 6.7, 7.3, 15.0

#: A large text by its key, made when it is needed.
Texts = dict[str, Callable[[], str]]


def report_data(subject: Subject, sources: Sequence[Source]) -> tuple[dict[str, Any], Texts]:
    """The data of a page about some programs, and its large texts."""
    texts: Texts = {}
    programs = [_program(source, subject, texts) for source in sources]
    machine = asdict(subject.machine) if subject.machine else None
    facts = asdict(subject) | {"machine": machine, "version": _version()}
    return {"subject": facts, "programs": programs}, texts


def _version() -> str:
    try:
        return metadata.version("rlx")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "source"


def _program(source: Source, subject: Subject, texts: Texts) -> dict[str, Any]:
    graphs = _graphs(source)
    row: dict[str, Any] = {
        "name": source.name,
        "phase": source.phase,
        "rows": list(source.rows),
        "precision": source.options.precision,
        "target": source.target,
        "stats": dict(source.stats),
        "problem": asdict(source.problem) if source.problem else None,
        "stages": [],
        "drawings": [],
    }
    for name, stage in source.stages:
        key = f"ir/{source.name}/{name}"
        texts[key] = lambda stage=stage: stage  # type: ignore[misc]
        row["stages"].append({"name": _plain(name), "text": key, "lines": stage.count("\n"), "drawing": None})
    program = _placed(source, graphs)
    regions = _region_of(program)
    for stage in row["stages"]:
        graph = graphs.get(stage["name"])
        if graph is not None:
            shown = _drawing(graph, regions if graph is list(graphs.values())[-1] else {})
            if shown not in row["drawings"]:
                row["drawings"].append(shown)
            stage["drawing"] = row["drawings"].index(shown)
    row["passes"] = _passes(source, graphs, program)
    if program is not None and source.manifest is not None:
        row |= _code(source, subject, program, texts)
        row["groups"] = _groups(graphs, source, program)
    return row


def _plain(stage: str) -> str:
    """ "04-fuse" -> "fuse"."""
    return stage.split("-", 1)[1]


def _graphs(source: Source) -> dict[str, Graph]:
    """The graphs of the stages, in order; the last stages are programs, whose text does not parse."""
    return {_plain(name): text.loads(stage) for name, stage in source.stages if _plain(name) not in BACKEND}


def _placed(source: Source, graphs: Mapping[str, Graph]) -> Program | None:
    """The program of the last graph, with regions and places; None if the compile ended before."""
    if source.manifest is None:
        return None
    return pipeline.place(list(graphs.values())[-1], source.options)


def _region_of(program: Program | None) -> dict[Node, int]:
    if program is None:
        return {}
    found = {n: i for i, nodes in enumerate(program.prologues) for n in nodes}
    return found | {n: i for i, nodes in enumerate(program.regions) for n in nodes}


# -- the drawing ------------------------------------------------------------------------------------------------------


def _drawing(graph: Graph, regions: Mapping[Node, int]) -> dict[str, Any]:
    """A graph as boxes with their places: see `rlx.report.page.scripts`, `drawing.js`."""
    folded = drawing.fold(graph)
    boxes = [_box(box, regions) for box in folded.boxes]
    sizes = [(box.pop("w"), box.pop("h")) for box in boxes]
    groups = [box.group for box in folded.boxes]
    placed = drawing.draw(sizes, groups, folded.edges, len(folded.groups))
    for box, (x, y), (w, h) in zip(boxes, placed.at, sizes, strict=True):
        box["at"] = [round(x - w / 2, 1), round(y, 1), round(w, 1), round(h, 1)]
    return {
        "boxes": boxes,
        "edges": [
            [a, b, [[round(x, 1), round(y, 1)] for x, y in route]]
            for (a, b), route in zip(folded.edges, placed.routes, strict=True)
        ],
        "frames": [
            {"at": [round(v, 1) for v in frame], "layers": list(numbers), "title": _title(numbers)}
            for frame, numbers in zip(placed.frames, folded.groups, strict=True)
        ],
        "outputs": [[name, at] for name, at in folded.outputs.items()],
        "size": [round(placed.width, 1), round(placed.height, 1)],
    }


def _title(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    return f"{len(numbers)} equal layers: {ranges(numbers)[1:-1].replace(',', ', ')}"


def _box(box: drawing.Box, regions: Mapping[Node, int]) -> dict[str, Any]:
    node = box.node
    shown = _brief(box.name)
    leaves = [
        {"n": name, "kind": leaf.op, "type": _type(leaf), "short": _brief(name)} for name, leaf in box.leaves.items()
    ]
    lines = [shown, f"{node.op} {_type(node)}", *(f"{leaf['short']} {leaf['type']}" for leaf in leaves)]
    longest = max(len(shown) * _TITLE, *(min(_LINE, len(line)) * _CHAR for line in lines[1:]))
    width = max(110.0, longest + 24)
    row = {"n": box.name, "s": shown, "op": node.op, "type": _type(node), "leaves": leaves, "g": box.group}
    row |= {"attrs": [[k, str(v)] for k, v in node.attrs if k != "name"], "w": width, "h": _ROW * len(lines) + 16}
    return row | ({"region": regions[node]} if node in regions else {})


def _brief(name: str) -> str:
    """The name of a value without its layer: "attn_q" for "blk.*.attn_q", "k.write" for "k.*.write"."""
    return name.removeprefix("blk.*.").replace(".*", "")


def _type(node: Node) -> str:
    return f"{node.dtype}[{', '.join(map(str, node.shape))}]"


# -- passes -----------------------------------------------------------------------------------------------------------


def _passes(source: Source, graphs: Mapping[str, Graph], program: Program | None) -> list[dict[str, Any]]:
    """A row for each pass: what its rules did and missed, and the lines that changed."""
    done = {each.name: each for each in source.report.passes} if source.report else {}
    rows, before = [], None
    for name in [_plain(stage) for stage, _ in source.stages]:
        graph = graphs.get(name)
        if name != "graph":
            rows.append(_pass(name, done.get(name), program))
            if before is not None and graph is not None:
                rows[-1]["changes"] = [change.as_row() for change in changes(before, graph, done.get(name))]
        before = graph
    return rows


def _pass(name: str, done: PassReport | None, program: Program | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "done": [], "missed": [], "changes": []}
    if done is None:
        return row
    events = [
        {"rule": e.rule, "n": e.where, "detail": e.detail, "layers": list(e.layers), "count": e.count}
        for e in done.done
    ]
    row |= {"done": events, "missed": work.missed_rows(done, program), "facts": dict(done.facts)}
    return row | {"nodes": list(done.nodes), "changed": done.changed, "note": done.note, "seconds": done.seconds}


# -- schedule, kernels, memory ----------------------------------------------------------------------------------------


def _code(source: Source, subject: Subject, program: Program, texts: Texts) -> dict[str, Any]:
    assert source.manifest is not None
    times = source.times
    env = step_extents(program.graph, source.rows, times.extents if times else None)
    work = region_work(program, env)
    seconds = list(times.regions) if times else None
    regions = region_rows(program, source.manifest, work)
    for name, make in source.texts.items():
        texts.setdefault(f"code/{name}", lambda make=make: json.dumps(asdict(make())))  # type: ignore[misc]
    row: dict[str, Any] = {
        "extents": {symbol: value for symbol, value in env.items() if symbol in program.graph.bounds},
        "bytes": sum(region.bytes for region in work),
        "stored": sum(region.stored for region in work),
        "operations": _sum(work),
        "regions": regions,
        "kernels": kernel_rows(program, source.manifest, env, seconds),
        "memory": memory_rows(program, source.manifest),
        "texts": sorted(source.texts),
        "leaves": _leaves(program.graph, env),
        "times": None,
    }
    if times:
        row["times"] = _times(times)
        if subject.machine:
            labels = [_label(regions["groups"][of]) for of in regions["of"]]
            row["budget"] = [part.as_row() for part in budget(work, labels, times, subject.machine)]
    return row


def _sum(work: Sequence[RegionWork]) -> dict[str, int]:
    found: dict[str, int] = {}
    for region in work:
        for kind, count in region.operations.items():
            found[kind] = found.get(kind, 0) + count
    return found


def _label(group: Mapping[str, Any]) -> str:
    """The name of a region: the values that it computes, without layers."""
    names = [_brief(call["n"]) for call in group["calls"]]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _times(times: StepTimes) -> dict[str, Any]:
    """Plain data of a measured step, in nanoseconds."""
    waits = [[None if w is None else round(w * 1e9) for w in row] for row in times.waits]
    return {
        "extents": dict(times.extents),
        "seconds": times.seconds,
        "repeats": times.repeats,
        "regions": [round(s * 1e9) for s in times.regions],
        "wait": [round(mean_wait(times, i) * 1e9) for i in range(len(times.regions))],
        "waits": waits,
        "units": [list(map(int, row)) for row in times.units],
    }


def _leaves(graph: Graph, env: Mapping[str, int]) -> list[dict[str, Any]]:
    """Weights by type and states, in bytes: of states what a step can read."""
    found: dict[tuple[str, str], list[int]] = {}
    for op in ("weight", "state"):
        for leaf in graph.leaves(op).values():
            size = leaf.dtype.size(tuple(dims.value(d, env) for d in leaf.shape))
            found.setdefault((op, leaf.dtype.name), []).append(size)
    return [
        {"kind": kind, "dtype": dtype, "count": len(sizes), "bytes": sum(sizes)}
        for (kind, dtype), sizes in found.items()
    ]


def _groups(graphs: Mapping[str, Graph], source: Source, program: Program) -> list[dict[str, Any]]:
    """The savings of the groups of fusion rules; the passes run again from the one before `fuse`."""
    names = list(graphs)
    fuses = next(i for i, name in enumerate(names) if name.startswith("fuse"))  # devices have forms of it
    before = names[fuses - 1]
    env = step_extents(program.graph, source.rows, source.times.extents if source.times else None)
    used = {event.rule for done in source.report.passes for event in done.done} if source.report else set()
    again = partial(pipeline.resume, graphs[before], after=before, passes=source.passes)
    return work.groups(again, program, source.options, env, used)
