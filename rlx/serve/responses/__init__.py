"""OpenAI's Responses API over the neutral form of requests, without a store."""

from rlx.serve.responses.routes import router

__all__ = ["router"]
