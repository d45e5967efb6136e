"""Entries of other machines under this machine's keys, as a shared or copied cache folder may hold them: a warning and
a recompile, or a named error where the cache is read-only; never an instruction of another machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.target import Target
from rlx.store.cache import CompileCache
from rlx.store.kinds import CacheWarning
from rlx.store.store import Store

#: Headers of object files: 64 bytes are enough for a look at the machine.
HEADERS = {
    "aarch64": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x01\x00" + (183).to_bytes(2, "little") + bytes(44),
    "s390x": b"\x7fELF\x02\x02\x01" + bytes(9) + b"\x00\x01" + (22).to_bytes(2, "big") + bytes(44),
    "x86_64 of 32 bits": b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x01\x00" + (62).to_bytes(2, "little") + bytes(44),
    "ELF machine 8": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x01\x00" + (8).to_bytes(2, "little") + bytes(44),
    "Mach-O CPU 0x7": b"\xcf\xfa\xed\xfe" + (7).to_bytes(4, "little") + bytes(24),
}
pytestmark = [
    pytest.mark.skipif(Target.host().triple.split("-")[0] != "x86_64", reason="plants code for others"),
    pytest.mark.any_machine,
]


def graph() -> rlx.Graph:
    made = rlx.Graph("small")
    made.output("y", rlx.ops.silu(made.input("x", [rlx.SEQ, 32])))
    return made


def result(store: Store, policy: str = "on") -> np.ndarray:
    with rlx.compile(graph(), cache=CompileCache(8, store, policy)) as exe:
        return exe(x=np.ones((3, 32), np.float32))["y"]


def plant(store: Store, code: bytes) -> int:
    """Puts other code into all entries, with right checksums; returns how many there are."""
    for key in store.stored_keys():
        entry = store.open(key.digest)
        files = {name: code if name.endswith(".o") else entry.read(name) for name in entry.names}
        store.put(key, files, replace=True)
    return len(store.stored_keys())


@pytest.mark.parametrize("name", HEADERS)
def test_code_of_another_machine_is_compiled_again(name: str, tmp_path: Path) -> None:
    expected = result(store := Store(tmp_path))
    count = plant(store, HEADERS[name])
    with pytest.warns(CacheWarning, match=f"it holds code for {name}.*this machine is x86_64"):
        assert np.array_equal(result(again := Store(tmp_path)), expected)
    assert again.damaged == count == len(again.stored_keys()) and again.verify() == []
    assert np.array_equal(result(Store(tmp_path)), expected), "what was compiled again is found, without a warning"


@pytest.mark.parametrize("code", [b"", b"\x7fELF", b"#!/bin/sh\n" * 10])
def test_what_is_no_code_is_compiled_again(code: bytes, tmp_path: Path) -> None:
    expected = result(store := Store(tmp_path))
    plant(store, code)
    with pytest.warns(CacheWarning, match="it holds no object code"):
        assert np.array_equal(result(Store(tmp_path)), expected)


@pytest.mark.parametrize("field", ["features", "triple", "level"])
def test_a_recorded_target_that_was_changed_is_damage(field: str, tmp_path: Path) -> None:
    """The target is a part of the key, and the key's digest is the name of the entry."""
    expected = result(Store(tmp_path))
    for path in tmp_path.glob("??/*/key.json"):
        key = json.loads(path.read_text())
        key["target"][field] = "+avx999" if field == "features" else "other"
        path.write_text(json.dumps(key, indent=1, sort_keys=True) + "\n")
    with pytest.warns(CacheWarning, match="is damaged and not used"):
        assert np.array_equal(result(Store(tmp_path)), expected)
