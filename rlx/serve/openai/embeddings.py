"""/v1/embeddings: texts as vectors. Server stage, one of OpenAI's paths."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.serve.errors import invalid
from rlx.serve.http import in_thread, json_rows, new_router, while_connected
from rlx.serve.openai.bodies import EmbeddingBody
from rlx.serve.openai.prompts import prompt_ids, prompts
from rlx.serve.vectors import vectors_of

if TYPE_CHECKING:
    from rlx.engine.request.context import Context
    from rlx.engine.request.output import Logits
    from rlx.serve.app import Server
    from rlx.serve.model import ServedModel


def router(server: Server) -> APIRouter:
    """`POST /embeddings`."""
    found = new_router(tags=["embeddings"])

    @found.post("/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Texts as vectors of length 1."""
        model = server.named(body.model)
        width = model.runner.config.hidden
        if body.dimensions is not None and body.dimensions > width:
            raise invalid("dimensions", f"expected at most {width}, found {body.dimensions}")
        contexts = await in_thread(lambda: _contexts(model, body))
        vectors = await while_connected(
            request, vectors_of(model, contexts, body.dimensions, body.pooling or "mean", body.normalize is not False)
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
