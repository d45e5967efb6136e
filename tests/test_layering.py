"""The house rules that a reader relies on: imports go one way, nothing unpickles or evaluates, pieces stay small.

All of them read the source with `ast`; nothing here imports the modules it judges.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlx"
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
}

# Left to right: a part imports itself, its own group and everything before it. "" is rlx/__init__.py, the public API.
LAYERS = [
    {"errors"},
    {
        "platform", "env", "debug_output", "tracing", "arguments", "closing", "json_file", "lazy", "partial_file",
        "web_page", "notebook", "scalars",
    },
    {"ir"},
    {"passes"},
    {"profile", "sampling"},
    {"store"},
    {"backends"},
    {"report"},
    {"compiler"},
    {"models", "weights", "text", "demo"},
    {"vision"},
    {"grammar", "prompt"},
    {"engine"},
    {"runners", "export"},
    {""},
    {"serve"},
    {"ray"},
    {"cli"},
    {"__main__"},
]  # fmt: skip
RANK = {part: rank for rank, group in enumerate(LAYERS) for part in group}
ONLY = {"models": {"ir", "errors", "lazy"}}  # a model family is equations: it knows no files, no kernels, no runners

#: Modules that some systems lack, and the only places that may import them. A confined process imports nothing of rlx.
ONE_SYSTEM = {
    "_winapi", "fcntl", "grp", "msvcrt", "nt", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "winreg",
}  # fmt: skip
MAY_NAME_SYSTEMS = ("rlx.platform.", "rlx.text.confined_main")

MAX_FUNCTION, MAX_FILE, MAX_BYTES = 60, 700, 8_000_000
MAX_METHODS = 25
#: Classes that have more methods than that, and how many. Their number may only go down.
#: A public method of `Model` is one call of what it has; one of `Platform` is one call of the system.
LARGE_CLASSES = {"LmRunner": 26, "Model": 40, "Platform": 36}
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval", "exec", "builtins.eval", "builtins.exec", "yaml.load", "yaml.unsafe_load", "torch.load", "os.system",
    "os.popen", "pandas.read_pickle",
}  # fmt: skip


def part(module: str) -> str:
    """'rlx.backends.cpu.link' -> 'backends'; 'rlx' -> ''."""
    return [*module.split("."), ""][1]


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The full name behind `from X import ...`, relative ones resolved against the importing module."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join(base + ([node.module] if node.module else []))


def imports(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, module name) of every import, those under TYPE_CHECKING, in functions and by importlib included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in MODULES or base == "" else base
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def dotted(node: ast.AST) -> str:
    """'a.b.c' for a name or an attribute chain, '' for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def layering_error(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    if target.split(".")[0] in ("llvmlite", "numba") and module.startswith("rlx.backends.reference"):
        return "the reference has no compiler"
    if target.split(".")[0] != "rlx":
        return None
    here, there = part(module), part(target)
    for name in (here, there):
        if name not in RANK:
            return f"rlx.{name} has no place in the order: give it one in LAYERS"
    allowed = ONLY.get(here)
    if allowed is not None and there not in allowed | {here}:
        return f"rlx.{here} imports only {', '.join(f'rlx.{a}' for a in sorted(allowed))}"
    if target.startswith("rlx.backends.cpu") and here != "backends":
        return "a device's insides are its own: ask rlx.backends for the device"
    if target.startswith("rlx.backends.cpu") and module.startswith("rlx.backends.reference"):
        return "the reference stands alone"
    if target.startswith("rlx.backends") and here in ("ir", "passes"):
        return "ir and passes know no machine"
    return f"rlx.{there} comes after rlx.{here}" if RANK[there] > RANK[here] else None


def danger(node: ast.AST) -> str | None:
    """What makes this node one that runs foreign data, or None."""
    if not isinstance(node, ast.Call):
        return None
    name = dotted(node.func)
    if name in FORBIDDEN_CALLS:
        return f"{name}()"
    for keyword in node.keywords:
        if keyword.arg in ("shell", "allow_pickle") and not is_constant(keyword.value, False):
            return f"{name}({keyword.arg}=...)"
    return None


def is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring and decorators aside."""
    assert node.end_lineno is not None
    lines, first = node.end_lineno - node.lineno + 1, node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def walked(source: str) -> list[ast.AST]:
    """Every node of a source."""
    return list(ast.walk(ast.parse(source)))


@cache
def trees() -> dict[str, list[ast.AST]]:
    """The nodes of each module, in the order of their names."""
    return {module: walked(path.read_text(encoding="utf-8")) for module, path in sorted(MODULES.items())}


def place(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_the_order_is_the_one_that_contributors_read() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## How the tree is ordered")[2]
    order = [set(re.findall(r"\w+", group)) for group in page.split("```")[1].removeprefix("text").split("<-")]
    beside = set(re.findall(r"`(\w+)`", page.split("```")[2].partition(". `models`")[0]))
    assert [LAYERS[0] | LAYERS[1], *LAYERS[2:-5], *LAYERS[-4:-1]] == [beside, *order]


def test_imports_go_one_way() -> None:
    found = [
        f"{place(module, line)}: imports {target}: {error}"
        for module, nodes in trees().items()
        for line, target in imports(module, nodes)
        if (error := layering_error(module, target))
    ]
    assert not found, "\n".join(["imports against the order:", *found])


def test_parts_form_no_cycle() -> None:
    """Parts of one group (weights and text, say) may import each other in one direction only."""
    edges: dict[str, set[str]] = {}
    for module, nodes in trees().items():
        targets = {part(t) for _, t in imports(module, nodes) if t.split(".")[0] == "rlx"}
        edges.setdefault(part(module), set()).update(targets - {part(module)})
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"parts import each other in a circle: {' -> '.join(error.args[1])}")


def test_nothing_unpickles_evaluates_or_starts_a_shell() -> None:
    found = []
    for module, nodes in trees().items():
        found += [
            f"{place(module, line)}: imports {target}"
            for line, target in imports(module, nodes)
            if target.split(".")[0] in FORBIDDEN_MODULES
        ]
        for node in nodes:
            if what := danger(node):
                found.append(f"{place(module, getattr(node, 'lineno', 0))}: {what}")
    assert not found, "\n".join(found)


def test_what_only_some_systems_have_stands_in_platform() -> None:
    """For calls that a system lacks `make types-all` looks, which takes longer."""
    found = [
        f"{place(module, line)}: imports {target}; rlx.platform has it, or should"
        for module, nodes in trees().items()
        if not module.startswith(MAY_NAME_SYSTEMS)
        for line, target in imports(module, nodes)
        if target in ONE_SYSTEM
    ]
    assert not found, "\n".join(found)
    assert any(target == "fcntl" for _, target in imports("rlx.platform.posix", trees()["rlx.platform.posix"]))


def test_functions_and_files_stay_small() -> None:
    found = []
    for module, nodes in trees().items():
        lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE:
            found.append(f"{place(module, 1)}: {lines} lines (the budget is {MAX_FILE})")
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION:
                found.append(f"{place(module, node.lineno)}: {node.name} has {code_lines(node)} lines")
    assert not found, "\n".join(found)


def test_classes_stay_small() -> None:
    found = []
    for module, nodes in trees().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if methods > LARGE_CLASSES.get(node.name, MAX_METHODS):
                    found.append(f"{place(module, node.lineno)}: {node.name} has {methods} methods")
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files that git tracks; a tree without git (an unpacked sdist) has nothing to check."""
    try:
        listing = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, stderr=subprocess.DEVNULL, timeout=60)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_is_large(tracked: list[Path]) -> None:
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in tracked if p.stat().st_size > MAX_BYTES}
    assert not large


def test_no_tracked_file_names_a_machine(tracked: list[Path]) -> None:
    """Absolute paths of whoever's machine a file was written on, in text and in binary files alike."""
    pattern = re.compile(rb"(?<![\w.:/~$)}*-])/(?:work|root|home|Users|tmp/brief)/[\w.-]+|\.\./" + rb"shared\b")
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in tracked
        for match in pattern.finditer(path.read_bytes())
    ]
    assert not found, "\n".join(found)
