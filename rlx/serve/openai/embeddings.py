"""/v1/embeddings, /v1/rerank and /api/embed: texts as vectors, and documents by how well they answer a query.

Server stage. The first is OpenAI's path, the last are Ollama's. The second has the shape that Jina's and Cohere's
clients share.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from rlx.engine.request import Context
from rlx.runners.encoder import as_encoder
from rlx.runners.session import of_unit_length
from rlx.serve.errors import invalid
from rlx.serve.http import MAX_TEXTS, Body, OpenRoute, hints, in_thread, json_rows, new_router, while_connected
from rlx.serve.ollama import KeepAlive, ModelBody, Options, named, options_of
from rlx.serve.openai.bodies import EmbeddingBody, Text
from rlx.serve.prompts import prompt_ids, prompts

if TYPE_CHECKING:
    from rlx.engine.request import Logits
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
        how: dict[str, Any] = {"pooling": pooling, "dimensions": dimensions, "normalize": normalize}
        every = partial(encoder.embed, adapter=model.adapter, **how)
        parts = [contexts[at : at + TOGETHER] for at in range(0, len(contexts), TOGETHER)]
        return [vector for part in parts for vector in await in_thread(partial(every, part))]
    embed = partial(model.runner.embed, pooling=pooling or "mean", normalize=False, adapter=model.adapter)
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
    adds = body.add_special_tokens is not False
    pairs = prompts(body.input, "input")
    return [model.checked(prompt_ids(model, each, name, adds), name) for each, name in pairs]


def _entry(index: int, vector: Logits, as_base64: bool) -> dict[str, Any]:
    """A vector as numbers, or as base64 of its little-endian float32."""
    raw = vector.astype("<f4")
    found: Any = base64.b64encode(raw.tobytes()).decode() if as_base64 else raw.tolist()
    return {"object": "embedding", "index": index, "embedding": found}


MAX_DOCUMENTS = 2048


class Document(Body):
    """A document as an object."""

    text: str


@hints("user priority")
class RerankBody(Body):
    """The body of `/v1/rerank`."""

    query: str
    documents: Annotated[list[str | Document], Field(max_length=MAX_DOCUMENTS)]
    model: Text = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None


def rerank_router(server: Server) -> APIRouter:
    """`POST /rerank`."""
    found = new_router(tags=["embeddings"])

    @found.post("/reranking", include_in_schema=False)  # llama-server's other name
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
    found = model.runner.rerank(body.query, texts, truncate=body.truncate is True, adapter=model.adapter)
    scores = np.array(found)
    if (encoder := as_encoder(model.runner)) is not None and encoder.width == 1:
        scores = 1 / (1 + np.exp(-scores))
    return [float(score) for score in scores], found.tokens


def _result(number: int, score: float, text: str, body: RerankBody) -> dict[str, Any]:
    shown = {} if body.return_documents is False else {"document": {"text": text}}
    return {"index": number, "relevance_score": score, **shown}


# ---------------------------------------------------------------------------------------------- Ollama


class EmbedBody(ModelBody):
    """The body of `/api/embed`."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(ModelBody):
    """The body of `/api/embeddings`, the older form of `/api/embed`."""

    prompt: Text = None
    options: Options | None = None
    keep_alive: KeepAlive = None


LONGEST = 16  # characters of a token at most, where a text is cut to what the context holds


def ollama_router(server: Server) -> APIRouter:
    """`POST /api/embed` and `POST /api/embeddings`."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.post("/api/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        """A vector of length 1 for each text."""
        started, model = time.perf_counter(), named(server, body)
        options_of(body.options, model.default_sample, model.runner.max_seq)
        texts = [body.input] if isinstance(body.input, str) else body.input
        size = _size(model, body.dimensions)
        vectors, tokens = await while_connected(request, _of_texts(model, texts, body.truncate is True, size))
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
        vectors, _ = await while_connected(request, _of_texts(model, [body.prompt], False, None, "prompt"))
        return {"embedding": vectors[0].tolist()}

    return found


def _size(model: ServedModel, dimensions: int | None) -> int | None:
    """The number of leading elements that a vector keeps; None for all."""
    hidden = model.width
    if dimensions and dimensions > hidden:
        raise invalid("dimensions", f"found {dimensions}, and vectors of the model have {hidden} elements")
    return dimensions or None


async def _of_texts(
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
