"""Which of this CPU's instructions the code for a target uses, and why it leaves the others out.

CPU backend, beside `target.py`; for `rlx doctor`. Only the features that change how fast a model runs are listed:
vector, dot product and matrix instructions.
"""

from __future__ import annotations

import re

from rlx import env
from rlx.backends.cpu.levels import TILES, architecture
from rlx.backends.cpu.target import Target
from rlx.backends.device import FeatureUse

#: LLVM names of vector, dot product and matrix instructions.
_COMPUTES = re.compile(r"(avx|amx|fma$|f16c|sve|sme|neon|dotprod|i8mm|bf16|fullfp16|fp16|vnni)")


def feature_use(target: Target, host: frozenset[str], name: str | None = None) -> FeatureUse:
    """The features of a CPU with `host` that a target uses.

    Args:
        name: how the target was chosen, such as "avx512-vnni"; by default RLX_TARGET, or "native".
    """
    chosen = name or env.target() or "native"
    used = {flag[1:] for flag in target.features.split(",") if flag.startswith("+")}
    known = frozenset[str]().union(*(level.usable for level in architecture(target.triple).levels))
    unused = {f: _reason(f, target, host, chosen) for f in sorted(host - used) if _COMPUTES.match(f)}
    lacking = sorted(f for f in known - host if _COMPUTES.match(f))
    return FeatureUse(tuple(sorted(f for f in used if _COMPUTES.match(f))), unused, tuple(lacking))


def _reason(feature: str, target: Target, host: frozenset[str], name: str) -> str:
    """Why the code for a target does not use a feature that the CPU has."""
    table = architecture(target.triple)
    levels = [level for level in table.levels if feature in level.usable]
    if any(feature in table.features(word) for word in re.findall(r"-([^-+]+)", name)):
        return f"left out by {name}"
    if not levels:
        return "no kernel of rlx uses it"
    widest = table.supported(host)[-1]
    narrower = table.levels[: table.levels.index(widest) + 1]
    if feature in TILES and widest.name == "amx" and name.split("-")[0] in ("native", "amx"):
        return "the operating system does not permit tile registers to this process"
    if feature == "avx512bf16" and host >= TILES and target.level in [level.name for level in levels]:
        return "on CPUs with tiles its dot products run at half the rate of f32"
    if not set(levels) & set(narrower):
        missing = ", ".join(sorted(levels[0].required - host))
        return f"used at level {levels[0].name}, for which this CPU lacks {missing}"
    return f"used from level {levels[0].name} on; the target {name} is of level {target.level}"
