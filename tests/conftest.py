"""What every test shares: the fixture files, a compile cache of the run's own, and the hypothesis profile."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import golden_folder
import pytest
import representative
import systems
import targets
from browser import chromium, lend_thread
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"
MODULES = "RLX_TEST_MODULES"  # the folder of compiled LLVM modules, for the workers of a run

# Times on a shared machine say nothing, so there are no deadlines; CI draws the same examples every time.
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", settings.get_profile("all"), max_examples=30)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every case of each test (tests/representative.py)")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    targets.mark(items, every=config.getoption("--all-cases"))  # before pytest selects by marks
    yield
    if not config.getoption("--all-cases"):
        items[:], left_out = representative.split(items)
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    """Point the compile cache at a fresh folder: shared by the workers of a run, never the user's own. Another one is
    for the unpacked checkpoints. `RLX_TARGET=avx512-vnni-bf16` runs the tests as a machine of that target would, and
    `RLX_TEST_DEVICE=cuda` runs on the card what names no device.
    """
    if config.getoption("--all-cases"):
        settings.load_profile("all")
    if os.environ.get("RLX_TARGET"):
        pretend_to_be(os.environ["RLX_TARGET"])
    if os.environ.get("RLX_TEST_DEVICE"):
        prefer(os.environ["RLX_TEST_DEVICE"])
    if not hasattr(config, "workerinput"):  # the controller; xdist's workers inherit its environment
        os.environ["RLX_COMPILE_AHEAD"] = "0"  # what a test does not use is not compiled for it
        os.environ["RLX_CACHE_DIR"] = tempfile.mkdtemp(prefix="rlx-tests-")
        os.environ[golden_folder.ENV] = tempfile.mkdtemp(prefix="rlx-goldens-")
        # Ignored where a shell runs pytest in the background, and then by the processes that tests interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ[MODULES] = module_folder(config)
    if os.environ[MODULES]:
        import compiled_modules

        compiled_modules.keep_in(Path(os.environ[MODULES]))
    if os.environ.get("RLX_TEST_LLVM"):
        import outside_llvm

        outside_llvm.use()


def module_folder(config: pytest.Config) -> str:
    """Where this run and the next ones keep what LLVM compiled: in pytest's own cache. `--cache-clear` empties it."""
    kept: pytest.Cache | None = getattr(config, "cache", None)
    if kept is None:
        return ""
    import compiled_modules

    compiled_modules.remove_old(kept.mkdir("modules"))
    return str(kept.mkdir("modules"))


def pretend_to_be(name: str) -> None:
    """From now on this machine has what the target has, and no level above it."""
    from rlx.backends.cpu import target as targets

    triple, features = targets._host()
    target = targets.Target.host(name)
    had = frozenset(f for f in features if target.has(f))
    targets._host = wraps(targets._host)(lambda: (triple, had))


def prefer(device: str) -> None:
    """From now on this device is the default."""
    from rlx import backends

    first = {backends.checked_device(device): backends.MODULES.pop(device)}
    others = dict(backends.MODULES)
    backends.MODULES.clear()
    backends.MODULES.update(first | others)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says for which target the tests ran, and which they were."""
    done = [report.nodeid for report in terminalreporter.getreports("passed") if report.when == "call"]
    if done:
        terminalreporter.write_line(targets.summary(done))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["RLX_CACHE_DIR"], ignore_errors=True)
        shutil.rmtree(os.environ[golden_folder.ENV], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs of the operating system what this one lacks; readies the thread for one with a page."""
    for need in (need for mark in item.iter_markers("system") for need in mark.args):
        if not systems.has(need):
            pytest.skip(systems.REASONS[need])
    lend_thread(to_browser="browser" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded stays: the collector need not look at it again and again, now and while kernels are written."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


@pytest.fixture(scope="session")
def data() -> Path:
    """tests/data."""
    return DATA


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Tiny checkpoints with expected logits, one folder a family (see tests/data/README.md)."""
    return golden_folder.goldens()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The embedded demo model's GGUF file."""
    from rlx import demo

    return demo.path()


@pytest.fixture
def own_custom_ops() -> Iterator[None]:
    """A test begins without custom ops, and its own are gone after it."""
    from rlx.ir import custom, op_table

    rows, known = dict(op_table.OPS), dict(custom.CUSTOM)
    custom.CUSTOM.clear()
    yield
    for table, before in ((op_table.OPS, rows), (custom.CUSTOM, known)):
        table.clear()
        table.update(before)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; a test that needs it is skipped where it or Playwright is missing."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def small_budget() -> Iterator[None]:
    """Grammars have a fifth of a second: what is hostile in a test is so on a quick processor, too."""
    from rlx.grammar import trial
    from rlx.text.confined import Confined

    program = str(Path(trial.__file__).with_name("trial_main.py"))
    child = Confined(
        program, memory=trial._MEMORY, stack=trial._STACK, cpu_seconds=0.2, wall_seconds=trial.WALL_SECONDS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_CHILD", child)
        trial._tried.cache_clear()
        yield
    trial._tried.cache_clear()
