"""Ollama's `/api/embed` and `/api/embeddings`: texts as vectors. Server stage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from rlx.engine.request.context import Context
from rlx.serve.errors import invalid
from rlx.serve.http import OpenRoute, in_thread, json_rows, while_connected
from rlx.serve.model import ServedModel
from rlx.serve.ollama.requests import EmbedBody, EmbeddingsBody, options_of
from rlx.serve.ollama.routes import named
from rlx.serve.openai.embeddings import vectors_of

if TYPE_CHECKING:
    from rlx.engine.request.output import Logits
    from rlx.serve.server import Server

LONGEST = 16  # characters of a token at most, where a text is cut to what the context holds


def router(server: Server) -> APIRouter:
    """`POST /api/embed` and `POST /api/embeddings`."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.post("/api/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        """A vector of length 1 for each text."""
        started, model = time.perf_counter(), named(server, body)
        options_of(body.options, model.default_sample, model.runner.max_seq)
        texts = [body.input] if isinstance(body.input, str) else body.input
        size = _size(model, body.dimensions)
        vectors, tokens = await while_connected(request, _answered(model, texts, body.truncate is True, size))
        fields = {
            "model": body.model or body.name,
            "total_duration": int((time.perf_counter() - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }
        rows = (vector.tolist() for vector in vectors)
        written = await in_thread(lambda: json_rows(fields, "embeddings", rows))
        return Response(written, media_type="application/json")

    @found.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> dict[str, list[float]]:
        """The vector of one text, of length 1."""
        model = named(server, body)
        options_of(body.options, model.default_sample, model.runner.max_seq)
        if not body.prompt:
            return {"embedding": []}
        vectors, _ = await while_connected(request, _answered(model, [body.prompt], False, None, "prompt"))
        return {"embedding": vectors[0].tolist()}

    return found


def _size(model: ServedModel, dimensions: int | None) -> int | None:
    """The number of leading elements that a vector keeps; None for all."""
    hidden = model.runner.config.hidden
    if dimensions and dimensions > hidden:
        raise invalid("dimensions", f"found {dimensions}, and vectors of the model have {hidden} elements")
    return dimensions or None


async def _answered(
    model: ServedModel, texts: list[str], cut: bool, size: int | None, field: str = "input"
) -> tuple[list[Logits], int]:
    """The vectors of texts, and how many tokens these have.

    Args:
        cut: cut texts to what the context holds, as the request asks for.
    """
    contexts = await in_thread(lambda: [_context(model, text, cut, field, i) for i, text in enumerate(texts)])
    vectors = await vectors_of(model, contexts, size)
    return vectors, sum(len(each) for each in contexts)


def _context(model: ServedModel, text: str, cut: bool, field: str, number: int) -> Context:
    if not cut:
        model.check_length([text], field)
    ids = model.tokenizer.encode(text[: LONGEST * model.runner.max_seq] if cut else text)
    if not ids:
        raise invalid(f"{field}[{number}]" if field == "input" else field, "the text has no tokens")
    return model.checked(ids[: model.runner.max_seq] if cut else ids, field)
