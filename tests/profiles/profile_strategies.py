"""Random profiles."""

from __future__ import annotations

from hypothesis import strategies as st

from rlx.passes.options import FUSIONS, PASSES
from rlx.profile import FAMILIES, CompileProfile, PhaseProfile
from rlx.profile.keys import KEYS, MAX_ROWS


def _some(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.sets(st.sampled_from(names)).map(lambda chosen: tuple(name for name in names if name in chosen))


def phases() -> st.SearchStrategy[PhaseProfile]:
    precision = st.none() | st.sampled_from(["auto", "exact"])
    return st.builds(PhaseProfile, precision, st.booleans(), st.booleans(), _some(FUSIONS), _some(PASSES))


def profiles() -> st.SearchStrategy[CompileProfile]:
    def choice(path: str) -> st.SearchStrategy[str | None]:
        return st.none() | st.sampled_from(KEYS[path].choices)

    buckets = st.sets(st.integers(2, MAX_ROWS), min_size=1, max_size=4).map(lambda ends: (1, *sorted(ends)))
    return st.builds(
        CompileProfile,
        phases(),
        phases(),
        st.none() | st.sampled_from(FAMILIES),
        choice("precision.kv_dtype"),
        buckets,
        choice("backend.cpu.level"),
        st.none() | st.integers(1, 1024),
        choice("cache.policy"),
        st.none() | st.integers(1, 1000),
    )
