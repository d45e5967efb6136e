"""A node is no array: what would need its values is an error with a name and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.errors import GraphError
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph

X = Graph("tiny").input("x", [SEQ, 32])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x: np.exp(x), r"np\.exp needs numbers.*Use rlx\.ops\.exp"),
        (lambda x: np.sinh(x), r"np\.sinh needs numbers.*Use a function of rlx\.ops"),
        (lambda x: np.maximum(x, 0), r"np\.maximum needs numbers.*Use rlx\.ops\.maximum"),
        (lambda x: np.add.reduce(x), r"np\.add needs numbers"),
        (lambda x: x > 0, "a comparison needs numbers"),
        (lambda x: x <= x, "a comparison needs numbers"),
        (lambda x: x > 1, "a comparison needs numbers"),
        (lambda x: np.float32(1) < x, "needs numbers"),
    ],
)
def test_what_needs_values_is_refused_by_name(use: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        use(X)
