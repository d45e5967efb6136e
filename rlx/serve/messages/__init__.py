"""Anthropic's Messages API over the neutral form of requests."""

from rlx.serve.messages.routes import router

__all__ = ["router"]
