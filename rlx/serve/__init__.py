"""The server: HTTP in front of the engine loops of its models.

After the public API and before the command line. A request of any API becomes the engine's `Request`, and the events
of its answer become the answer of that API:

    HTTP body -> Request -> engine loop -> events -> JSON or server-sent events

`answers.py` has the events and what writes them, `model.py` a model, `server.py` all of them, `app.py` the application;
`openai`, `responses.py`, `messages.py` and `ollama.py` are the APIs. The packages of the extra `serve` are imported by
the modules here, and by nothing outside.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlx.errors import ArgumentError
from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.serve import app as app
    from rlx.serve import batch as batch
    from rlx.serve import lifecycle as lifecycle
    from rlx.serve import server as server
    from rlx.serve import telemetry as telemetry
    from rlx.serve.app import create_app
    from rlx.serve.model import ServedModel
    from rlx.serve.options import ServerOptions

__all__ = ["ServedModel", "ServerOptions", "create_app"]

_HOMES = {
    "create_app": "rlx.serve.app",
    "ServedModel": "rlx.serve.model",
    "ServerOptions": "rlx.serve.options",
    **{name: f"rlx.serve.{name}" for name in ("app", "batch", "lifecycle", "server", "telemetry")},
}
_named = names_of("rlx.serve", _HOMES)
_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "llguidance")


def __getattr__(name: str) -> Any:
    if name == "create_app":
        check_installed()
    return _named(name)


def check_installed() -> None:
    """Raises an `ArgumentError` if a package of the extra `serve` is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        what = f"the server needs the package {missing[0].replace('_', '-')}, which is not installed"
        raise ArgumentError(what, where="serve", hint='`pip install "rlx[serve]"`')
