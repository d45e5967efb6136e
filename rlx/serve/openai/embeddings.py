"""/v1/embeddings: texts as vectors. Server stage, one of OpenAI's paths; Ollama's use `vectors_of`, too."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.engine.request.output import of_unit_length
from rlx.runners.encoder import as_encoder
from rlx.serve.errors import invalid
from rlx.serve.http import in_thread, json_rows, new_router, while_connected
from rlx.serve.openai.bodies import EmbeddingBody
from rlx.serve.prompts import prompt_ids, prompts

if TYPE_CHECKING:
    from rlx.engine.request.context import Context
    from rlx.engine.request.output import Logits
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

TOGETHER = 256  # texts that an encoder gets at once


async def vectors_of(
    model: ServedModel,
    contexts: Sequence[Context],
    dimensions: int | None = None,
    pooling: str | None = None,
    normalize: bool = True,
) -> list[Logits]:
    """The vectors of prompts in order, some computed when those before are there: whoever goes away stops them.

    Args:
        dimensions: how many of the first numbers of a vector it keeps; None for all.
        pooling: as for `embed`; by default as the files of an encoder say, and `mean` for other models.
        normalize: scale what is kept to length 1.

    Returns:
        For each prompt float32[dimensions].
    """
    if (encoder := as_encoder(model.runner)) is not None:
        every = partial(encoder.embed, pooling=pooling, dimensions=dimensions, normalize=normalize)
        parts = [contexts[at : at + TOGETHER] for at in range(0, len(contexts), TOGETHER)]
        return [vector for part in parts for vector in await in_thread(partial(every, part))]
    embed = partial(model.without_adapter().embed, pooling=pooling or "mean", normalize=False)
    kept = [(await in_thread(partial(embed, each)))[:dimensions] for each in contexts]
    return [of_unit_length(each) for each in kept] if normalize else kept


def router(server: Server) -> APIRouter:
    """`POST /embeddings`."""
    found = new_router(tags=["embeddings"])

    @found.post("/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Texts as vectors of length 1."""
        model = server.named(body.model)
        width = model.width
        if body.dimensions is not None and body.dimensions > width:
            raise invalid("dimensions", f"expected at most {width}, found {body.dimensions}")
        contexts = await in_thread(lambda: _contexts(model, body))
        vectors = await while_connected(
            request, vectors_of(model, contexts, body.dimensions, body.pooling, body.normalize is not False)
        )
        count, as_base64 = sum(map(len, contexts)), body.encoding_format == "base64"
        usage = {"prompt_tokens": count, "total_tokens": count}
        fields = {"object": "list", "model": model.name, "usage": usage}
        entries = (_entry(i, vector, as_base64) for i, vector in enumerate(vectors))
        written = await in_thread(lambda: json_rows(fields, "data", entries))
        return Response(written, media_type="application/json")

    return found


def _contexts(model: ServedModel, body: EmbeddingBody) -> list[Context]:
    found, adds = prompts(body.input, "input"), body.add_special_tokens is not False
    names = ["input"] if len(found) == 1 else [f"input[{i}]" for i in range(len(found))]
    return [model.checked(prompt_ids(model, each, name, adds), name) for each, name in zip(found, names, strict=True)]


def _entry(index: int, vector: Logits, as_base64: bool) -> dict[str, Any]:
    """A vector as numbers, or as base64 of its little-endian float32."""
    raw = vector.astype("<f4")
    found: Any = base64.b64encode(raw.tobytes()).decode() if as_base64 else raw.tolist()
    return {"object": "embedding", "index": index, "embedding": found}
