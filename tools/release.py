"""Makes a release: checks that it is ready, prints its notes, builds what PyPI gets and tries it in a new environment.

    python tools/release.py check [--tag v0.2.0]       # versions agree; with a tag, the changelog has a date for it
    python tools/release.py date [YYYY-MM-DD]          # writes the date (by default today's) over "unreleased"
    python tools/release.py notes                      # the text of the release: this version's part of the changelog
    python tools/release.py build [--repository URL]   # dist/: wheel and sdist, checked, installed and run

PyPI shows the README without the repository around it. So `build --repository URL` works on a copy of the tree in which
the README's links lead to the repository, and the metadata name it.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "unreleased"  # in the changelog, in the place of a version's date
_LINK = re.compile(r'(?:(?<=\]\()|(?<=src=")|(?<=href=")|(?<=srcset="))(?![\w+.-]+:|#)([^)"\s]+)(?=[)"])')
_PICTURES = (".svg", ".webp", ".png")


class ReleaseError(Exception):
    """The tree is not ready for a release."""


def version(root: Path = ROOT) -> str:
    """The version of the project."""
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def notes(root: Path = ROOT) -> str:
    """This version's part of the changelog, without its heading."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version(root))} .*?$\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no part for {version(root)}")
    return found[1].strip() + "\n"


def check(tag: str | None = None, root: Path = ROOT) -> None:
    """Checks that every file names this version. With a tag, which is a release, it must be this version, and dated.

    Raises:
        ReleaseError: it says which file names what.
    """
    here = version(root)
    if tag is not None and tag.removeprefix("v") != here:
        raise ReleaseError(f"the tag is {tag}, but pyproject.toml says {here}")
    named = {
        "rlx/__init__.py": f'__version__ = "{here}"',
        "CITATION.cff": f"version: {here}",
        "README.md": f"Version {here}",
        "docs/upgrading.md": f"to {'.'.join(here.split('.')[:2])}",
    }
    for path, text in named.items():
        if text not in (root / path).read_text(encoding="utf-8"):
            raise ReleaseError(f"{path} does not say {text!r}")
    if _state(root) == UNRELEASED and tag is not None:
        raise ReleaseError(
            f"CHANGELOG.md says that {here} is unreleased: `python tools/release.py date` writes the date"
        )


def set_date(date: str | None = None, root: Path = ROOT) -> str:
    """Writes the date of the release, by default today's, over "unreleased" in the changelog. Returns the heading.

    Raises:
        ReleaseError: `date` is none; the changelog has one already.
    """
    try:
        day = datetime.date.fromisoformat(date) if date else datetime.date.today()
    except ValueError:
        raise ReleaseError(f"{date!r} is no date: write it as YYYY-MM-DD") from None
    here, state = version(root), _state(root)
    if state != UNRELEASED:
        raise ReleaseError(f"CHANGELOG.md says that {here} was released on {state}")
    path, heading = root / "CHANGELOG.md", f"## {here} ({day})"
    text = path.read_text(encoding="utf-8").replace(f"## {here} ({UNRELEASED})", heading, 1)
    path.write_text(text, encoding="utf-8")
    return heading


def _state(root: Path) -> str:
    """What the changelog says of this version: its date, or "unreleased"."""
    here, text = version(root), (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(here)} \((\d{{4}}-\d\d-\d\d|{UNRELEASED})\)$", text, re.MULTILINE)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no line '## {here} (YYYY-MM-DD)' or '## {here} ({UNRELEASED})'")
    return found[1]


def absolute(readme: str, repository: str) -> str:
    """The README with links into the repository: pictures as files, all else as pages."""

    def link(found: re.Match[str]) -> str:
        path = found[1]
        return f"{repository}/{'raw' if path.endswith(_PICTURES) else 'blob'}/v{version()}/{path}"

    return _LINK.sub(link, readme)


def build(repository: str | None, out: Path) -> list[Path]:
    """Wheel and sdist, checked by twine. Each is installed into an environment of its own and answers a question."""
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "rlx"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, files.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
        if repository:
            readme, project = tree / "README.md", tree / "pyproject.toml"
            readme.write_text(absolute(readme.read_text(encoding="utf-8"), repository), encoding="utf-8")
            urls = f'[project.urls]\nRepository = "{repository}"\nIssues = "{repository}/issues"\n'
            urls += f'Changelog = "{repository}/blob/v{version()}/CHANGELOG.md"\n'
            project.write_text(project.read_text(encoding="utf-8") + "\n" + urls, encoding="utf-8")
        _run(sys.executable, "-m", "build", "--outdir", str(out), str(tree))
    made = sorted(out.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, made))
    for file in made:
        _try(file)
    return made


def _try(file: Path) -> None:
    """Installs a distribution into a fresh environment and lets the demo model answer there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python")
        _run(python, "-m", "pip", "install", "--quiet", str(file), cwd=folder)
        named = _run(
            python, "-c", "import rlx, importlib.metadata as m; print(rlx.__version__, m.version('rlx'))", cwd=folder
        )
        if named.split() != [version()] * 2:
            raise ReleaseError(f"{file.name}: its versions are {named.strip()}, not {version()}")
        told = _run(python, "-m", "rlx", "run", "What is 27 + 45?", "--no-stdin", cwd=folder)
        if "27 + 45 = 72." not in told:
            raise ReleaseError(f"{file.name}: the demo model says {told!r}")


def _run(*command: str, cwd: Path | str = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("--tag", help="the tag of the release")
    commands.add_parser("date").add_argument("date", nargs="?", help="YYYY-MM-DD; today")
    commands.add_parser("notes")
    builder = commands.add_parser("build")
    builder.add_argument("--repository", help="address of the repository, for links in what PyPI shows")
    builder.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the files (dist)")
    args = parser.parse_args()
    try:
        if args.command == "check":
            check(args.tag)
        elif args.command == "date":
            print(set_date(args.date))
        elif args.command == "notes":
            print(notes(), end="")
        else:
            print("\n".join(map(str, build(args.repository, args.out.resolve()))))
    except ReleaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
