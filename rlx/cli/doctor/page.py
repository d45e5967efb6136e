"""`rlx doctor`: the findings as plain text, to paste into a bug report."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator

import click

from rlx.cli.command import Command, json_option
from rlx.cli.doctor import examination
from rlx.cli.doctor.examination import Facts, Findings
from rlx.cli.doctor.trial import trial
from rlx.cli.output import Bars, counted, printable, size, stdout


def examine(measure: bool = True) -> Findings:
    """Everything that is found on this machine. Nothing of it raises: what fails is a problem of the findings.

    Args:
        measure: also measure the read bandwidth and the arithmetic peaks, which takes some seconds.
    """
    findings = Findings()
    findings.add("versions", examination.versions)
    findings.add("environment", examination.environment)
    findings.add("packages", examination.packages)
    findings.add("extras", examination.extras)
    findings.add("cpu", examination.cpu, prevents=True)
    findings.add("threads", examination.threads, prevents=True)
    findings.add("memory", examination.memory)
    findings.add("cache", examination.cache)
    findings.add("models", examination.demo)
    findings.add("trial", trial(measure), prevents=True)
    return findings


_WIDTH, _HEAD = 100, 14

Row = tuple[str, str]


def lines(findings: Findings) -> Iterator[str]:
    """The lines of the report, problems last."""
    for title, facts in findings.sections.items():
        yield title
        if "error" in facts:
            yield from _row("failed", str(facts["error"]))
        else:
            for head, text in _SECTIONS[title](facts):
                yield from _row(head, text)
        yield ""
    yield from _problems(findings)


def _row(head: str, text: str) -> Iterator[str]:
    """A head and its text, whose further lines are indented."""
    room = _WIDTH - _HEAD - 2
    wrapped = textwrap.wrap(printable(text), room, break_on_hyphens=False, break_long_words=False) or [""]
    for i, line in enumerate(wrapped):
        yield f"  {head if i == 0 else '':{_HEAD}}{line}".rstrip()


def _problems(findings: Findings) -> Iterator[str]:
    if not findings.problems:
        yield "no problems found"
        return
    yield "problems"
    for problem in findings.problems:
        what = f"- {printable(problem.what)}"
        yield from textwrap.wrap(what, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        if problem.hint:
            yield from textwrap.wrap(
                printable(problem.hint), _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
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


_SECTIONS: dict[str, Callable[[Facts], Iterator[Row]]] = {
    "versions": _versions,
    "environment": _environment,
    "packages": _packages,
    "extras": _extras,
    "cpu": _cpu,
    "threads": _threads,
    "memory": _memory,
    "cache": _cache,
    "models": _models,
    "trial": _trial,
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
