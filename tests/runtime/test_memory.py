"""Buffers: aligned, zeroed, private, never unmapped under a view. The process's size and the machine's bandwidth."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resident import rss_bytes

from rlx import platform
from rlx.backends.cpu.launch.loop import runtime_llvm
from rlx.backends.cpu.launch.threads import RuntimeLibrary, WorkerPool
from rlx.backends.cpu.llvm import compile_module
from rlx.backends.cpu.machine import read_bandwidth
from rlx.backends.cpu.target import Target
from rlx.backends.host import HOST, HUGE_PAGE, AlignedBuffer, address
from rlx.backends.memory import Slabs
from rlx.errors import ArgumentError, BusyError, RlxError

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


def test_views_share_the_memory() -> None:
    with AlignedBuffer(4096) as buffer:
        buffer.view(np.float32, (2, 3), 64)[:] = [[1, 2, 3], [4, 5, 6]]
        assert buffer.view("<f4", [6], offset=64).tolist() == [1, 2, 3, 4, 5, 6]
        assert buffer.view(np.float32, (), 72) == 3
        assert buffer.view(np.uint8, 4096)[64:68].tobytes() == np.float32(1).tobytes()
        assert buffer.view(np.float64, (0, 7)).shape == (0, 7)


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "message"),
    [
        (np.float32, (5, 5), 0, r"\(5, 5\) of float32 at byte 0 needs 100 bytes, there are 96"),
        (np.uint8, 96, 1, "needs 97"),
        (np.uint8, 1, -1, "byte -1"),
        (np.uint8, (-1, -1), 0, r"\(-1, -1\)"),
        (np.float32, 1, 2, "not aligned"),
        (np.uint8, (2**40, 2**40), 0, "needs"),
    ],
)
def test_a_view_that_does_not_fit_is_refused(dtype: Any, shape: Any, offset: int, message: str) -> None:
    with AlignedBuffer(96) as buffer, pytest.raises(ArgumentError, match=message):
        buffer.view(dtype, shape, offset)


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


@pytest.mark.parametrize("nbytes", [2**62, 2**70])
def test_more_memory_than_there_is(nbytes: int) -> None:
    with pytest.raises(RlxError, match=r"refuses .* MiB.*shorter context"):
        AlignedBuffer(nbytes)


# ---------------------------------------------------------------------------------------------------- bandwidth


@pytest.fixture(scope="module")
def library() -> RuntimeLibrary:
    target = Target.host()
    return RuntimeLibrary(compile_module(runtime_llvm(target.triple, platform.current().waits), target).code)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_bandwidth_reads_everything(n: int, library: RuntimeLibrary) -> None:
    """It compares every worker's sum with the known one, so a result means that all bytes were read."""
    with WorkerPool(n, library) as pool:
        assert 0 < read_bandwidth(pool, seconds=0.01, nbytes=MIB + 12345) < 100_000


def test_a_kernel_that_reads_nothing_is_not_believed(library: RuntimeLibrary) -> None:
    lazy: Any = SimpleNamespace(n=1, library=library, run=lambda fn, ctx: None)
    with pytest.raises(RlxError, match="summed"):
        read_bandwidth(lazy, seconds=0.001, nbytes=MIB)


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
