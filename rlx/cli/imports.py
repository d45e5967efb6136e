"""RLX_IMPORT: Python code that runs before a command, such as definitions of custom ops."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rlx.errors import ArgumentError, RlxError

_WHERE = "RLX_IMPORT"


def import_all(names: Sequence[str]) -> None:
    """Imports files (`ops.py`, `folder/ops.py`) and installed modules (`package.ops`).

    Raises:
        ArgumentError: one is not there, or raises an error.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).expanduser())
            else:
                import_module(name)
        except RlxError:
            raise
        except Exception as error:  # whatever the user's code raises
            hint = "Name files that end in .py, or modules that Python finds."
            raise ArgumentError(f"{name}: {type(error).__name__}: {error}", where=_WHERE, hint=hint) from error


def _import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # its functions are found by the module's name
    spec.loader.exec_module(module)
