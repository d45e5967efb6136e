"""Programs over one pool: paged caches, and slots for the other states, as the programs of an engine share them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.backends import backend
from rlx.backends.cpu.target import Target
from rlx.backends.program import Program
from rlx.compiler.compile import Compiler
from rlx.compiler.tensors import Source, Tensors
from rlx.ir import dims, text
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.stored import to_bf16
from rlx.passes.layout import weight_table
from rlx.passes.options import Options
from rlx.passes.segments import full_caches
from rlx.store.cache import CompileCache

Array = np.ndarray[Any, Any]


class Pool:
    """The states of a graph, and programs that work on them.

    Args:
        weights: f32 values by name, or what loads the weights: a source of `Tensors.load`.
        pages: pages of the full caches.
        slots: slots of the other states.
        window_ctx: positions of a ring.
    """

    def __init__(
        self,
        graph: Graph,
        weights: dict[str, Array] | Source,
        *,
        cache: CompileCache,
        target: str = "native",
        threads: int = 2,
        pages: int = 0,
        slots: int = 1,
        window_ctx: int = 64,
    ) -> None:
        self.graph = graph
        self.compiler = Compiler(backend(target).target() if target == "reference" else Target.host(target), cache)
        self.extents = {
            "CTX": pages * self.compiler.target.capabilities.layouts.page,
            "WINDOW_CTX": window_ctx,
            "SLOTS": slots,
        }
        self.workers = self.compiler.workers(threads)
        self.tensors = Tensors(self.compiler, self.workers)
        self._load(weights)
        self.pooled = {node.name for node in full_caches(graph)}
        self.sizes = {
            name: node.dtype.size([dims.value(dim, self.extents) for dim in node.shape])
            for name, node in graph.leaves("state").items()
        }
        memory = self.compiler.backend.memory
        copies = {name: 1 if name in self.pooled else slots for name in self.sizes}
        self.buffers = {name: memory.allocate(copies[name] * size) for name, size in self.sizes.items()}
        self.programs: list[Program] = []
        self.final: dict[Program, Graph] = {}

    def _load(self, weights: dict[str, Array] | Source) -> None:
        rows = weight_table(self.graph, self.compiler.target.capabilities.layouts)
        for name, value in self.graph.constants.items():
            self.tensors.add_array(name, value)
        if not isinstance(weights, dict):
            self.tensors.load(rows, weights)
            return
        for name, given in weights.items():
            row, value = rows[name], np.ascontiguousarray(given, np.float32)
            if row["layout"] == "rows":
                self.tensors.add_array(name, value)
            elif row["layout"] == "file":
                self.tensors.add_table(name, value.view(np.uint8).reshape(-1))
            else:
                raw = to_bf16(value) if row["dtype"] == "bf16" else value
                self.tensors.add_matrix(name, raw.view(np.uint8).reshape(-1), DTYPES[row["dtype"]], *value.shape)

    def program(self, seq: tuple[int, int], graph: Graph | None = None, **options: Any) -> Program:
        """A program for `seq` rows of the graph or a variant of it; options as in `Options`, but paged by default."""
        chosen = Options(**{"precision": "exact", "paged": True, **options, "seq": seq})
        compiled = self.compiler.program(graph or self.graph, chosen)
        program = compiled.instance(self.workers)
        program.bind(self.tensors.buffers)
        program.bind({name: self.buffers[name] for name in self.pooled})
        slotted = {name: (each, self.sizes[name]) for name, each in self.buffers.items() if name not in self.pooled}
        program.bind_slots(slotted)
        self.programs.append(program)
        self.final[program] = text.loads(compiled.final)
        return program

    def run(self, program: Program, inputs: dict[str, Any], **env: int) -> dict[str, Array]:
        """One step; inputs that the program does not have are ignored."""
        given = {**self.extents, **env}
        for name, view in program.inputs.items():
            value = np.asarray(inputs[name], view.dtype)
            view.reshape(-1)[: value.size] = value.reshape(-1)
        program.run(**given)
        return {name: program.output(name, **given).copy() for name in program.manifest["outputs"]}

    def close(self) -> None:
        self.workers.close()
        for program in self.programs:
            program.close()
        self.tensors.close()
        for buffer in self.buffers.values():
            buffer.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
