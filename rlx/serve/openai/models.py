"""/v1/models: the models that are served. Server stage, one of OpenAI's paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from rlx.serve.http import new_router
from rlx.serve.model import ServedModel
from rlx.serve.ollama.describe import tag

if TYPE_CHECKING:
    from rlx.serve.app import Server


def router(server: Server) -> APIRouter:
    """`GET /models` and `GET /models/NAME`."""
    found = new_router(tags=["models"])

    @found.get("/models")
    async def models() -> dict[str, Any]:
        """The models that are served; `models` has them in the form of Ollama, as llama-server does."""
        data = [described(model) for model in server.models]
        return {"object": "list", "data": data, "models": [listed(model) for model in server.models]}

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
