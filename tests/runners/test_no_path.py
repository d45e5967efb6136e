"""What is no path of a model is an error with a name."""

from __future__ import annotations

from typing import Any

import pytest

import rlx
from rlx.errors import ArgumentError


@pytest.mark.parametrize("path", [5, True, b"demo", ["demo"], 1.5, object()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"model: expected a path or a name, found .*Give a \.gguf file"):
        rlx.auto_runner(path)
