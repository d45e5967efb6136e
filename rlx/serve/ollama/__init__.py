"""Ollama's API over the neutral form of requests."""

from rlx.serve.ollama.routes import ROUTERS

__all__ = ["ROUTERS"]
