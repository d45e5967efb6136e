"""How large the pools of caches are of models that share a machine. Runners stage, before they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.engine.kv.pool_memory import Sizes
from rlx.engine.kv.pool_size import pool_bytes
from rlx.passes.layout import weight_bytes, weight_table

if TYPE_CHECKING:
    from rlx.engine.opening.setup import Plan


def pools_of(plans: Sequence[Plan]) -> list[int]:
    """The size in bytes of the pool of each model, none of which is loaded yet: what its options say, or its share."""
    weights = sum(
        weight_bytes(weight_table(plan.graph, plan.setup.target.capabilities.layouts).values()) for plan in plans
    )
    return [_pool(plan, weights, len(plans)) for plan in plans]


def _pool(plan: Plan, weights: int, pools: int) -> int:
    setup = plan.setup
    sizes = Sizes.of(plan.graph, setup.max_seq, setup.profile.buckets[-1])
    return pool_bytes(setup.kv_bytes, sizes, setup.max_seq, weights, pools)
