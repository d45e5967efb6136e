"""/v1/rerank: documents by how well they answer a query, in the shape that Jina's and Cohere's clients share.

Server stage, beside `embeddings.py`.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field

from rlx.runners.encoder import as_encoder
from rlx.serve.body import Body, Ignored
from rlx.serve.http import in_thread, new_router, while_connected
from rlx.serve.openai.bodies import Text

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

MAX_DOCUMENTS = 2048


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(Body):
    """The body of `/v1/rerank`."""

    query: str
    documents: Annotated[list[str | Document], Field(max_length=MAX_DOCUMENTS)]
    model: Text = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None

    user: Ignored = None
    priority: Ignored = None


def router(server: Server) -> APIRouter:
    """`POST /rerank`."""
    found = new_router(tags=["embeddings"])

    @found.post("/rerank")
    async def rerank(body: RerankBody, request: Request) -> dict[str, Any]:
        """Documents, the best first, each with its score from 0 to 1."""
        model = server.named(body.model)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        scores, count = await while_connected(request, in_thread(partial(_scores, model, body, texts)))
        best = sorted(range(len(texts)), key=lambda number: -scores[number])[: body.top_n]
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": model.name,
            "object": "list",
            "results": [_result(number, scores[number], texts[number], body) for number in best],
            "usage": {"prompt_tokens": count, "total_tokens": count},
            "meta": {"billed_units": {"search_units": 1}},
        }

    return found


def _scores(model: ServedModel, body: RerankBody, texts: list[str]) -> tuple[list[float], int]:
    """Probabilities, and how many tokens the model has read. Classifiers give logits."""
    model.check_length([body.query, *texts], "documents")
    found = model.without_adapter().rerank(body.query, texts, truncate=body.truncate is True)
    scores = np.array(found)
    if (encoder := as_encoder(model.runner)) is not None and encoder.width == 1:
        scores = 1 / (1 + np.exp(-scores))
    return [float(score) for score in scores], found.tokens


def _result(number: int, score: float, text: str, body: RerankBody) -> dict[str, Any]:
    shown = {} if body.return_documents is False else {"document": {"text": text}}
    return {"index": number, "relevance_score": score, **shown}
