"""Packages whose names are imported when they are first used, so that who needs one of them loads no other."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # what `typing` would say; to import it costs more than all else here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any


def modules_of(package: str, names: Iterable[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has these modules."""
    return names_of(package, {name: f"{package}.{name}" for name in names})


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        homes: the module that has each name; a name that ends its module's own name is the module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        return module if homes[name].endswith(f".{name}") else getattr(module, name)

    return get
