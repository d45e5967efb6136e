"""A set of live objects: what somebody refers to is in it, and threads may add while others look."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from rlx.engine.kv.live_set import LiveSet

pytestmark = pytest.mark.any_machine


class Thing:
    pass


def test_what_nobody_refers_to_is_gone() -> None:
    kept, found = [Thing(), Thing()], LiveSet[Thing]()
    found.add(kept[0])
    found.add(kept[1])
    found.add(Thing())
    gc.collect()
    assert set(found) == set(kept)
    found.add(kept[0])
    found.discard(kept[1])
    found.discard(Thing())
    assert list(found) == kept[:1]


def test_threads_add_while_others_look() -> None:
    found, ended, kept = LiveSet[Thing](), threading.Event(), [Thing() for _ in range(300)]

    def change() -> None:
        while not ended.is_set():
            for each in kept:
                found.add(each)
            for each in kept:
                found.discard(each)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3000):
            sum(1 for _ in found)
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
