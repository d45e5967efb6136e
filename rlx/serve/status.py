"""The state of a server and of its models: health, properties, slots, versions, metrics, `/v1/models`.

Server stage, beside the APIs. The fields follow OpenAI, llama-server and vLLM, whose clients and probes ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

import rlx
from rlx.errors import RlxError
from rlx.serve.errors import ApiError, openai_body
from rlx.serve.http import json_bytes, new_router
from rlx.serve.metrics import CONTENT_TYPE
from rlx.serve.model import ServedModel
from rlx.serve.ollama.routes import tag
from rlx.serve.openai.native import sampling_settings

if TYPE_CHECKING:
    from rlx.engine.request.record import ActiveRequest
    from rlx.serve.server import Server

PROBES = frozenset({"/health", "/v1/health", "/ping", "/metrics", "/slots", "/favicon.ico"})
"""Paths that are asked all the time: the log has them only where they fail."""


def router(server: Server) -> APIRouter:
    """`GET /health`, which a load balancer asks: 200 if new requests are computed."""
    found = new_router(tags=["status"])

    @found.get("/health")
    async def health() -> Response:
        """Whether requests are answered at once; 503 while the model loads or compiles, and while the server ends."""
        return _health(server)

    return found


def _health(server: Server) -> Response:
    """The answer to a probe. An error has its word in `status`, too."""
    problem = server.unready()
    if problem is None:
        return Response(json_bytes({"status": "ok"}), media_type="application/json")
    body = {"status": problem.code, **openai_body(problem)}
    return Response(json_bytes(body), problem.status, problem.headers, "application/json")


def unversioned(server: Server) -> APIRouter:
    """`/ping`, `/version`, `/props`, `/slots` and `/metrics`."""
    found = new_router(tags=["status"])

    @found.get("/ping")
    async def ping() -> Response:
        """As `/health`."""
        return _health(server)

    @found.get("/version")
    async def version() -> dict[str, str]:
        """The version of rlx."""
        return {"version": rlx.__version__}

    @found.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """The default model, or that of `?model=`, and how its requests are answered that give no options."""
        return properties(server.named(model))

    @found.get("/slots")
    async def slots(request: Request) -> list[dict[str, Any]]:
        """The work in each slot of each model, without texts. With `?fail_on_no_slot=1` 503 if none is free."""
        if not server.options.slots_endpoint:
            raise _off("/slots", "--no-slots-endpoint")
        every = slots_of([each for each in server.models if each.adapter is None])
        if request.query_params.get("fail_on_no_slot") not in (None, "", "0") and all(
            each["is_processing"] for each in every
        ):
            raise ApiError(503, "no slot is free", code="no_slot")
        return every

    @found.get("/metrics", response_class=Response)
    def metrics() -> Response:  # in a worker thread: it asks the engine
        """Counters and histograms in Prometheus' text format."""
        if not server.options.metrics:
            raise _off("/metrics", "--no-metrics")
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    return found


def _off(path: str, option: str) -> ApiError:
    return ApiError(501, f"{path} is switched off", code="not_supported", hint=f"start the server without {option}")


def properties(model: ServedModel) -> dict[str, Any]:
    """The body of `/props`."""
    runner, tokenizer = model.runner, model.tokenizer
    stats = runner.stats()
    return {
        "default_generation_settings": {"n_ctx": runner.max_seq, "params": _sampling(model)},
        "total_slots": model.slots,
        "model_alias": model.name,
        "model_aliases": list(model.aliases),
        "model_path": Path(model.file.path).name,  # its folder would tell clients about the machine
        "family": runner.family,
        "n_vocab": runner.vocab_size,
        "chat_template": tokenizer.chat_template or "",
        "bos_token": _token(model, tokenizer.bos_id),
        "eos_token": _token(model, tokenizer.eos_id),
        "modalities": {"vision": runner.supports_multimodal, "audio": False},
        "build_info": f"rlx {rlx.__version__}",
        "device": runner.device,
        "target": stats["target"],
        "threads": stats["threads"],
        "precision": stats["precision"],
        "kv_dtype": stats["kv_dtype"],
        "deterministic": stats["deterministic"],
    }


def _sampling(model: ServedModel) -> dict[str, Any]:
    """The sampling options of requests that give none, also under llama-server's names."""
    params = {**sampling_settings(model.default_sample), "n_predict": model.limit(None) or -1}
    source = "server" if model.sample else "default" if model.runner.recommended_sample is None else "model"
    return {**params, "source": source}


def _token(model: ServedModel, token: int | None) -> str:
    return "" if token is None else model.tokenizer.vocabulary.tokens[token]


def slots_of(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """The body of `/slots`: of each model the active requests in order of their arrival, then the free slots."""
    try:
        every = [slot for model in models for slot in _slots(model)]
    except RlxError as error:
        raise ApiError(503, str(error), code="unavailable") from error
    return [{"id": number, **slot} for number, slot in enumerate(every)]


def _slots(model: ServedModel) -> list[dict[str, Any]]:
    """The slots of a model."""
    requests, own = model.runner.stats()["requests"], {"model": model.name, "n_ctx": model.runner.max_seq}
    free = [{"is_processing": False}] * (requests["slots"] - len(requests["active"]))
    return [{**own, **slot} for slot in (*map(_busy, requests["active"]), *free)]


def _busy(each: ActiveRequest) -> dict[str, Any]:
    """A slot that computes a request."""
    left = each.limit - each.tokens
    return {
        "is_processing": True,
        "id_task": each.number,
        "speculative": each.drafts,
        "n_prompt_tokens": each.prompt_tokens,
        "n_prompt_tokens_cache": each.cached_tokens,
        "n_prompt_tokens_processed": each.done_tokens,
        "is_paused": each.paused,
        "params": {"n_predict": each.limit},
        "next_token": {"has_next_token": left > 0, "n_remain": left, "n_decoded": each.tokens},
    }


def models_router(server: Server) -> APIRouter:
    """`GET /models` and `GET /models/NAME`."""
    found = new_router(tags=["models"])

    @cache
    def rows(models: tuple[ServedModel, ...]) -> dict[str, Any]:
        return {"object": "list", "data": [*map(described, models)], "models": [*map(listed, models)]}

    @found.get("/models")
    async def models() -> dict[str, Any]:
        """The models that are served; `models` has them in the form of Ollama, as llama-server does."""
        return rows(server.models)

    @found.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return described(server.named(name))

    return found


def described(model: ServedModel) -> dict[str, Any]:
    """A model as OpenAI's clients, llama-server's (`meta`) and vLLM's (`max_model_len`) expect it."""
    runner = model.runner
    config, (parameters, nbytes) = runner.config, model.sizes
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "rlx",
        "aliases": list(model.aliases),
        "root": model.name,
        "max_model_len": runner.max_seq,
        "meta": {
            "family": runner.family,
            "n_vocab": runner.vocab_size,
            "n_ctx": runner.max_seq,
            "n_ctx_train": config.context,
            "n_embd": config.hidden,
            "n_params": parameters,
            "size": nbytes,
            "images": runner.supports_multimodal,
        },
    }


def listed(model: ServedModel) -> dict[str, Any]:
    """A model as Ollama's clients expect it, with what it can do in llama-server's words."""
    sees = ["multimodal"] if model.runner.supports_multimodal else []
    return {**tag(model, model.name), "type": "model", "capabilities": [*model.capabilities, *sees]}
