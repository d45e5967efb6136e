"""A few requests that are generated from the OpenAPI document, the same ones each time: `fuzz_api.py` sends more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz_api import sent


def test_answers_are_as_the_document_says(server: Any, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    options = ("--phases", "fuzzing", "--generation-deterministic", "--no-shrink", "--continue-on-failure")
    found = sent(server.url, tmp_path, 2, *options)
    assert found.returncode == 0, found.stdout
    assert server.http.get("/health").status_code == 200
