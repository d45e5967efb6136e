"""Random profiles."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rlx.passes.options import FUSIONS, PASSES
from rlx.profile import FAMILIES, CompileProfile, PhaseProfile
from rlx.profile.keys import KEYS, MAX_ROWS
from rlx.profile.option import Option, profile_options


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
        buckets,
        choice("backend.cpu.level"),
        choice("cache.policy"),
        st.none() | st.integers(1, 1000),
        **{name: st.none() | values(option) for name, option in profile_options().items()},
    )


def values(option: Option) -> st.SearchStrategy[Any]:
    """Values of an option that a profile can set; of one with a parser no value is known."""
    if option.choices:
        return st.sampled_from(option.choices)
    if option.kind is bool:
        return st.booleans()
    if option.kind in (int, float) and option.parse is None:
        low = int(option.low or 0)
        return st.integers(low, int(option.high or low + 1000))
    return st.none()
