"""Descriptions of the models in Ollama's words: `/api/tags`, `/api/show`, `/api/ps` and `/api/version`.

Server stage. Clients choose by what is listed here: a model that is said to call tools is given some.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response

import rlx
from rlx.serve.http import OpenRoute
from rlx.serve.model import ServedModel
from rlx.serve.ollama.requests import ShowBody
from rlx.serve.ollama.routes import named

if TYPE_CHECKING:
    from rlx.serve.server import Server

JsonObject = dict[str, Any]

VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients ask for it, and some refuse older ones."""
_NEVER = "9999-12-31T23:59:59Z"


def router(server: Server) -> APIRouter:
    """The paths that describe the server and its models."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def alive() -> Response:
        """That there is a server, where it has no page."""
        return Response("rlx is running", media_type="text/plain")

    @found.get("/api/version")
    async def version() -> JsonObject:
        """The version of Ollama's API."""
        return {"version": VERSION, "rlx": rlx.__version__}

    @found.get("/api/tags")
    async def tags() -> JsonObject:
        """The models that are served, each under all of its names."""
        return {"models": [tag(model, name) for model in server.models for name in model.names]}

    @found.get("/api/ps")
    async def running() -> JsonObject:
        """The models that are served: they stay in memory."""
        return {"models": [_running(model) for model in server.models]}

    @found.post("/api/show")
    async def show(body: ShowBody) -> JsonObject:
        """What the model is and can do."""
        return shown(named(server, body))

    return found


def shown(model: ServedModel) -> JsonObject:
    """The description of a model: what it is and can do."""
    sample = model.default_sample
    parameters = {name: getattr(sample, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "license": "",
        "modelfile": f"# {model.name}, served by rlx {rlx.__version__}",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": model.tokenizer.chat_template or "",
        "details": details(model),
        "model_info": _info(model),
        "capabilities": list(model.capabilities),
        "modified_at": _time(model),
    }


def details(model: ServedModel) -> JsonObject:
    """The kind of a model's weights."""
    facts = model.facts
    return {
        "parent_model": "",
        "format": facts.format,
        "family": model.runner.config.arch,
        "families": [model.runner.config.arch],
        "parameter_size": _count(facts.parameters),
        "quantization_level": facts.quantization,
    }


def tag(model: ServedModel, name: str) -> JsonObject:
    """A model in a list, under one of its names."""
    return {
        "name": name,
        "model": name,
        "modified_at": _time(model),
        "size": model.facts.nbytes,
        "digest": hashlib.sha256(f"{model.facts.path}:{model.facts.nbytes}".encode()).hexdigest(),
        "details": details(model),
    }


def _running(model: ServedModel) -> JsonObject:
    """A model in memory."""
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": model.runner.max_seq}
    return {**tag(model, model.name), **more}


def _info(model: ServedModel) -> JsonObject:
    """Sizes, under the keys of GGUF files."""
    config, arch = model.runner.config, model.runner.config.arch
    return {
        "general.architecture": arch,
        "general.basename": model.name,
        "general.parameter_count": model.facts.parameters,
        f"{arch}.block_count": len(config.each),
        f"{arch}.context_length": model.runner.max_seq,
        f"{arch}.embedding_length": config.hidden,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.vocab_size": config.vocab_size,
    }


def _time(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")


def _count(parameters: int) -> str:
    """A number of parameters as names of models have it, such as 4.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
