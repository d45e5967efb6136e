"""Buffers: aligned, zeroed, private, never unmapped under a view. The process's size and its workers."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resident import rss_bytes

from rlx.backends.host import HOST, HUGE_PAGE, AlignedBuffer, address
from rlx.backends.memory import Slabs
from rlx.compiler import compile as compiling
from rlx.compiler.compile import MAX_PER_CPU, ThreadsWarning, worker_count
from rlx.errors import BusyError, ResourceError, named_refusals

MIB = 1 << 20


@given(nbytes=st.integers(0, 3 * HUGE_PAGE), huge=st.booleans())
def test_a_buffer_is_aligned_and_zeroed(nbytes: int, huge: bool) -> None:
    with AlignedBuffer(nbytes, huge) as buffer:
        assert buffer.address % (HUGE_PAGE if buffer.huge else 4096) == 0
        assert buffer.huge == (huge and nbytes >= HUGE_PAGE)
        view = buffer.view(np.uint8, nbytes)
        assert view.size == nbytes
        assert not view.any()
        if nbytes:
            assert view.ctypes.data == buffer.address


def test_a_closed_buffer_gives_no_view_and_takes_none_away() -> None:
    buffer = AlignedBuffer(MIB)
    view = buffer.view(np.uint8, MIB)
    view[:] = 7
    buffer.close()
    buffer.close()
    assert view.sum() == 7 * MIB
    with pytest.raises(BusyError, match="closed"):
        buffer.view(np.uint8, 1)


def test_closing_gives_the_memory_back() -> None:
    buffer = AlignedBuffer(64 * MIB, huge=True)
    before = rss_bytes()
    buffer.view(np.uint8, 64 * MIB).fill(1)
    assert rss_bytes() - before > 60 * MIB
    buffer.close()
    assert rss_bytes() - before < 4 * MIB


def test_a_forked_child_writes_into_a_copy() -> None:
    with AlignedBuffer(4096) as buffer:
        view = buffer.view(np.uint8, 4096)
        child = os.fork()
        if not child:
            view[:] = 1
            os._exit(0)
        os.waitpid(child, 0)
        assert not view.any()


# ---------------------------------------------------------------------------------------------------- bandwidth


@given(sizes=st.lists(st.integers(0, 70 * MIB), max_size=12))
def test_blocks_of_slabs_are_zeroed_lie_apart_and_share_huge_pages(sizes: list[int]) -> None:
    slabs = Slabs(HOST)
    blocks = [slabs.take(size) for size in sizes]
    ends = 0
    for block in sorted(blocks, key=address):
        assert block.block.huge and address(block) % 4096 == 0 and address(block) >= ends
        ends = address(block) + block.nbytes
        view = HOST.host_view(block)
        assert view.ctypes.data == address(block) or not view.size
        view[:1] = view[-1:] = 1  # within the buffer
    assert all(int(block.read()[1:2].sum()) == 0 for block in blocks if block.nbytes > 3)
    slabs.close()


# ----------------------------------------------------------------------------------------------- numbers of workers


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_THREADS", raising=False)
    monkeypatch.setattr(compiling, "usable_cpus", lambda: 2.5)
    monkeypatch.setattr(compiling, "cpu_count", lambda: 2)


def test_more_is_a_warning_and_far_more_is_cut() -> None:
    with pytest.warns(ThreadsWarning, match="^3 threads are slower than 2, because this process may use 2 CPUs$"):
        assert worker_count(3) == 3
    with pytest.warns(ThreadsWarning, match=r"1024 threads .* 2 CPUs; 16 are used$"):
        assert worker_count(1024) == 2 * MAX_PER_CPU == 16


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError(), "there is not enough memory. Use a smaller model"),
        (OSError(28, "No space left"), "the disk is full. Make room"),
        (OSError(24, "Too many open files", "some.file"), "some.file: this process may open no more files.*ulimit -n"),
        (RuntimeError("can't start new thread"), "starts no more threads. Use fewer threads .RLX_THREADS."),
    ],
)
def test_what_the_system_refuses_gets_a_name(error: Exception, what: str) -> None:
    with pytest.raises(ResourceError, match=what) as caught, named_refusals():
        raise error
    assert caught.value.__cause__ is error
