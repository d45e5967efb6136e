"""The code that chooses tokens on the card: the kernels of `kernels/choose.py` as modules."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlx.backends.cuda import ptx
from rlx.backends.cuda.agreed.choice import EXTENTS, POINTERS
from rlx.backends.cuda.code import Code, Kernel, kernel_of
from rlx.backends.cuda.entry import entry
from rlx.backends.cuda.features import Features
from rlx.backends.cuda.kernels.choose import kernels
from rlx.backends.cuda.target import Target
from rlx.backends.device import Files


def made(features: Features) -> dict[str, Kernel]:
    """The kernels by name, in order."""
    found = {}
    for name, emit in kernels().items():
        code = Code(f"{name}_row", dict.fromkeys(POINTERS), EXTENTS, features)
        emit(code)
        found[name] = kernel_of(code)
    return found


def modules_of(each: dict[str, Kernel], features: Features) -> dict[str, str]:
    """LLVM assembly of the kernels."""
    return {name: entry(name, [kernel], features) for name, kernel in each.items()}


def files(target: Target, link: Callable[[str], bytes]) -> Files:
    """What the compile cache keeps; shared.json has the bytes of shared memory of each kernel, in order."""
    kernels = made(target.features)
    modules = modules_of(kernels, target.features)
    found = ptx.compiled([*modules.values()], target.level, target.ptx)
    texts = dict(zip(modules, found, strict=True))
    return {
        **{f"{name}.ll": text for name, text in modules.items()},
        **{f"{name}.ptx": text for name, text in texts.items()},
        **{f"{name}.cubin": link(text) for name, text in texts.items()},
        "shared.json": json.dumps({name: kernel.shared for name, kernel in kernels.items()}),
    }
