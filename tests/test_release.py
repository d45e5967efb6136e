"""What a release needs: files that agree, notes, links that lead into the repository, and packages that install."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(autouse=True)
def tools() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


def tree(tmp_path: Path, heading: str) -> Path:
    """The files that a release looks at, with another heading in the changelog."""
    for name in ("pyproject.toml", "rlx/__init__.py", "CITATION.cff", "README.md", "docs/upgrading.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = "## 0.0.9 (2026-01-01)\n\n- Older.\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- New.\n- And newer.\n\n{old}")
    return tmp_path


def test_every_file_names_this_version(tmp_path: Path) -> None:
    import release

    version = PROJECT["version"]
    release.check(f"v{version}", tree(tmp_path, f"## {version} (2026-11-23)"))
    assert release.notes(tmp_path) == "- New.\n- And newer.\n"
    with pytest.raises(release.ReleaseError, match=r"the tag is v9\.9\.9"):
        release.check("v9.9.9", tmp_path)
    with pytest.raises(release.ReleaseError, match=r"CHANGELOG\.md has no line"):
        release.check(None, tree(tmp_path, f"## {version} (soon)"))
    (tmp_path / "CITATION.cff").write_text("version: 0.0.1\n")
    with pytest.raises(release.ReleaseError, match=r"CITATION\.cff does not say"):
        release.check(None, tmp_path)


def test_the_tree_is_consistent() -> None:
    import release

    release.check()


def test_the_readme_of_the_index_leads_into_the_repository() -> None:
    """PyPI shows it without the files around it."""
    import release

    made = release.absolute((ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/rlx")
    at = f"v{PROJECT['version']}"
    assert f"](https://example.org/rlx/blob/{at}/docs/start.md)" in made
    assert f"](https://example.org/rlx/raw/{at}/docs/terminal.svg)" in made
    assert f'srcset="https://example.org/rlx/raw/{at}/docs/report-summary-dark.webp"' in made
    left = re.findall(r'(?:\]\(|src="|srcset=")(?!https?:|#)[^)"\s]+', made)
    assert not left


@pytest.mark.parametrize("path", sorted([*ROOT.glob(".github/**/*.yml"), ROOT / "CITATION.cff"]), ids=lambda p: p.name)
def test_files_for_the_host_parse(path: Path) -> None:
    """And every script that a workflow runs is there."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    steps = [step for job in found.get("jobs", {}).values() for step in job["steps"]]
    for script in re.findall(r"(?:python )?((?:tools|\.ci)/\S+)", " ".join(str(step.get("run", "")) for step in steps)):
        assert (ROOT / script).is_file(), script
    used = [step["uses"] for step in steps if "uses" in step]
    assert all(re.search(r"@(v\d+|release/v\d+)$", name) for name in used)


def test_what_the_container_copies_is_there() -> None:
    """It cannot be built here; this reads it."""
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert copied and all((ROOT / name).exists() for names in copied for name in names)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["rlx"], "no root"
    (extras,) = re.findall(r"\"\.\[([\w,]+)\]\"", "\n".join(lines))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
