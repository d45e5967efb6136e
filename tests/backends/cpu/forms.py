"""Loop kernels in all their forms: plain Python, and machine code for every level of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from levels import LEVELS, name
from native import Array, run

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.loops import python_form
from rlx.backends.cpu.target import Target

Form = Target | None

forms = pytest.mark.parametrize("form", [None, *LEVELS], ids=["python", *map(name, LEVELS)])
compiled = pytest.mark.parametrize("form", LEVELS, ids=name)


def in_turn(cases: Sequence[Any], forms: Sequence[Form] = LEVELS) -> Any:
    """Parameters `form` and `case`: each case in one form, in turn. For what does not depend on the form."""
    pairs = [(forms[i % len(forms)], case) for i, case in enumerate(cases)]
    return pytest.mark.parametrize(("form", "case"), pairs, ids=_label)


def _label(value: Any) -> str:
    return name(value) if isinstance(value, Target) else "python" if value is None else str(value)


def call(form: Form, kernel: Kernel, *arrays: Array, begin: int = 0, end: int, **extents: int) -> None:
    """Runs the units [begin, end) of a kernel on C-contiguous arrays."""
    if form is not None:
        run(kernel, form, *arrays, begin=begin, end=end, **extents)
        return
    flat = [_flat(a) for a in arrays]
    with np.errstate(all="ignore"):  # integers wrap, quotients may be NaN
        python_form(kernel)(*flat, *(extents[e] for e in kernel.extents), begin, end)


def _flat(array: Array) -> Array:
    flat: Any = array.reshape(-1)
    assert np.shares_memory(flat, array) or not array.size
    return flat.view(np.uint16) if array.dtype == np.float16 else flat


def assert_any_split(form: Form, kernel: Kernel, inputs: list[Array], out: Array, *, end: int, **extents: int) -> None:
    """Units done one by one, backwards, give the bytes that one call gives."""
    out.view(np.uint8)[...] = 0xA5
    call(form, kernel, *inputs, out, end=end, **extents)
    whole = out.tobytes()
    out.view(np.uint8)[...] = 0xA5
    for unit in reversed(range(end)):
        call(form, kernel, *inputs, out, begin=unit, end=unit + 1, **extents)
    assert out.tobytes() == whole
