"""Opens what makes drafts, by its name in `speculative`: the model's own head, another model, or a head in a folder.

Runners stage, between the engine and the kinds of drafts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rlx.compiler.compile import Progress
from rlx.compiler.tensors import Tensors
from rlx.engine import speculation
from rlx.engine.opening.setup import Setup
from rlx.engine.speculation.drafts import Drafting
from rlx.engine.speculation.heads import HeadDrafting
from rlx.weights import open_weights

if TYPE_CHECKING:
    from rlx.engine.engine import Engine
    from rlx.ir.graph import Graph

PATH = "model:"  # before the path of a draft model or head


def open_drafting(
    name: str, engine: Engine, graph: Graph, setup: Setup, tensors: Tensors, progress: Progress | None, number: int
) -> Drafting:
    """What drafts for an engine.

    Args:
        name: "mtp", or "model:PATH" with the path of a whole model or of a head.
        graph, setup, tensors, progress: of the engine; the graph has the output "hidden".
        number: of what drafts for it.

    Raises:
        ModelFileError, TokenizerError: the file cannot be used.
        ArgumentError: it is of another model, or has another vocabulary.
    """
    if name == "mtp":
        mtp = partial(speculation.mtp.mtp_head, engine.config, engine.weights, setup, tensors, progress)
        return HeadDrafting(engine, lambda parts: mtp())
    loader = open_weights(name.removeprefix(PATH))
    try:
        if not speculation.eagle3.is_eagle3(loader):
            return speculation.draft_model.DraftModel.of(loader, engine, setup, progress)
        head = speculation.eagle3.Eagle3Head(loader, engine.weights, engine.config, setup, number)
    except BaseException:
        loader.close()
        raise
    return HeadDrafting(engine, partial(head.opened, graph, setup, tensors, progress), loader)
