"""The pages of the reference: every name of `rlx.__all__` with its docstring. mkdocstrings reads it from the source."""

from __future__ import annotations

from dataclasses import dataclass

import rlx

MEMBERLESS = ("GemmaRunner", "Llama32Runner", "Qwen3Runner", "Qwen35Runner", "GemmaGenerator")  # as their base class


@dataclass(frozen=True)
class Group:
    """A page of the reference: the public names that live in some modules of the package."""

    title: str
    path: str
    modules: tuple[str, ...]
    about: str

    @property
    def names(self) -> list[str]:
        return [name for name in rlx.__all__ if name != "__version__" and self._holds(name)]

    def _holds(self, name: str) -> bool:
        home = home_of(name)
        return any(home == module or home.startswith(f"{module}.") for module in self.modules)


GROUPS = (
    Group(
        "Runners and generators",
        "reference/runners.md",
        ("rlx.runners",),
        "Open a model, and what it answers with. [Python](../python.md) introduces them with examples.",
    ),
    Group(
        "Text, prompts, choices",
        "reference/text.md",
        ("rlx.text", "rlx.prompt", "rlx.sampling", "rlx.grammar"),
        "Tokenizers, prompts with images, how tokens are chosen, and what an answer must look like.",
    ),
    Group(
        "The compiler",
        "reference/compiler.md",
        (
            "rlx.ir.graph",
            "rlx.ir.dims",
            "rlx.ir.custom",
            "rlx.profile",
            "rlx.backends",
            "rlx.compiler",
            "rlx.store",
            "rlx.engine",
            "rlx.passes",
            "rlx.scalars",
            "rlx.tracing",
        ),
        "Graphs, programs, targets, the compile cache and sessions. [The compiler](../compiler.md) shows them at work.",
    ),
    Group("Operations", "reference/ops.md", ("rlx.ops",), "The functions that make the nodes of a graph."),
    Group("Data types", "reference/dtypes.md", ("rlx.dtypes",), "Of tensors and of weights in files."),
    Group(
        "Errors",
        "reference/errors.md",
        ("rlx.errors",),
        "Every error that rlx raises is an `RlxError`. Its message says what is wrong, where, and the way out.",
    ),
)


def home_of(name: str) -> str:
    """The module that a public name lives in."""
    home = rlx._HOME.get(name, "rlx.errors")
    return f"rlx.{name}" if home.endswith(f".{name}") else home


def missing() -> list[str]:
    """Public names that no group takes."""
    taken = {name for group in GROUPS for name in group.names}
    return [name for name in rlx.__all__ if name not in taken and name != "__version__"]


def page_of_group(group: Group | None) -> str:
    """The Markdown of a group's page, or of the page that lists all names."""
    if group is None:
        return _index()
    text = f"# {group.title}\n\n{group.about}\n\n"
    if group.path.endswith("runners.md"):
        text += _entry("rlx.runners.model.Model", "What every runner has", inherited=True)
    return text + "".join(
        _entry(f"rlx.{name}", f"rlx.{name}", members=name not in MEMBERLESS) for name in sorted(group.names, key=_order)
    )


def _order(name: str) -> tuple[bool, str]:
    """Functions before classes."""
    return (not name.islower(), name.lower())


def _entry(path: str, title: str, *, members: bool = True, inherited: bool = False) -> str:
    lines = [f"::: {path}", "    options:", f'      heading: "{title}"', f'      toc_label: "{title}"']
    if not members:
        lines.append("      members: false")
    lines.append(f"      inherited_members: {str(inherited).lower()}")
    return "\n".join(lines) + "\n\n"


def _index() -> str:
    lines = ["# Reference", "", "Every public name of the package `rlx`, from its docstrings.", ""]
    for group in GROUPS:
        page = group.path.removeprefix("reference/")
        lines += [f"## [{group.title}]({page})", "", group.about, ""]
        lines += [", ".join(f"[`{name}`]({page}#rlx.{name})" for name in sorted(group.names, key=_order)), ""]
    return "\n".join(lines)
