"""Numbers of workers: what is asked for, what is used, and what is said about it."""

from __future__ import annotations

import pytest

from rlx.compiler import limits
from rlx.compiler.limits import MAX_PER_CPU, ThreadsWarning, worker_count
from rlx.errors import ResourceError, named_refusals


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_THREADS", raising=False)
    monkeypatch.setattr(limits, "usable_cpus", lambda: 2.5)
    monkeypatch.setattr(limits, "cpu_count", lambda: 2)


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
