"""/completion: llama-server's own path for completions. Server stage, beside OpenAI's.

The fields are those of `/v1/completions`. The answer has llama-server's form. By default there is no limit of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from rlx.serve.errors import invalid
from rlx.serve.http import new_router
from rlx.serve.openai.bodies import CompletionBody
from rlx.serve.openai.common import Call, json_response
from rlx.serve.openai.completions import specs_of
from rlx.serve.openai.native_output import NativeChunks
from rlx.serve.openai.structured import named_grammar
from rlx.serve.pieces import stream_of
from rlx.serve.streaming import Stream, while_connected

if TYPE_CHECKING:
    from rlx.serve.app import Server


def router(server: Server) -> APIRouter:
    """`POST /completion`."""
    found = new_router(tags=["completions"])

    @found.post("/completion")
    async def completion(body: CompletionBody, request: Request) -> Response:
        """The continuation of texts, in llama-server's form."""
        for name in ("echo", "best_of", "stream_options", "suffix"):
            if getattr(body, name):
                raise invalid(name, "this path does not have it", "use /v1/completions")
        model = server.named(body.model)
        call = Call(server, request, body, model, "cmpl", "completion")
        specs = await specs_of(call, body, default=None)
        chunks = NativeChunks(call, body, specs)
        with named_grammar(body):
            if body.stream:
                return Stream(stream_of(await model.generate(*specs), chunks, call.ping_seconds))
            answer = await while_connected(request, model.collect(*specs))
        each = [chunks.selected(chunks.whole(choice, answer.timings)) for choice in answer.choices]
        return json_response(each[0] if len(each) == 1 else each)

    return found
