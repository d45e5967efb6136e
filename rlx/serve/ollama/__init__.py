"""Ollama's API over the neutral form of requests, for the one model that is served."""

from rlx.serve.ollama import describe, embed, routes

ROUTERS = (routes.router, describe.router, embed.router)

__all__ = ["ROUTERS"]
