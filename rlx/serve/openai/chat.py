"""/v1/chat/completions. Server stage, one of OpenAI's paths."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from rlx.serve.generation import GenerationSpec
from rlx.serve.http import new_router
from rlx.serve.streaming import json_bytes, while_connected

if TYPE_CHECKING:
    from rlx.serve.app import Server


class ChatBody(BaseModel):
    """The body of a chat request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int | None = None


def router(server: Server) -> APIRouter:
    """`POST /chat/completions`."""
    found = new_router(tags=["chat"])

    @found.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        model = server.named(body.model)
        prompt = await model.chat_prompt(body.messages)
        spec = GenerationSpec(prompt.context, body.max_tokens, model.default_sample)
        answer = await while_connected(request, model.collect(spec))
        usage = answer.usage
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "finish_reason": choice.finish_reason,
                "logprobs": None,
            }
            for choice in answer.choices
        ]
        found = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        return Response(json_bytes(found), media_type="application/json")

    return found
