"""`rlx doctor`: what rlx finds on this machine, what it uses of it, and what keeps it from running well.

It examines installation, compile cache, CPU, threads and memory, and says the ways out of problems; the findings are
plain text, to paste into a bug report. It compiles and runs a small graph, and measures the machine, in a process of
its own, with this module as the program: native code that does not fit the CPU ends the process that runs it.
"""

from __future__ import annotations

import json
import os
import platform as interpreter
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from platform import machine as this_machine
from typing import TYPE_CHECKING, Any

import click

import rlx
from rlx import SEQ, __version__, backends, env, ops, platform
from rlx import demo as models
from rlx.arguments import did_you_mean
from rlx.backends.host import HOST
from rlx.cli.command import Command, json_option
from rlx.cli.output import Bars, counted, printable, size, stdout, width
from rlx.compiler.compile import Compiler, worker_count
from rlx.compiler.tuned import find, machine
from rlx.engine.kv.pool import available_memory
from rlx.errors import CacheError, RlxError
from rlx.platform import cpu_count, usable_cpus
from rlx.store.folder import Folder
from rlx.store.store import Store, default_root

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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

    @contextmanager
    def warned(self, hint: str | None = None) -> Iterator[None]:
        """Makes problems of the warnings in the block."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            self.problem(str(warning.message), hint)

    def refused(self, error: Exception, where: str, *, prevents: bool = False) -> str:
        """Adds an error as a problem; returns its text."""
        known = isinstance(error, RlxError)
        what = str(error) if known else f"{where}: {type(error).__name__}: {error}"
        self.problem(what, REINSTALL if isinstance(error, ImportError) else None, prevents=prevents)
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


_NOT_FOR_USERS = ("test", "dev", "docs")
_VERIFIED_BYTES = 256 << 20  # a larger cache takes seconds to check
_PROBE = "doctor.tmp"
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def versions(findings: Findings) -> Facts:
    """rlx, Python and the system."""
    package = Path(__file__).resolve().parents[2]
    libc = " ".join(interpreter.libc_ver()) or None
    return {
        "rlx": __version__,
        "folder": shown_path(package),
        "python": f"{interpreter.python_implementation()} {interpreter.python_version()}",
        "executable": shown_path(sys.executable),
        "system": f"{interpreter.system()} {interpreter.release()}",
        "machine": interpreter.machine(),
        "libc": libc,
    }


def packages(findings: Findings) -> Facts:
    """Name -> installed version of every package that rlx needs; those that are missing or do not fit are problems."""
    found: Facts = {}
    for needed in _needed():
        version = found[needed.name] = _version(needed.name)
        requirement, hint = f"rlx needs {needed.name}{needed.specifier}", f'pip install "{needed}"'
        if version is None:
            findings.problem(f"{requirement}, which is not installed", hint, prevents=True)
        elif not needed.specifier.contains(version, prereleases=True):
            findings.problem(f"{requirement}; {version} is installed", hint)
    return dict(sorted(found.items(), key=lambda row: row[0].lower()))


def extras(findings: Findings) -> Facts:
    """Extra -> whether it is installed, which packages are missing, and the command that installs it."""
    found: Facts = {}
    for extra in metadata.metadata("rlx").get_all("Provides-Extra") or []:
        if extra in _NOT_FOR_USERS:
            continue
        missing = sorted({each.name for each in _needed(extra) if _version(each.name) is None})
        command = f'pip install "rlx[{extra}]"'
        found[extra] = {"installed": not missing, "missing": missing, "install": command}
    return found


def _needed(extra: str = "") -> Iterator[Requirement]:
    """What rlx needs on this machine; of an extra, what it adds, with what the extras add that it names."""
    from packaging.requirements import Requirement

    for each in map(Requirement, metadata.requires("rlx") or []):
        of_extra = each.marker is not None and "extra" in str(each.marker)
        if of_extra != bool(extra) or not (each.marker is None or each.marker.evaluate({"extra": extra})):
            continue
        if each.name != "rlx":
            yield each
        for other in each.extras if each.name == "rlx" else ():
            yield from _needed(other)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment(findings: Findings) -> Facts:
    """The variables that are set: those of rlx, checked, and NUMBA_*, which change compiled code. Keys are hidden."""
    known = {variable.name for variable in env.VARIABLES}
    for name in sorted(os.environ):
        if name.startswith("RLX_") and name not in known:
            hint = did_you_mean(name, sorted(known))
            findings.problem(f"the environment variable {name} is none of rlx, and has no effect", hint)
    checks: tuple[Callable[[], Any], ...] = (
        env.cache_policy, env.cache_dir, env.cache_limit, env.threads, env.compile_ahead, env.verify, env.jit,
        env.dynamic_decode, env.debug_level,
    )  # fmt: skip
    for check in checks:
        with findings.noting("environment", prevents=True):
            check()
    with findings.noting("environment"):
        if env.verify():
            findings.problem("RLX_VERIFY=1 makes every step many times slower", "unset it when nothing is verified")
    with findings.noting("environment"):
        if not env.jit():
            findings.problem("RLX_JIT=0 computes kernels as Python functions: very slow", "unset it outside a debugger")
    names = sorted(n for n in os.environ if n.startswith(("RLX_", "NUMBA_")) and os.environ[n].strip())
    return {name: _shown_value(name) for name in names}


def _shown_value(name: str) -> str:
    hidden = any(word in name for word in _SECRET)
    return "(hidden)" if hidden else shown_path(os.environ[name])


def cache(findings: Findings) -> Facts:
    """The compile cache: where it is, how large, whether it is sound and can be written."""
    policy = env.cache_policy()
    if policy == "off":
        return {"policy": policy}
    root = default_root()
    facts: Facts = {"policy": policy, "folder": shown_path(root)}
    try:
        store = Store(root)
    except CacheError as error:
        hint = f"{error.hint}; until then every process compiles anew"
        findings.problem(f"the compile cache {root} is not used: {error.what}", hint)
        return facts | {"usable": False}
    stats = store.stats()
    writable = _writable(store, findings)
    facts |= {"usable": True, "writable": writable, "entries": stats.entries}
    facts |= {"bytes": stats.nbytes, "limit_bytes": stats.limit, "free_bytes": shutil.disk_usage(root).free}
    facts["damaged"] = _damaged(store, stats.nbytes, findings)
    with findings.noting("tuning"):
        facts["tuning"] = _tuning(store, findings)
    return facts


def _writable(store: Any, findings: Findings) -> bool:
    try:
        with Folder(store.root) as root:
            root.replace_file(_PROBE, b"")
            root.unlink(_PROBE)
    except OSError as error:
        hint = "make it writable for this user, or choose another one with RLX_CACHE_DIR"
        findings.problem(f"the compile cache {store.root} cannot be written: {error.strerror or error}", hint)
        return False
    return True


def _damaged(store: Any, nbytes: int, findings: Findings) -> int | None:
    """The number of damaged entries; None where there is too much to check in a moment."""
    if nbytes > _VERIFIED_BYTES:
        return None
    damaged = len(store.verify(discard=False))
    if damaged:
        findings.problem(f"{damaged} entries of the compile cache are damaged", "rlx cache verify removes them")
    return damaged


def _tuning(store: Any, findings: Findings) -> str:
    """Where the machine-dependent numbers in kernels come from."""
    with findings.warned():
        found = find(store, backends.backend().target())
    return f"measured on {found.date}" if found else "the level's defaults; rlx tune measures"


def demo(findings: Findings) -> Facts:
    """Whether the models inside the package are there."""
    found: Facts = {}
    for name in models.FILES:
        with findings.noting(name):
            found[name] = models.path(name).stat().st_size
    return found


_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_BUSY = 0.5  # load per CPU from which measurements say little


def cpu(findings: Findings) -> Facts:
    """The processor, the target, and the features that its code uses and does not use."""
    device = backends.backend()
    facts: Facts = {"model": machine(), "architecture": this_machine(), "levels": device.levels()}
    with findings.noting("RLX_TARGET", prevents=True):
        target = device.target()
        use, triple = device.feature_use(target), target.describe()["triple"]
        facts |= {"level": target.level, "chosen_by": env.target() and "RLX_TARGET", "triple": triple}
        facts |= {"used": list(use.used), "unused": use.unused, "lacking": list(use.lacking)}
        _widest(findings, target.level, facts["levels"])
    return facts


def _widest(findings: Findings, level: str, levels: list[str]) -> None:
    """Notes a level that the CPU has and the target leaves out."""
    if level == levels[-1]:
        return
    if env.target():
        findings.problem(
            f"RLX_TARGET={env.target()} chooses level {level}, this CPU has {levels[-1]}", "unset RLX_TARGET"
        )
    elif levels[-1] == "amx":
        hint = "ask whoever runs this machine or container for it (Linux 5.16 or newer; arch_prctl must be allowed)"
        findings.problem("the operating system does not permit the CPU's tile registers to this process", hint)


def threads(findings: Findings) -> Facts:
    """The number of worker threads, and why it is that."""
    with findings.warned("unset RLX_THREADS"):
        workers = worker_count()
    system, logical, cores = platform.current(), os.cpu_count() or 1, cpu_count()
    quota, allowed = system.cpu_quota(), len(system.allowed_cpus())
    facts: Facts = {
        "workers": workers,
        "logical_cpus": logical,
        "allowed_cpus": allowed,
        "cores": cores,
        "quota_cpus": None if quota == float("inf") else quota,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    facts["reason"] = _reason(facts)
    if facts["load"] is not None and facts["load"] > _BUSY * usable_cpus():
        findings.problem(
            f"the machine is busy: load {facts['load']:.1f} on {usable_cpus():g} CPUs", "measure when it is idle"
        )
    return facts


def _reason(facts: Facts) -> str:
    """Why there are so many workers."""
    if env.threads() is not None:
        return "RLX_THREADS says so"
    quota, cores, allowed, logical = (facts[n] for n in ("quota_cpus", "cores", "allowed_cpus", "logical_cpus"))
    if quota is not None and int(quota) <= cores:
        return f"the cgroup of this process may use {quota:g} CPUs"
    which = "one for each core" if allowed == logical else f"one for each core among {allowed} of {logical} CPUs"
    smt = "; hyper-threads share the arithmetic of a core" if allowed > cores else ""
    return f"{which}{', which is the affinity of this process' if allowed < logical else ''}{smt}"


def memory(findings: Findings) -> Facts:
    """Memory of the machine and of this process, and huge pages."""
    huge = platform.current().huge_pages()
    if huge == "never":
        hint = f"echo madvise > {_HUGE_PAGES} (as root); weights are then read with fewer misses of the TLB"
        findings.problem("transparent huge pages are off", hint)
    return {
        "total_bytes": platform.current().total_memory(),
        "available_bytes": available_memory(HOST),
        "huge_pages": huge,
    }


def examine(measure: bool = True) -> Findings:
    """Everything that is found on this machine. Nothing of it raises: what fails is a problem of the findings.

    Args:
        measure: also measure the read bandwidth and the arithmetic peaks, which takes some seconds.
    """
    findings = Findings()
    for name, (facts_of, _, prevents) in _SECTIONS.items():
        findings.add(name, facts_of, prevents=prevents)
    findings.add("trial", trial(measure), prevents=True)
    return findings


_WIDTH, _HEAD = 100, 14  # columns, at most

Row = tuple[str, str]


def lines(findings: Findings) -> Iterator[str]:
    """The lines of the report, problems last."""
    for title, facts in findings.sections.items():
        yield title
        if "error" in facts:
            yield from _row("failed", str(facts["error"]))
        else:
            rows = _SECTIONS[title][1] if title in _SECTIONS else _trial
            for head, text in rows(facts):
                yield from _row(head, text)
        yield ""
    yield from _problems(findings)


def _row(head: str, text: str) -> Iterator[str]:
    """A head and its text, whose further lines are indented."""
    for i, line in enumerate(_wrapped(text, _HEAD + 2) or [""]):
        yield f"  {head if i == 0 else '':{_HEAD}}{line}".rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    room = max(min(_WIDTH, width()) - indent, 20)
    return textwrap.wrap(printable(text), room, break_on_hyphens=False, break_long_words=False)


def _problems(findings: Findings) -> Iterator[str]:
    if not findings.problems:
        yield "no problems found"
        return
    yield "problems"
    for problem in findings.problems:
        for i, line in enumerate([*_wrapped(problem.what, 4), *_wrapped(problem.hint or "", 4)]):
            yield f"  {' ' if i else '-'} {line}"
    count = sum(problem.prevents for problem in findings.problems)
    yield ""
    if count:
        yield f"models cannot run: {counted(count, 'problem')} {'prevents' if count == 1 else 'prevent'} it"
    else:
        yield "models can run"


def _versions(facts: Facts) -> Iterator[Row]:
    yield "rlx", f"{facts['rlx']} in {facts['folder']}"
    yield "python", f"{facts['python']}, {facts['executable']}"
    yield "system", ", ".join(filter(None, (facts["system"], facts["machine"], facts["libc"])))


def _environment(facts: Facts) -> Iterator[Row]:
    if not facts:
        yield "", "no variable of rlx is set"
    yield from ((f"{name} ", value) for name, value in facts.items())


def _packages(facts: Facts) -> Iterator[Row]:
    yield "", ", ".join(f"{name} {version or 'missing'}" for name, version in facts.items())


def _extras(facts: Facts) -> Iterator[Row]:
    for name, extra in facts.items():
        missing = f"not installed, {', '.join(extra['missing'])} missing: {extra['install']}"
        yield name, "installed" if extra["installed"] else missing


def _cpu(facts: Facts) -> Iterator[Row]:
    yield "model", f"{facts['model']} ({facts['architecture']})"
    if "level" not in facts:
        yield "levels", " ".join(facts["levels"])
        return
    chosen = "the widest of" if facts["chosen_by"] is None else f"{facts['chosen_by']} chooses it among"
    yield "level", f"{facts['level']}, {chosen} {' '.join(facts['levels'])}"
    yield "used", " ".join(facts["used"]) or "only what every CPU of this architecture has"
    reasons = defaultdict(list)
    for feature, reason in facts["unused"].items():
        reasons[reason].append(feature)
    for i, (reason, features) in enumerate(reasons.items()):
        yield "not used" if i == 0 else "", f"{' '.join(features)}: {reason}"
    yield "not there", " ".join(facts["lacking"]) or "nothing that rlx would use"


def _threads(facts: Facts) -> Iterator[Row]:
    yield "workers", f"{facts['workers']}: {facts['reason']}"
    quota = "none" if facts["quota_cpus"] is None else f"{facts['quota_cpus']:g} CPUs"
    cpus = f"{facts['logical_cpus']} logical, {facts['allowed_cpus']} allowed, {counted(facts['cores'], 'core')}"
    yield "CPUs", f"{cpus}, quota {quota}"
    if facts["load"] is not None:
        yield "load", f"{facts['load']:.1f} in the last minute"


def _memory(facts: Facts) -> Iterator[Row]:
    total = "" if facts["total_bytes"] is None else f" of {size(facts['total_bytes'])}"
    yield "memory", f"{size(facts['available_bytes'])}{total} may still be used by this process"
    yield "huge pages", facts["huge_pages"] or "the system does not say"


def _cache(facts: Facts) -> Iterator[Row]:
    yield "policy", facts["policy"]
    if "folder" not in facts:
        return
    usable = "" if facts["usable"] else ", not used"
    yield "folder", facts["folder"] + usable + ("" if facts.get("writable", True) else ", not writable")
    if not facts["usable"]:
        return
    held = f"{counted(facts['entries'], 'entry')}, {size(facts['bytes'])} of {size(facts['limit_bytes'])}"
    yield "size", f"{held}; {size(facts['free_bytes'])} free on the disk"
    damaged = facts["damaged"]
    checked = "not checked, it is large: rlx cache verify" if damaged is None else f"{damaged} damaged"
    yield "entries", checked
    if "tuning" in facts:
        yield "tuning", facts["tuning"]


def _models(facts: Facts) -> Iterator[Row]:
    for name, nbytes in facts.items():
        yield name, size(nbytes)


def _trial(facts: Facts) -> Iterator[Row]:
    how = "loaded from the cache" if facts["cached"] else "compiled"
    yield "small program", f"{how} in {facts['seconds']:.2f} s, its result is right"
    if "read_gb_per_s" in facts:
        read = f"{facts['read_gb_per_s']:.1f} GB/s of {size(facts['read_bytes'])}"
        yield "reading", f"{read}, {counted(facts['threads'], 'thread')}"
        yield "arithmetic", ", ".join(f"{kind} {rate:.0f} GOP/s" for kind, rate in facts["peak_gop_per_s"].items())


#: Section -> what finds its facts, what makes rows of them, and whether models cannot run if it fails. A trial follows.
_SECTIONS: dict[str, tuple[Callable[[Findings], Facts], Callable[[Facts], Iterator[Row]], bool]] = {
    "versions": (versions, _versions, False),
    "environment": (environment, _environment, False),
    "packages": (packages, _packages, False),
    "extras": (extras, _extras, False),
    "cpu": (cpu, _cpu, True),
    "threads": (threads, _threads, True),
    "memory": (memory, _memory, False),
    "cache": (cache, _cache, False),
    "models": (demo, _models, False),
}


UNHEALTHY = 2  # exit code where something prevents models from running


@click.command(cls=Command)
@click.option("--measure/--no-measure", default=True, help="Measure memory bandwidth and arithmetic. Default: measure.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, measure: bool, as_json: bool) -> None:
    """Show what rlx finds on this machine, for bug reports.

    Versions, instructions of the CPU that are used and not used, threads, memory, the speed of the machine, the
    compile cache, extras, environment variables, and problems with their ways out. A small program is compiled and
    run. Keys are hidden, and the home folder is shown as ~. The exit code is 2 if something prevents models from
    running.
    """
    with Bars("examining the machine"):
        findings = examine(measure)
    if as_json:
        click.echo(json.dumps(findings.as_dict()))
    else:
        stdout().writelines(f"{line}\n" for line in lines(findings))
    if not findings.can_run:
        ctx.exit(UNHEALTHY)


_SECONDS = 180  # after which a trial counts as hanging
_CEILING = 1e-4  # of the result's largest value: f32 arithmetic in another order
_HINT = "RLX_TARGET=generic rlx doctor shows whether it is the instructions; please report it"
_MEASURED_BYTES = 512 << 20  # several times the last-level cache


def trial(measure: bool) -> Callable[[Findings], Facts]:
    """The section about a trial; `measure` adds the read bandwidth and the arithmetic peaks."""

    def run(findings: Findings) -> Facts:
        command = [sys.executable, "-m", "rlx.cli.doctor", *(["--measure"] if measure else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            what = f"a small program did not end within {_SECONDS} s"
            findings.problem(what, "RLX_THREADS=1 rlx doctor shows whether it is the threads", prevents=True)
            return {"error": what}
        try:
            facts: Facts = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            facts = {"error": _ended(done.returncode, done.stderr)}
        if "error" in facts:
            what = f"a small program does not run: {facts['error']}"
            known = any(problem.what == facts["error"] for problem in findings.problems)
            findings.problem(facts["error"] if known else what, facts.pop("hint", _HINT), prevents=True)
        return facts

    return run


def _ended(code: int, stderr: str) -> str:
    """How a process ended that said nothing."""
    lines = stderr.strip().splitlines()
    if code >= 0:
        return lines[-1] if lines else f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"its process ended with signal {name}"


def main() -> None:
    """Prints the facts as one line of JSON."""
    try:
        facts = _run()
        if "--measure" in sys.argv[1:] and env.jit():
            facts |= _measured()
    except RlxError as error:
        facts = {"error": str(error), "hint": None}  # the message says the way out
    except ImportError as error:
        facts = {"error": f"{type(error).__name__}: {error}", "hint": REINSTALL}
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(facts))


def _run() -> Facts:
    """Compiles a gated linear layer and compares its result with NumPy's."""
    import numpy as np

    graph = rlx.Graph("doctor")
    x = graph.input("x", [SEQ, 64])
    gate, up = (ops.linear(x, graph.weight(name, [96, 64])) for name in ("gate", "up"))
    graph.output("y", ops.silu(gate) * up)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((96, 64)).astype(np.float32) for name in ("gate", "up")}
    rows = rng.standard_normal((8, 64)).astype(np.float32)
    start = time.perf_counter()
    with rlx.compile(graph, bind=weights) as layer:
        seconds = time.perf_counter() - start
        found, cached = layer(x=rows)["y"], bool(layer.stats["cached"])
    wide = rows.astype(np.float64)
    gated = wide @ weights["gate"].T
    expected = gated / (1 + np.exp(-gated)) * (wide @ weights["up"].T)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error < _CEILING:
        raise ArithmeticError(f"its result is wrong: relative error {error:.1e}")
    return {"error_of_result": error, "seconds": seconds, "cached": cached}


def _measured() -> Facts:
    """The read bandwidth and the arithmetic peaks of all workers."""
    compiler = Compiler()
    workers = compiler.workers(worker_count())
    try:
        nbytes = min(_MEASURED_BYTES, available_memory(HOST) // 4)
        bandwidth = compiler.backend.bandwidth(workers, nbytes)
        peaks = compiler.backend.peaks(workers, compiler)
    finally:
        workers.close()
    return {"threads": workers.n, "read_gb_per_s": bandwidth, "read_bytes": nbytes, "peak_gop_per_s": peaks}


if __name__ == "__main__":
    main()
