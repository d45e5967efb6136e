"""What tests of compiled graphs share."""

from __future__ import annotations

import pytest

from rlx.store.cache import CompileCache


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    """The programs of a file's tests; nothing is stored on disk."""
    return CompileCache(capacity=512, policy="off")
