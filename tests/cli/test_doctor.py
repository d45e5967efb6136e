"""`rlx doctor`: what it says is what the system says, and broken things become problems, not tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlx.backends.cpu.target import Target, feature_use
from rlx.cli import doctor as examination
from rlx.cli.doctor import Findings, lines
from rlx.cli.main import cli
from rlx.errors import TargetError

AVX512 = frozenset({"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"})
TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16", "avx512bf16"})


def target(level: str, *features: str) -> Target:
    return Target(level, "x86_64-linux-gnu", "", ",".join(f"+{f}" for f in features))


def whats(found: Findings) -> list[str]:
    return [problem.what for problem in found.problems]


# -- the whole command ------------------------------------------


def test_a_sound_machine_can_run_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_API_KEY", "a-secret-of-mine")
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["can_run"] and not any(problem["prevents"] for problem in facts["problems"])
    assert facts["packages"]["numpy"] == metadata.version("numpy")
    assert facts["trial"]["error_of_result"] < 1e-4
    assert facts["trial"]["read_gb_per_s"] > 0 and facts["trial"]["peak_gop_per_s"]["f32"] > 0
    assert facts["environment"]["RLX_API_KEY"] == "(hidden)" and "a-secret-of-mine" not in result.output


def test_without_llvmlite_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite" / "__init__.py").write_text("raise ImportError('it is broken')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rlx", "doctor", "--no-measure"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "cpu: ImportError: it is broken" in done.stdout
    assert "pip install --force-reinstall rlx" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("models cannot run: ")


# -- environment ------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "what", "prevents"),
    [
        ("RLX_THREADS", "many", "'many' is not a number", True),
        ("RLX_CACHE", "maybe", "'maybe' is no cache policy", True),
        ("RLX_CACHE_LIMIT", "-3", "is not a size", True),
        ("RLX_VERIFY", "1", "many times slower", False),
        ("RLX_THREDS", "2", "has no effect", False),
    ],
)
def test_variables_are_checked(
    name: str, value: str, what: str, prevents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = Findings()
    found.add("environment", examination.environment)
    (problem,) = (each for each in found.problems if name in each.what)
    assert what in problem.what and problem.prevents == prevents and found.can_run == (not prevents)


def test_an_unknown_target_prevents_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TARGET", "pentium")
    found = Findings()
    found.add("cpu", examination.cpu, prevents=True)
    assert not found.can_run and "unknown target level 'pentium'" in whats(found)[0]
    assert "levels" in found.sections["cpu"], "what the CPU has is known nevertheless"


# -- CPU ------------------------------------------


@pytest.mark.system("proc")
def test_features_are_those_that_the_system_lists() -> None:
    facts = examination.cpu(Findings())
    flags = Path("/proc/cpuinfo").read_text().split("flags\t\t: ")[-1].split("\n")[0].split()
    for feature in ("avx2", "fma", "f16c", "avx512f"):
        assert (feature in flags) == (feature in [*facts["used"], *facts["unused"]]), feature


@pytest.mark.parametrize(
    ("name", "chosen", "host", "feature", "reason"),
    [
        ("avx512-vnni", target("avx512", "avx512f"), AVX512, "avx512vnni", "left out by avx512-vnni"),
        ("avx2", target("avx2", "avx2", "fma"), AVX512, "avx512f", "level avx512 on; the target avx2 is of level avx2"),
        ("native", target("avx512", *AVX512), AVX512 | TILES, "amx-tile", "does not permit tile registers"),
        ("avx512", target("avx512", *AVX512), AVX512 | TILES, "avx512bf16", "half the rate of f32"),
        ("native", target("avx512", *AVX512), AVX512 | {"avx512ifma"}, "avx512ifma", "no kernel"),
        ("native", target("avx2", "avx2"), AVX512 - {"avx512vl"}, "avx512bw", "this CPU lacks avx512vl"),
    ],
)
def test_reasons_why_a_feature_is_not_used(
    name: str, chosen: Target, host: frozenset[str], feature: str, reason: str
) -> None:
    use = feature_use(chosen, host, name)
    assert reason in use.unused[feature]
    assert not set(use.used) & (use.unused.keys() | set(use.lacking))


# -- cache ------------------------------------------


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("RLX_CACHE_DIR", str(folder))
    found = Findings()
    found.add("cache", examination.cache)
    assert found.sections["cache"]["usable"] is False and found.can_run
    assert "other users can write it" in whats(found)[0] and "RLX_CACHE_DIR" in str(found.problems[0].hint)


# -- packages and the page ------------------------------------------


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=999", "nothing-of-this-name>=1", 'pillow>=1; extra == "images"']
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    found = Findings()
    assert examination.packages(found) == {"nothing-of-this-name": None, "numpy": metadata.version("numpy")}
    assert [problem.prevents for problem in found.problems] == [False, True]
    assert found.problems[1].hint == 'pip install "nothing-of-this-name>=1"'


def test_the_page_has_every_section_and_the_problems() -> None:
    def broken(found: Findings) -> dict[str, object]:
        raise TargetError("it has no such thing", where="cpu")

    found = Findings()
    found.add("cpu", broken, prevents=True)
    page = "\n".join(lines(found))
    assert "  failed        cpu: it has no such thing" in page
    assert page.endswith("models cannot run: 1 problem prevents it")
