"""Compile profiles: what a user may choose about a compile, as a TOML file, a table or an object. See docs/profiles.md.

keys.py             the table of keys: type, range, default, meaning
read.py             a file or table -> checked choices
compile_profile.py  `CompileProfile`: the choices, complete, for prefill and for decode
write.py            the way back, with a comment a key
"""

from rlx.profile.compile_profile import CompileProfile, PhaseProfile, ProfileLike
from rlx.profile.keys import FAMILIES

__all__ = ["FAMILIES", "CompileProfile", "PhaseProfile", "ProfileLike"]
