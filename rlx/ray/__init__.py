"""Beyond one machine, on Ray: the server as a Ray Serve application, generation and vectors over Ray datasets.

After the server, which it runs on every node. The package `ray` is imported by the modules here and by nothing outside;
the extra `ray` installs it.

    ray.serve.run(rlx.ray.deployment("model.gguf", num_cpus=16, replicas=4))
    rlx.ray.generate(dataset, "model.gguf", max_tokens=100).write_parquet("answers")
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlx.errors import ArgumentError
from rlx.lazy import names_of
from rlx.serve import check_installed as check_server

if TYPE_CHECKING:
    from rlx.ray import batch as batch
    from rlx.ray import serving as serving
    from rlx.ray.data import embed, generate
    from rlx.ray.serving import deployment

__all__ = ["deployment", "embed", "generate"]

_HOMES = {
    "deployment": "rlx.ray.serving",
    **dict.fromkeys(("embed", "generate"), "rlx.ray.data"),
    **{name: f"rlx.ray.{name}" for name in ("batch", "serving")},
}
_named = names_of("rlx.ray", _HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        check_installed()
    return _named(name)


def check_installed() -> None:
    """Raises an `ArgumentError` if the extra `ray` is missing."""
    check_server()
    if find_spec("ray") is None:
        what = "the package ray is not installed"
        raise ArgumentError(what, where="rlx.ray", hint='`pip install "rlx[ray]"`')
