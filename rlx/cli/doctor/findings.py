"""The findings of `rlx doctor`: sections of facts, and problems with their ways out.

A section that fails is itself a finding: the report goes on without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx.errors import RlxError

Facts = dict[str, Any]
"""A section: plain JSON values."""

REINSTALL = "Install rlx and its packages again: pip install --force-reinstall rlx"


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        what: the problem.
        hint: the way out; None where rlx knows none.
        prevents: whether it prevents models from running.
    """

    what: str
    hint: str | None = None
    prevents: bool = False


@dataclass
class Findings:
    """Everything that was found.

    Attributes:
        sections: the facts by section, in the order of the report; a section that failed has the one key "error".
    """

    sections: dict[str, Facts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, section: str, find: Callable[[Findings], Facts], *, prevents: bool = False) -> None:
        """Adds a section; whatever goes wrong in it becomes a problem.

        Args:
            prevents: whether models cannot run if it fails.
        """
        try:
            self.sections[section] = find(self)
        except Exception as error:
            self.sections[section] = {"error": self.refused(error, section, prevents=prevents)}

    @contextmanager
    def noting(self, where: str, *, prevents: bool = False) -> Iterator[None]:
        """Makes a problem of an error in the block, and goes on."""
        try:
            yield
        except Exception as error:
            self.refused(error, where, prevents=prevents)

    def refused(self, error: Exception, where: str, *, prevents: bool = False) -> str:
        """Adds an error as a problem; returns its text."""
        known = isinstance(error, RlxError)
        what = str(error) if known else f"{where}: {type(error).__name__}: {error}"
        hint = None
        if isinstance(error, ImportError):
            hint = REINSTALL
        self.problem(what, hint, prevents=prevents)
        return without_home(what)

    def problem(self, what: str, hint: str | None = None, *, prevents: bool = False) -> None:
        """Adds a problem, once for each text."""
        found = Problem(without_home(what), hint and without_home(hint), prevents)
        for i, known in enumerate(self.problems):
            if known.what == found.what:
                self.problems[i] = replace(known, prevents=known.prevents or prevents)
                return
        self.problems.append(found)

    @property
    def can_run(self) -> bool:
        """Whether models can run."""
        return not any(problem.prevents for problem in self.problems)

    def as_dict(self) -> Facts:
        """Plain JSON values: the sections, `problems`, and `can_run`."""
        problems = [asdict(problem) for problem in self.problems]
        return {**self.sections, "problems": problems, "can_run": self.can_run}


def without_home(text: str) -> str:
    """A text with the path of the home folder as `~`: it may hold a person's name."""
    home = os.path.expanduser("~")
    if home in ("~", "/", ""):
        return text
    return re.sub(rf"{re.escape(home.rstrip('/'))}(?=[/\s:'\"),.]|$)", "~", text)


def shown_path(path: Path | str) -> str:
    """A path with the home folder as `~`."""
    return without_home(str(path))
