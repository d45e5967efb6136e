"""What every test shares: the fixture files, a compile cache of the run's own, and the hypothesis profile."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import golden_folder
import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"

# Times on a shared machine say nothing, so there are no deadlines; CI draws the same examples every time.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Point the compile cache at a fresh folder: shared by the workers of a run, never the user's own. Another one is
    for the unpacked checkpoints.
    """
    if not hasattr(config, "workerinput"):  # the controller; xdist's workers inherit its environment
        os.environ["RLX_CACHE_DIR"] = tempfile.mkdtemp(prefix="rlx-tests-")
        os.environ[golden_folder.ENV] = tempfile.mkdtemp(prefix="rlx-goldens-")
        # Ignored where a shell runs pytest in the background, and then by the processes that tests interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["RLX_CACHE_DIR"], ignore_errors=True)
        shutil.rmtree(os.environ[golden_folder.ENV], ignore_errors=True)


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
